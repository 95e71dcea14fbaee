// Slots -> records. Each record's bytes are written once, padding as zeros; a record with a NaN or an infinity, in the
// state or by its encoding, gets a flag.
#pragma once
#include "encode.cuh"

namespace histate {

// The record's part may end in padding, which has units of its own.
HISTATE_HD Walk pack_walk(const Call& call, Encoding encoding) {
  if (encoding == INT8) return walk_of(call, 0);
  return walk_of(call, aligned(call.form.encoded_bytes) / (encoding == BF16 ? 8 : 16));
}

template <Encoding E>
HISTATE_HD void pack_chunk(const Call& call, const Walk& walk, int64_t index, int thread) {
  const Chunk chunk = chunk_at(call, walk, index);
  const int64_t slot = slot_of(call, chunk.group);
  int32_t* flag = call.flags + call.record[chunk.group];
  if (!exists(call, slot)) {
    if (thread == 0) set_flag(flag, NO_SUCH_SLOT);
    return;
  }
  const Pool& pool = call.pool;
  const char* from = chunk.conv ? conv_of(pool, chunk.layer, slot) : temporal_of(pool, chunk.layer, slot);
  char* to = segment_of(call, chunk.group, chunk.layer) + (chunk.conv ? call.form.conv_offset : 0);
  const int64_t bytes = chunk.conv ? pool.conv_bytes : call.form.temporal_bytes;
  const int32_t kind = chunk.conv ? pool.conv_kind : pool.temporal_kind;
  const bool on = chunk.conv ? on_16(pool.conv, pool.conv_layer_stride, pool.conv_slot_stride)
                             : on_16(pool.temporal, pool.temporal_layer_stride, pool.temporal_slot_stride);
  Word words[IN_FLIGHT];
  if (on && (chunk.unit + CHUNK) * 16 <= bytes) {  // nearly always: nothing stands between the loads
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) words[i] = load<Word>(from + unit_of(chunk, thread, i) * 16);
  } else {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int64_t unit = unit_of(chunk, thread, i);
      words[i] = unit < chunk.units ? load_unit(from + unit * 16, bytes - unit * 16, on) : Word{};
    }
  }
  bool bad = false;
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int64_t unit = unit_of(chunk, thread, i);
    if (unit >= chunk.units) continue;
    if (E == BF16 && !chunk.conv) {
      uint32_t half[4];
      for (int j = 0; j < 4; ++j) {
        half[j] = to_bf16(words[i].part[j]);
        bad |= (half[j] & 0x7f80u) == 0x7f80u;
      }
      store<uint64_t>(to + unit * 8, static_cast<uint64_t>(half[2] | half[3] << 16) << 32 | (half[0] | half[1] << 16));
    } else {
      bad |= not_finite(words[i], kind);
      store(to + unit * 16, words[i]);
    }
  }
  if (bad) set_flag(flag, NOT_FINITE);
}

// int8: a block encodes one head of one layer. What its threads share, the place included, so that no thread needs
// registers for it:
struct Shared {
  uint32_t partial[THREADS / 32][TILE];
  Divisor divisor[TILE];
  const char* from;
  char *numbers, *scales;
  int32_t* flag;
  bool exists;
};

// Thread 0 only.
HISTATE_HD void head_place(const Call& call, int64_t index, Shared& shared) {
  const Head at = head_at(call, index);
  const Pool& pool = call.pool;
  const int64_t slot = slot_of(call, at.group), numbers = pool.rows * pool.columns;
  char* segment = segment_of(call, at.group, at.layer);
  shared.flag = call.flags + call.record[at.group];
  shared.exists = exists(call, slot);
  if (!shared.exists) return set_flag(shared.flag, NO_SUCH_SLOT);
  shared.from = temporal_of(pool, at.layer, slot) + at.head * numbers * 4;
  shared.numbers = segment + at.head * numbers;
  shared.scales = segment + call.form.scale_offset + at.head * pool.columns * 4;
  if (at.head < pool.heads - 1) return;
  for (int64_t i = call.form.encoded_bytes; i < call.form.scale_offset; ++i) store<uint8_t>(segment + i, 0);
  for (int64_t i = call.form.scale_offset + pool.heads * pool.columns * 4; i < call.form.conv_offset; ++i)
    store<uint8_t>(segment + i, 0);
}

