// Copies by the copy engine, pinned memory and device attributes, in C: the bench needs nothing but torch and nvcc.
// Compiled as plain C++ (a dry run without a GPU) everything is memcpy and malloc.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

#define BENCH_API extern "C" __attribute__((visibility("default")))

static double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// All return a cudaError_t. `cpu_us`, if given, gets the time that the calls took, not the copies.
BENCH_API int bench_loop(void* const* to, void* const* from, const size_t* sizes, size_t count, void* stream, double* cpu_us) {
  const double start = now_us();
  int code = 0;
  for (size_t i = 0; i < count && !code; ++i) {
#ifdef __CUDACC__
    code = cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
#else
    memcpy(to[i], from[i], sizes[i]);
#endif
  }
  if (cpu_us) *cpu_us = now_us() - start;
  return code;
}

BENCH_API int bench_batch(void* const* to, void* const* from, const size_t* sizes, size_t count, void* stream, double* cpu_us) {
#if defined(__CUDACC__) && CUDART_VERSION >= 12080
  const double start = now_us();
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;  // one entry per set of attributes: where it begins to apply
  const auto on = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
  const int code = cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1, on);
#else
  size_t failed = 0;
  const int code = cudaMemcpyBatchAsync(const_cast<void**>(to), const_cast<void**>(from), const_cast<size_t*>(sizes), count,
                                        &attributes, &first, 1, &failed, on);
#endif
  if (code) cudaGetLastError();
  if (cpu_us) *cpu_us = now_us() - start;
  return code;
#elif defined(__CUDACC__)
  return cudaErrorNotSupported;
#else
  return bench_loop(to, from, sizes, count, stream, cpu_us);
#endif
}

BENCH_API void* bench_pinned(size_t bytes) {
  void* memory = nullptr;
#ifdef __CUDACC__
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocDefault)) {
    cudaGetLastError();
    return nullptr;
  }
#else
  if (posix_memalign(&memory, 4096, bytes)) return nullptr;
#endif
  return memory;
}

BENCH_API int bench_register(void* memory, size_t bytes) {
#ifdef __CUDACC__
  const int code = cudaHostRegister(memory, bytes, cudaHostRegisterDefault);
  if (code) cudaGetLastError();
  return code;
#else
  return memory && bytes ? 0 : 1;
#endif
}

BENCH_API int bench_unregister(void* memory) {
#ifdef __CUDACC__
  return cudaHostUnregister(memory);
#else
  return memory ? 0 : 1;
#endif
}

// In the order of `ATTRIBUTES` in device.py; -1 where the runtime does not say.
BENCH_API int bench_attribute(int which, int device) {
#ifdef __CUDACC__
  const cudaDeviceAttr attributes[] = {cudaDevAttrHostRegisterSupported, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                       cudaDevAttrPageableMemoryAccess, cudaDevAttrAsyncEngineCount,
                                       cudaDevAttrMultiProcessorCount, cudaDevAttrL2CacheSize};
  int value = -1;
  if (cudaDeviceGetAttribute(&value, attributes[which], device)) cudaGetLastError();
  return value;
#else
  return which < 0 || device < 0 ? -2 : -1;
#endif
}
