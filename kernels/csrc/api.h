// What the library offers in C: to ctypes, and to ffi.cpp.
#pragma once
#include "index.cuh"

#define HISTATE_API extern "C" __attribute__((visibility("default")))

HISTATE_API const char* histate_text_of(int code);
HISTATE_API int64_t histate_pool_bytes();
HISTATE_API int64_t histate_record_bytes(const histate::Pool* pool, int encoding);

// `slots` are on the host, or on the device if `on_device`. One record of `stride` bytes and one flag for each.
HISTATE_API int histate_pack(const histate::Pool* pool, const int64_t* slots, int on_device, int64_t count, char* records,
                             int64_t stride, int32_t* flags, int encoding, int64_t most_blocks, void* stream);

// `sources[i]` (on the host) is the record that slot i gets; layers first .. last - 1 of it.
HISTATE_API int histate_unpack(const histate::Pool* pool, const int64_t* slots, int on_device, const int64_t* sources,
                               int64_t count, const char* records, int64_t stride, int64_t record_count, int64_t first,
                               int64_t last, int encoding, int64_t most_blocks, void* stream);
