// The entry points for tvm-ffi: tensors in, and nothing of torch's ABI.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include "api.h"

namespace histate {

using tvm::ffi::TensorView;

inline int32_t kind_of(const TensorView& tensor) {
  const DLDataType type = tensor.dtype();
  if (type.code == kDLFloat && type.bits == 32) return FLOAT32;
  if (type.code == kDLBfloat && type.bits == 16) return BFLOAT16;
  if (type.code == kDLFloat && type.bits == 16) return FLOAT16;
  TVM_FFI_THROW(TypeError) << "states are float32, bfloat16 or float16";
  return 0;
}

// Checks that one layer of one slot is contiguous, and returns its bytes.
inline int64_t row_bytes(const TensorView& tensor) {
  int64_t bytes = tensor.dtype().bits / 8;
  for (int axis = tensor.ndim() - 1; axis >= 2; --axis) {
    if (tensor.size(axis) != 1 && tensor.stride(axis) * (tensor.dtype().bits / 8) != bytes)
      TVM_FFI_THROW(ValueError) << "one layer of one slot must be contiguous";
    bytes *= tensor.size(axis);
  }
  return bytes;
}

inline char* bytes_at(const TensorView& tensor) { return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(); }

// The ABI may give an axis of length 1 any stride.
inline int64_t stride_of(const TensorView& tensor, int axis) {
  return tensor.size(axis) == 1 ? 0 : tensor.stride(axis) * (tensor.dtype().bits / 8);
}

inline Pool pool_of(const TensorView& temporal, const TensorView& conv) {
  if (temporal.ndim() != 5 || conv.ndim() < 3 || temporal.size(0) != conv.size(0) || temporal.size(1) != conv.size(1))
    TVM_FFI_THROW(ValueError) << "a pool is temporal [L, slots, HV, V, K] and conv [L, slots, dim, W-1]";
  Pool pool{};
  pool.temporal = bytes_at(temporal);
  pool.conv = bytes_at(conv);
  pool.layers = temporal.size(0), pool.slots = temporal.size(1);
  pool.heads = temporal.size(2), pool.rows = temporal.size(3), pool.columns = temporal.size(4);
  pool.temporal_kind = kind_of(temporal), pool.conv_kind = kind_of(conv);
  row_bytes(temporal);
  pool.conv_bytes = row_bytes(conv);
  pool.temporal_layer_stride = stride_of(temporal, 0), pool.temporal_slot_stride = stride_of(temporal, 1);
  pool.conv_layer_stride = stride_of(conv, 0), pool.conv_slot_stride = stride_of(conv, 1);
  return pool;
}

inline const int64_t* numbers_of(const TensorView& tensor) {
  if (tensor.ndim() != 1 || tensor.dtype().code != kDLInt || tensor.dtype().bits != 64 || !tensor.IsContiguous())
    TVM_FFI_THROW(TypeError) << "slots and sources are contiguous int64 tensors";
  return reinterpret_cast<const int64_t*>(bytes_at(tensor));
}

inline void throw_if(int code) {
  if (code > 0) TVM_FFI_THROW(RuntimeError) << histate_text_of(code) << " (cudaError " << code << ")";
  if (code < 0) TVM_FFI_THROW(ValueError) << histate_text_of(code);
}

inline bool on_device(const TensorView& tensor) { return tensor.device().device_type == kDLCUDA; }

// Rows of bytes; one row alone may have any stride.
inline int64_t record_stride(const TensorView& records) {
  if (records.ndim() != 2 || records.dtype().bits != 8 || (records.size(1) > 1 && records.stride(1) != 1))
    TVM_FFI_THROW(TypeError) << "records are bytes [n, record bytes]";
  return records.size(0) == 1 ? aligned(records.size(1)) : records.stride(0);
}

inline void pack_tensors(TensorView temporal, TensorView conv, TensorView slots, TensorView records, TensorView flags,
                         int64_t encoding, int64_t most_blocks, int64_t stream) {
  if (records.size(0) != slots.size(0) || flags.size(0) != slots.size(0) || flags.dtype().bits != 32)
    TVM_FFI_THROW(ValueError) << "pack needs one record and one int32 flag per slot";
  const Pool pool = pool_of(temporal, conv);
  throw_if(histate_pack(&pool, numbers_of(slots), on_device(slots), slots.size(0), bytes_at(records),
                        record_stride(records), reinterpret_cast<int32_t*>(bytes_at(flags)), static_cast<int>(encoding),
                        most_blocks, reinterpret_cast<void*>(stream)));
}

inline void unpack_tensors(TensorView temporal, TensorView conv, TensorView slots, TensorView sources, TensorView records,
                           int64_t first, int64_t last, int64_t encoding, int64_t most_blocks, int64_t stream) {
  if (sources.size(0) != slots.size(0)) TVM_FFI_THROW(ValueError) << "unpack needs one source per slot";
  if (on_device(sources)) TVM_FFI_THROW(ValueError) << "sources are on the host";
  const Pool pool = pool_of(temporal, conv);
  throw_if(histate_unpack(&pool, numbers_of(slots), on_device(slots), numbers_of(sources), slots.size(0),
                          bytes_at(records), record_stride(records), records.size(0), first, last,
                          static_cast<int>(encoding), most_blocks, reinterpret_cast<void*>(stream)));
}

}  // namespace histate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, histate::pack_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, histate::unpack_tensors);
