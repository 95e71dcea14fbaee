// The kernels' own code on the CPU: every block and every thread of a launch, one after the other, with a block's
// barriers where the kernels have them. With HISTATE_TRACE no byte is moved; which bytes would be is written down.
#include <vector>
#include "pack.cuh"
#include "unpack.cuh"

namespace histate {

constexpr int64_t BLOCKS = 3;  // of a launch that asks for no number: blocks take work in turn, so any number will do

template <typename Body>
void for_threads(Body body) {
  for (int thread = 0; thread < THREADS; ++thread) body(thread);
}

template <typename Body>
void for_work(int64_t work, int64_t most, Body body) {
  const int64_t blocks = most > 0 ? most : BLOCKS;
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t index = block; index < work; index += blocks) body(index);
}

inline void pack_head(const Call& call, int64_t index) {
  static Shared shared;
  static Tile tiles[THREADS];
  head_place(call, index, shared);
  if (!shared.exists) return;
  if (fits_tile(call.pool)) {
    for_threads([&](int t) { tile_read(t, tiles[t], shared); });
    for_threads([&](int t) { tile_scale(t, shared); });
    for_threads([&](int t) { tile_write(t, tiles[t], shared); });
    return;
  }
  for (int64_t first = 0; first < call.pool.columns; first += 32) {
    for_threads([&](int t) { any_read(call, first, t, shared); });
    for_threads([&](int t) { any_scale(call, first, t, shared); });
    for_threads([&](int t) { any_write(call, first, t, shared); });
  }
}

inline int clear_flags(int32_t* flags, int64_t count, void*) {
#ifndef HISTATE_TRACE
  for (int64_t i = 0; i < count; ++i) flags[i] = 0;
#endif
  return 0;
}

inline int run_pack(const Call& call, Encoding encoding, int64_t most, void*) {
  if (encoding == INT8) for_work(heads_of(call), most, [&](int64_t index) { pack_head(call, index); });
  const Walk walk = pack_walk(call, encoding);
  for_work(walk.total, most, [&](int64_t index) {
    for_threads([&](int t) { encoding == BF16 ? pack_chunk<BF16>(call, walk, index, t) : pack_chunk<NATIVE>(call, walk, index, t); });
  });
  return 0;
}

inline int run_unpack(const Call& call, Encoding encoding, int64_t most, void*) {
  const Walk walk = unpack_walk(call);
  for_work(walk.total, most, [&](int64_t index) {
    for_threads([&](int t) {
      if (encoding == NATIVE) unpack_chunk<NATIVE>(call, walk, index, t);
      if (encoding == BF16) unpack_chunk<BF16>(call, walk, index, t);
      if (encoding == INT8) unpack_chunk<INT8>(call, walk, index, t);
    });
  });
  return 0;
}

#ifdef HISTATE_TRACE
struct Touch {
  int64_t written, address, bytes;
};
static std::vector<Touch> touches;

void touched(bool written, const void* address, int64_t bytes) {
  touches.push_back({written, reinterpret_cast<int64_t>(address), bytes});
}
#endif

}  // namespace histate

#include "entry.cuh"

#ifdef HISTATE_TRACE
// Copy the touches since the last call to `into` (rows of three numbers) if they fit into `room` rows; return how many.
HISTATE_API int64_t histate_take_touches(int64_t* into, int64_t room) {
  const int64_t count = static_cast<int64_t>(histate::touches.size());
  if (count > room) return count;
  if (count) memcpy(into, histate::touches.data(), count * sizeof(histate::Touch));
  histate::touches.clear();
  return count;
}
#endif
