// The kernels and their launches.
#include <cuda_runtime.h>
#include "pack.cuh"
#include "unpack.cuh"

namespace histate {

template <Encoding E>
__global__ void __launch_bounds__(THREADS, 2) pack_kernel(const __grid_constant__ Call call, const Walk walk) {
  for (int64_t index = blockIdx.x; index < walk.total; index += gridDim.x) pack_chunk<E>(call, walk, index, threadIdx.x);
}

// Returns whether there is something to encode. The barrier in front: the head before is in use until here.
__device__ __forceinline__ bool next_head(const Call& call, int index, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) head_place(call, index, shared);
  __syncthreads();
  return shared.exists;
}

__global__ void __launch_bounds__(THREADS, 2) pack_int8_tile_kernel(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  for (int index = blockIdx.x; index < heads_of(call); index += gridDim.x) {
    if (!next_head(call, index, shared)) continue;
    Tile tile;
    tile_read(threadIdx.x, tile, shared);
    __syncthreads();
    tile_scale(threadIdx.x, shared);
    __syncthreads();
    tile_write(threadIdx.x, tile, shared);
  }
}

__global__ void __launch_bounds__(THREADS, 2) pack_int8_any_kernel(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  for (int index = blockIdx.x; index < heads_of(call); index += gridDim.x) {
    if (!next_head(call, index, shared)) continue;
    for (int64_t first = 0; first < call.pool.columns; first += 32) {
      any_read(call, first, threadIdx.x, shared);
      __syncthreads();
      any_scale(call, first, threadIdx.x, shared);
      __syncthreads();
      any_write(call, first, threadIdx.x, shared);
      __syncthreads();
    }
  }
}

template <Encoding E>
__global__ void __launch_bounds__(THREADS, 2) unpack_kernel(const __grid_constant__ Call call, const Walk walk) {
  for (int64_t index = blockIdx.x; index < walk.total; index += gridDim.x) unpack_chunk<E>(call, walk, index, threadIdx.x);
}

// Blocks take work in turn, so any number of them will do; 0 means one per piece of work.
inline unsigned blocks_for(int64_t work, int64_t most) {
  const int64_t limit = most > 0 ? most : 0x7fffffff;
  return static_cast<unsigned>(work < limit ? work : limit);
}

inline int clear_flags(int32_t* flags, int64_t count, void* stream) {
  return cudaMemsetAsync(flags, 0, count * sizeof(int32_t), static_cast<cudaStream_t>(stream));
}

inline int run_pack(const Call& call, Encoding encoding, int64_t most, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  if (encoding == INT8) {
    const unsigned blocks = blocks_for(heads_of(call), most);
    if (fits_tile(call.pool)) {
      pack_int8_tile_kernel<<<blocks, THREADS, 0, stream>>>(call);
    } else {
      pack_int8_any_kernel<<<blocks, THREADS, 0, stream>>>(call);
    }
  }
  const Walk walk = pack_walk(call, encoding);
  const unsigned blocks = blocks_for(walk.total, most);
  if (blocks == 0) return cudaGetLastError();
  if (encoding == BF16) {
    pack_kernel<BF16><<<blocks, THREADS, 0, stream>>>(call, walk);
  } else {
    pack_kernel<NATIVE><<<blocks, THREADS, 0, stream>>>(call, walk);
  }
  return cudaGetLastError();
}

inline int run_unpack(const Call& call, Encoding encoding, int64_t most, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  const Walk walk = unpack_walk(call);
  const unsigned blocks = blocks_for(walk.total, most);
  if (encoding == NATIVE) unpack_kernel<NATIVE><<<blocks, THREADS, 0, stream>>>(call, walk);
  if (encoding == BF16) unpack_kernel<BF16><<<blocks, THREADS, 0, stream>>>(call, walk);
  if (encoding == INT8) unpack_kernel<INT8><<<blocks, THREADS, 0, stream>>>(call, walk);
  return cudaGetLastError();
}

}  // namespace histate

#include "entry.cuh"
