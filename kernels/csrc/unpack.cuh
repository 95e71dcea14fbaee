// Records -> slots, the inverse of pack. A record is read once, whatever the number of slots it goes to.
#pragma once
#include "encode.cuh"

namespace histate {

HISTATE_HD Walk unpack_walk(const Call& call) { return walk_of(call, ceil_div(call.form.temporal_bytes, 16)); }

// Four numbers from 4 bytes, for the unit that begins with number `first` of a layer's state.
HISTATE_HD Word unpack_int8(const Call& call, const char* segment, int64_t unit) {
  const Pool& pool = call.pool;
  const uint32_t four = load<uint32_t>(segment + unit * 4);
  const char* scales = segment + call.form.scale_offset;
  const uint32_t columns = static_cast<uint32_t>(pool.columns), of_head = static_cast<uint32_t>(pool.rows) * columns;
  const uint32_t numbers = of_head * static_cast<uint32_t>(pool.heads), first = static_cast<uint32_t>(unit) * 4;
  Word scale, word;
  if (columns % 4 == 0) {
    scale = load_cached<Word>(scales + (first / of_head * columns + first % columns) * 4);
  } else {
    for (uint32_t j = 0; j < 4; ++j)
      scale.part[j] = first + j < numbers
                          ? load_cached<uint32_t>(scales + ((first + j) / of_head * columns + (first + j) % columns) * 4)
                          : 0u;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    word.part[j] = bits_of(restored(four >> (8 * j), number_of(scale.part[j])));
  return word;
}

template <Encoding E>
HISTATE_HD void unpack_chunk(const Call& call, const Walk& walk, int64_t index, int thread) {
  const Chunk chunk = chunk_at(call, walk, index);
  const Pool& pool = call.pool;
  const char* segment = segment_of(call, chunk.group, chunk.layer);
  Word words[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int64_t unit = unit_of(chunk, thread, i);
    if (unit >= chunk.units) continue;
    if (E == BF16 && !chunk.conv) {
      const uint64_t four = load<uint64_t>(segment + unit * 8);
      words[i] = {static_cast<uint32_t>(four) << 16, static_cast<uint32_t>(four) & 0xffff0000u,
                  static_cast<uint32_t>(four >> 32) << 16, static_cast<uint32_t>(four >> 32) & 0xffff0000u};
    } else if (E == INT8 && !chunk.conv) {
      words[i] = unpack_int8(call, segment, unit);
    } else {
      words[i] = load<Word>(segment + (chunk.conv ? call.form.conv_offset : 0) + unit * 16);
    }
  }
  const int64_t bytes = chunk.conv ? pool.conv_bytes : call.form.temporal_bytes;
  const bool on = chunk.conv ? on_16(pool.conv, pool.conv_layer_stride, pool.conv_slot_stride)
                             : on_16(pool.temporal, pool.temporal_layer_stride, pool.temporal_slot_stride);
  for (int target = call.begin[chunk.group]; target < call.begin[chunk.group + 1]; ++target) {
    const int64_t slot = slot_of(call, target);
#ifdef __CUDA_ARCH__
    // A request would run from a stale state: that is worse than an end. Slots on the host were checked before.
    if (!exists(call, slot)) __trap();
#endif
    char* to = chunk.conv ? conv_of(pool, chunk.layer, slot) : temporal_of(pool, chunk.layer, slot);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int64_t unit = unit_of(chunk, thread, i);
      if (unit < chunk.units) store_unit(to + unit * 16, bytes - unit * 16, on, words[i]);
    }
  }
}

}  // namespace histate
