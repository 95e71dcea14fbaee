// The entry points in C: they check, cut a request into launches of up to 64 targets, and call
// `run_pack` and `run_unpack` of the file that includes this one (bind.cu for a GPU, host.cpp for the CPU).
//
// All return 0, a cudaError_t above 0, or one of `Refusal`. Nothing waits for the device.
#pragma once
#include <algorithm>
#include "api.h"

namespace histate {

enum Refusal : int {
  RECORDS_NOT_ALIGNED = -1,
  NO_SUCH_SLOT_GIVEN = -2,
  NOT_ENCODABLE = -3,
  NO_SUCH_LAYERS = -4,
  TOO_LARGE = -5,
  NO_SUCH_RECORD = -6,
  POOL_NOT_ALIGNED = -7,
};

inline const char* text_of(int code) {
  switch (code) {
    case 0: return "ok";
    case RECORDS_NOT_ALIGNED: return "records do not begin on 16 bytes, or are smaller than their segments";
    case NO_SUCH_SLOT_GIVEN: return "the pool has no such slot";
    case NOT_ENCODABLE: return "only float32 states can be encoded as bf16 or int8";
    case NO_SUCH_LAYERS: return "the pool has no such layers";
    case TOO_LARGE: return "one layer's state has 2^31 numbers or more, or there are too many layers";
    case NO_SUCH_RECORD: return "there is no such record";
    case POOL_NOT_ALIGNED: return "a float32 state of the pool does not begin on 4 bytes";
    default: return "the CUDA runtime refused the launch";
  }
}

inline int checked(const Pool& pool, Encoding encoding, const char* records, int64_t stride, int64_t first, int64_t last) {
  const Form form = form_of(pool, encoding);
  if (encoding < NATIVE || encoding > INT8 || (encoding != NATIVE && pool.temporal_kind != FLOAT32)) return NOT_ENCODABLE;
  const int64_t chunks = form.temporal_bytes / (16 * CHUNK) + pool.conv_bytes / (16 * CHUNK) + 2, most = INT64_C(1) << 31;
  if (pool.heads * pool.rows * pool.columns >= most || pool.layers * MOST_TARGETS * std::max(chunks, pool.heads) >= most)
    return TOO_LARGE;
  if (first < 0 || first >= last || last > pool.layers) return NO_SUCH_LAYERS;
  if (((reinterpret_cast<uintptr_t>(records) | static_cast<uint64_t>(stride)) & 15) || stride < pool.layers * form.segment_bytes)
    return RECORDS_NOT_ALIGNED;
  const auto strides = pool.temporal_layer_stride | pool.temporal_slot_stride;
  if (encoding != NATIVE && ((reinterpret_cast<uintptr_t>(pool.temporal) | static_cast<uint64_t>(strides)) & 3)) return POOL_NOT_ALIGNED;
  return 0;
}

inline void put_slots(Call& call, const int64_t* slots, bool on_device, int64_t done, int count) {
  call.device_slots = on_device ? slots + done : nullptr;
  for (int i = 0; i < count && !on_device; ++i) call.slots[i] = slots[done + i];
}

inline int pack(const Pool& pool, const int64_t* slots, bool on_device, int64_t count, char* records, int64_t stride,
                int32_t* flags, Encoding encoding, int64_t most_blocks, void* stream) {
  int code = checked(pool, encoding, records, stride, 0, pool.layers);
  Call call{};
  call.pool = pool;
  call.form = form_of(pool, encoding);
  call.record_stride = stride;
  call.layer_count = pool.layers;
  for (int64_t i = 0; i < count && !code && !on_device; ++i) code = exists(call, slots[i]) ? 0 : NO_SUCH_SLOT_GIVEN;
  if (!code && count) code = clear_flags(flags, count, stream);
  for (int64_t done = 0; done < count && !code; done += MOST_TARGETS) {
    call.groups = static_cast<int32_t>(std::min<int64_t>(MOST_TARGETS, count - done));
    call.records = records + done * stride;
    call.flags = flags + done;
    put_slots(call, slots, on_device, done, call.groups);
    for (int i = 0; i < call.groups; ++i) call.record[i] = call.target[i] = i;
    code = run_pack(call, encoding, most_blocks, stream);
  }
  return code;
}

// `sources[i]` (on the host) is the record that slot i gets.
inline int unpack(const Pool& pool, const int64_t* slots, bool on_device, const int64_t* sources, int64_t count,
                  const char* records, int64_t stride, int64_t record_count, int64_t first, int64_t last,
                  Encoding encoding, int64_t most_blocks, void* stream) {
  int code = checked(pool, encoding, records, stride, first, last);
  Call call{};
  call.pool = pool;
  call.form = form_of(pool, encoding);
  call.records = const_cast<char*>(records);
  call.record_stride = stride;
  call.first_layer = first;
  call.layer_count = last - first;
  for (int64_t i = 0; i < count && !code; ++i) {
    if (!on_device && !exists(call, slots[i])) code = NO_SUCH_SLOT_GIVEN;
    if (sources[i] < 0 || sources[i] >= record_count) code = NO_SUCH_RECORD;
  }
  for (int64_t done = 0; done < count && !code; done += MOST_TARGETS) {
    const int batch = static_cast<int>(std::min<int64_t>(MOST_TARGETS, count - done));
    put_slots(call, slots, on_device, done, batch);
    for (int i = 0; i < batch; ++i) call.target[i] = i;
    const int64_t* of = sources + done;
    std::stable_sort(call.target, call.target + batch, [of](int a, int b) { return of[a] < of[b]; });
    call.groups = 0;
    for (int i = 0; i < batch; ++i) {
      const int64_t record = of[call.target[i]];
      if (i == 0 || record != call.record[call.groups - 1]) {
        call.record[call.groups] = static_cast<int32_t>(record);
        call.begin[call.groups++] = i;
      }
      call.begin[call.groups] = i + 1;
    }
    code = run_unpack(call, encoding, most_blocks, stream);
  }
  return code;
}

}  // namespace histate

HISTATE_API const char* histate_text_of(int code) { return histate::text_of(code); }
HISTATE_API int64_t histate_pool_bytes() { return sizeof(histate::Pool); }
HISTATE_API int64_t histate_record_bytes(const histate::Pool* pool, int encoding) {
  return pool->layers * histate::form_of(*pool, static_cast<histate::Encoding>(encoding)).segment_bytes;
}
HISTATE_API int histate_pack(const histate::Pool* pool, const int64_t* slots, int on_device, int64_t count, char* records,
                             int64_t stride, int32_t* flags, int encoding, int64_t most_blocks, void* stream) {
  return histate::pack(*pool, slots, on_device, count, records, stride, flags, static_cast<histate::Encoding>(encoding),
                       most_blocks, stream);
}
HISTATE_API int histate_unpack(const histate::Pool* pool, const int64_t* slots, int on_device, const int64_t* sources,
                               int64_t count, const char* records, int64_t stride, int64_t record_count, int64_t first,
                               int64_t last, int encoding, int64_t most_blocks, void* stream) {
  return histate::unpack(*pool, slots, on_device, sources, count, records, stride, record_count, first, last,
                         static_cast<histate::Encoding>(encoding), most_blocks, stream);
}
