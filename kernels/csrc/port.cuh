// What differs between a GPU, the CPU that runs the same code, and the CPU that only writes down which bytes it would
// touch (HISTATE_TRACE). All memory of the pool and of records is reached through `load` and `store`.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HISTATE_HD __host__ __device__ __forceinline__
#else
#define HISTATE_HD inline
#endif

namespace histate {

struct alignas(16) Word {
  uint32_t part[4];
};

#ifdef HISTATE_TRACE
void touched(bool written, const void* address, int64_t bytes);  // host.cpp
#endif

// Each byte of the pool and of a record is read once: loads and stores are marked as streaming.
template <typename T>
HISTATE_HD T load(const char* from) {
  T value{};
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16) {
    const uint4 got = __ldcs(reinterpret_cast<const uint4*>(from));
    memcpy(&value, &got, 16);
  } else if constexpr (sizeof(T) == 8) {
    const uint2 got = __ldcs(reinterpret_cast<const uint2*>(from));
    memcpy(&value, &got, 8);
  } else {
    value = __ldcs(reinterpret_cast<const T*>(from));
  }
#elif defined(HISTATE_TRACE)
  touched(false, from, sizeof(T));
#else
  memcpy(&value, from, sizeof(T));
#endif
  return value;
}

// For bytes that are read again soon.
template <typename T>
HISTATE_HD T load_cached(const char* from) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const T*>(from);
#else
  return load<T>(from);
#endif
}

template <typename T>
HISTATE_HD void store(char* to, const T& value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16) {
    uint4 put;
    memcpy(&put, &value, 16);
    __stcs(reinterpret_cast<uint4*>(to), put);
  } else if constexpr (sizeof(T) == 8) {
    uint2 put;
    memcpy(&put, &value, 8);
    __stcs(reinterpret_cast<uint2*>(to), put);
  } else {
    __stcs(reinterpret_cast<T*>(to), value);
  }
#elif defined(HISTATE_TRACE)
  touched(true, to, sizeof(T));
#else
  memcpy(to, &value, sizeof(T));
#endif
}

HISTATE_HD void set_flag(int32_t* flag, int32_t bits) {
#if defined(__CUDA_ARCH__)
  atomicOr(flag, bits);
#elif !defined(HISTATE_TRACE)
  *flag |= bits;
#endif
}

}  // namespace histate
