// Where every byte lies: in a pool's slots, in a record, and which thread moves it. Plain arithmetic in 64 bits, the same
// on a GPU and on the CPU, where the tests enumerate it.
//
// A record has one segment per layer: the parts of the encoded temporal state, then the convolution window; each part
// begins on 16 bytes and the bytes between parts are zero. `sglang_histate/adapter/state_layout.py` has the same format.
#pragma once
#include "port.cuh"

namespace histate {

enum Encoding : int32_t { NATIVE = 0, BF16 = 1, INT8 = 2 };
enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Flag : int32_t { NOT_FINITE = 1, NO_SUCH_SLOT = 2 };

constexpr int THREADS = 512;            // of a block
constexpr int IN_FLIGHT = 4;            // loads of a thread before its first store
constexpr int CHUNK = THREADS * IN_FLIGHT;  // units that a block moves at a time
constexpr int MOST_TARGETS = 64;        // slots of one launch: they travel in its parameters
constexpr int TILE = 128;               // V and K of the states whose int8 encoding holds a head in registers

// The tensors of a pool: temporal [layers, slots, heads, rows, columns] and conv [layers, slots, ...]; strides in bytes.
// One layer of one slot is contiguous.
struct Pool {
  char* temporal;
  char* conv;
  int64_t layers, slots, heads, rows, columns;
  int64_t temporal_layer_stride, temporal_slot_stride, conv_layer_stride, conv_slot_stride;
  int64_t conv_bytes;  // of one layer of one slot
  int32_t temporal_kind, conv_kind;
};

HISTATE_HD int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }
HISTATE_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Offsets in a segment of a record.
struct Form {
  int64_t temporal_bytes;  // of one layer of a slot
  int64_t encoded_bytes;   // of the part that holds the numbers
  int64_t scale_offset;    // of the part with the scales; int8 only
  int64_t conv_offset, segment_bytes;
};

HISTATE_HD Form form_of(const Pool& pool, Encoding encoding) {
  Form form;
  const int64_t numbers = pool.heads * pool.rows * pool.columns;
  form.temporal_bytes = numbers * (pool.temporal_kind == FLOAT32 ? 4 : 2);
  form.encoded_bytes = encoding == NATIVE ? form.temporal_bytes : encoding == BF16 ? numbers * 2 : numbers;
  form.scale_offset = aligned(form.encoded_bytes);
  const int64_t scale_bytes = encoding == INT8 ? pool.heads * pool.columns * 4 : 0;
  form.conv_offset = form.scale_offset + aligned(scale_bytes);
  form.segment_bytes = form.conv_offset + aligned(pool.conv_bytes);
  return form;
}

// Everything a kernel gets. Targets are slots; in `unpack` those with the same record stand together.
struct Call {
  Pool pool;
  Form form;
  char* records;
  int64_t record_stride;
  int32_t* flags;               // of each record, pack only
  const int64_t* device_slots;  // null: `slots` has them
  int64_t first_layer, layer_count;
  int32_t groups;                     // pack: records; unpack: different records
  int32_t record[MOST_TARGETS];       // of a group
  int32_t begin[MOST_TARGETS + 1];    // targets of group g are begin[g] .. begin[g + 1]
  int32_t target[MOST_TARGETS];       // index into the slots
  int64_t slots[MOST_TARGETS];
};

HISTATE_HD int64_t slot_of(const Call& call, int target) {
  const int index = call.target[target];
  return call.device_slots ? call.device_slots[index] : call.slots[index];
}
HISTATE_HD bool exists(const Call& call, int64_t slot) { return slot >= 0 && slot < call.pool.slots; }

HISTATE_HD char* temporal_of(const Pool& pool, int64_t layer, int64_t slot) {
  return pool.temporal + layer * pool.temporal_layer_stride + slot * pool.temporal_slot_stride;
}
HISTATE_HD char* conv_of(const Pool& pool, int64_t layer, int64_t slot) {
  return pool.conv + layer * pool.conv_layer_stride + slot * pool.conv_slot_stride;
}
HISTATE_HD char* segment_of(const Call& call, int group, int64_t layer) {
  return call.records + call.record[group] * call.record_stride + layer * call.form.segment_bytes;
}

HISTATE_HD bool on_16(const char* base, int64_t layer_stride, int64_t slot_stride) {
  return ((reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(layer_stride) | static_cast<uint64_t>(slot_stride)) & 15) == 0;
}

// A unit is 16 bytes of a slot and the bytes of a record that belong to them: 16, or 8 (bf16), or 4 (int8). A block
// takes chunks of units; a chunk lies in one piece (temporal state or window) of one layer of one group.
struct Walk {
  int64_t temporal_units, conv_units;    // of one layer
  int64_t temporal_chunks, conv_chunks;  // of one layer
  int64_t total;                         // chunks of the call
};

HISTATE_HD Walk walk_of(const Call& call, int64_t temporal_units) {
  Walk walk;
  walk.temporal_units = temporal_units;
  walk.conv_units = ceil_div(call.pool.conv_bytes, 16);
  walk.temporal_chunks = ceil_div(walk.temporal_units, CHUNK);
  walk.conv_chunks = ceil_div(walk.conv_units, CHUNK);
  walk.total = call.groups * call.layer_count * (walk.temporal_chunks + walk.conv_chunks);
  return walk;
}

struct Chunk {
  int group;
  int64_t layer;
  bool conv;
  int64_t unit, units;  // the first one, and how many the piece has
};

// Counts of chunks and heads are below 2^31 (entry.cuh sees to it): divisions in 64 bits would take longer than the copy.
HISTATE_HD Chunk chunk_at(const Call& call, const Walk& walk, int64_t index) {
  const uint32_t temporal = static_cast<uint32_t>(walk.temporal_chunks), at = static_cast<uint32_t>(index);
  const uint32_t of_layer = temporal + static_cast<uint32_t>(walk.conv_chunks);
  const uint32_t rest = at / of_layer, within = at - rest * of_layer;
  const uint32_t layers = static_cast<uint32_t>(call.layer_count), group = rest / layers;
  Chunk chunk;
  chunk.layer = call.first_layer + (rest - group * layers);
  chunk.group = static_cast<int>(group);
  chunk.conv = within >= temporal;
  chunk.unit = static_cast<int64_t>(chunk.conv ? within - temporal : within) * CHUNK;
  chunk.units = chunk.conv ? walk.conv_units : walk.temporal_units;
  return chunk;
}

// Load i of a thread: consecutive threads take consecutive units.
HISTATE_HD int64_t unit_of(const Chunk& chunk, int thread, int i) {
  return chunk.unit + static_cast<int64_t>(i) * THREADS + thread;
}

struct Head {
  int group;
  int64_t layer, head;
};

HISTATE_HD int64_t heads_of(const Call& call) { return call.groups * call.layer_count * call.pool.heads; }
HISTATE_HD Head head_at(const Call& call, int64_t index) {
  const uint32_t at = static_cast<uint32_t>(index), heads = static_cast<uint32_t>(call.pool.heads);
  const uint32_t rest = at / heads, layers = static_cast<uint32_t>(call.layer_count), group = rest / layers;
  return {static_cast<int>(group), call.first_layer + (rest - group * layers), at - rest * heads};
}

}  // namespace histate