HISTATE_HD void put_scale(Shared& shared, int64_t column, int at, uint32_t amax) {
  const float scale = scale_of(amax);
  shared.divisor[at] = divisor_of(scale);
  store(shared.scales + column * 4, scale);
  if (scale_not_finite(scale)) set_flag(shared.flag, NOT_FINITE);
}

// 128 x 128: a thread holds 8 rows of 4 columns in registers, so that the state is read once. Rows go by warps.
constexpr int TILE_ROWS = TILE * TILE / (THREADS * 4);
struct Tile {
  Word row[TILE_ROWS];
};
HISTATE_HD int tile_column(int thread) { return thread % 32 * 4; }

HISTATE_HD void tile_read(int thread, Tile& tile, Shared& shared) {
  const char* from = shared.from + (thread / 32 * TILE + tile_column(thread)) * 4;
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i)
    tile.row[i] = load<Word>(from + i * (THREADS / 32) * TILE * 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i) {
      const uint32_t size = magnitude(tile.row[i].part[j]);
      amax = size > amax ? size : amax;
    }
    shared.partial[thread / 32][tile_column(thread) + j] = amax;
  }
}
HISTATE_HD void tile_scale(int thread, Shared& shared) {
  if (thread >= TILE) return;
  uint32_t amax = 0;
  for (int i = 0; i < THREADS / 32; ++i) amax = shared.partial[i][thread] > amax ? shared.partial[i][thread] : amax;
  put_scale(shared, thread, thread, amax);
}
HISTATE_HD void tile_write(int thread, Tile& tile, const Shared& shared) {
  const int column = tile_column(thread);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // one column at a time, in place: that takes the fewest registers
    const Divisor by = shared.divisor[column + j];
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i)
      tile.row[i].part[j] = quantized(number_of(tile.row[i].part[j]), by);
  }
  char* to = shared.numbers + thread / 32 * TILE + column;
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i) {
    const uint32_t* byte = tile.row[i].part;
    store<uint32_t>(to + i * (THREADS / 32) * TILE, byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24);
  }
}

// Any other shape: 32 columns at a time, each thread every 16th row of one column, read twice.
HISTATE_HD void any_read(const Call& call, int64_t first, int thread, Shared& shared) {
  const int64_t column = first + thread % 32;
  uint32_t amax = 0;
  for (int64_t row = thread / 32; column < call.pool.columns && row < call.pool.rows; row += THREADS / 32) {
    const uint32_t size = magnitude(load_cached<uint32_t>(shared.from + (row * call.pool.columns + column) * 4));
    amax = size > amax ? size : amax;
  }
  shared.partial[thread / 32][thread % 32] = amax;
}
HISTATE_HD void any_scale(const Call& call, int64_t first, int thread, Shared& shared) {
  if (thread >= 32 || first + thread >= call.pool.columns) return;
  uint32_t amax = 0;
  for (int i = 0; i < THREADS / 32; ++i) amax = shared.partial[i][thread] > amax ? shared.partial[i][thread] : amax;
  put_scale(shared, first + thread, thread, amax);
}
HISTATE_HD void any_write(const Call& call, int64_t first, int thread, const Shared& shared) {
  const int64_t column = first + thread % 32;
  for (int64_t row = thread / 32; column < call.pool.columns && row < call.pool.rows; row += THREADS / 32) {
    const int64_t at = row * call.pool.columns + column;
    const float number = number_of(load_cached<uint32_t>(shared.from + at * 4));
    store<uint8_t>(shared.numbers + at, static_cast<uint8_t>(quantized(number, shared.divisor[thread % 32])));
  }
}

HISTATE_HD bool fits_tile(const Pool& pool) {
  return pool.rows == TILE && pool.columns == TILE &&
         on_16(pool.temporal, pool.temporal_layer_stride, pool.temporal_slot_stride);
}

}  // namespace histate
