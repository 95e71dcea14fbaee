// Numbers of a state as bf16 and int8, bit for bit what `sglang_histate/copy/encoding.py` makes of them on the CPU.
#pragma once
#include <cmath>
#include "index.cuh"

namespace histate {

HISTATE_HD uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}
HISTATE_HD float number_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

constexpr uint32_t INFINITE = 0x7f800000u;
HISTATE_HD uint32_t magnitude(uint32_t bits) { return bits & 0x7fffffffu; }
HISTATE_HD bool not_finite(uint32_t bits) { return magnitude(bits) >= INFINITE; }

// Whether 4 bytes of raw state, one float32 or two 16-bit numbers, hold a NaN or an infinity.
HISTATE_HD bool not_finite(uint32_t bits, int32_t kind) {
  if (kind == FLOAT32) return not_finite(bits);
  const uint32_t exponent = kind == BFLOAT16 ? 0x7f80u : 0x7c00u;
  return (bits & exponent) == exponent || ((bits >> 16) & exponent) == exponent;
}
HISTATE_HD bool not_finite(const Word& word, int32_t kind) {
  bool found = false;
  for (int i = 0; i < 4; ++i) found |= not_finite(word.part[i], kind);
  return found;
}

// To nearest, ties to even; a NaN stays one, what is too large becomes infinite.
HISTATE_HD uint32_t to_bf16(uint32_t bits) {
  if (magnitude(bits) > INFINITE) return 0x7fc0u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// amax is a maximum of magnitudes as integers, which orders NaN above infinity above all numbers.
HISTATE_HD float scale_of(uint32_t amax) { return number_of(amax) / 127.0f; }
HISTATE_HD bool scale_not_finite(float scale) { return not_finite(bits_of(scale * 127.0f)); }

// How to divide the numbers of a channel by its scale. The bytes shall be those of a true division, which every other
// implementation makes, but a GPU's takes a branch per number and more registers than a tile leaves. So: a product with
// the inverse and two exact corrections. Powers of two keep all of it away from overflow and denormal numbers.
struct Divisor {
  float shift, scale, inverse;
};
HISTATE_HD Divisor divisor_of(float scale) {
  Divisor by;
  by.scale = scale > 0.0f ? scale : 1.0f;
  by.shift = by.scale < 0x1p-80f ? 0x1p100f : by.scale > 0x1p80f ? 0x1p-100f : 1.0f;
  by.scale *= by.shift;
  by.inverse = 1.0f / by.scale;
  return by;
}
// Ties to even; what is no number becomes 0.
HISTATE_HD uint32_t quantized(float number, const Divisor& by) {
  number *= by.shift;
  float steps = number * by.inverse;
  steps = fmaf(fmaf(-steps, by.scale, number), by.inverse, steps);
  steps = fmaf(fmaf(-steps, by.scale, number), by.inverse, steps);
  steps = rintf(steps);
  steps = steps < -127.0f ? -127.0f : steps > 127.0f ? 127.0f : steps == steps ? steps : 0.0f;
  return static_cast<uint32_t>(static_cast<int32_t>(steps)) & 0xffu;
}
HISTATE_HD float restored(uint32_t byte, float scale) {
  return static_cast<float>(static_cast<int8_t>(byte)) * scale;
}

// `left` bytes of a piece begin at `from`: up to 16 of them, then zeros.
HISTATE_HD Word load_unit(const char* from, int64_t left, bool on_16_bytes) {
  if (on_16_bytes && left >= 16) return load<Word>(from);
  Word word{};
  for (int i = 0; i < 16; ++i)
    if (i < left) word.part[i / 4] |= static_cast<uint32_t>(load<uint8_t>(from + i)) << (i % 4 * 8);
  return word;
}
HISTATE_HD void store_unit(char* to, int64_t left, bool on_16_bytes, const Word& word) {
  if (on_16_bytes && left >= 16) return store(to, word);
  for (int i = 0; i < 16; ++i)
    if (i < left) store<uint8_t>(to + i, static_cast<uint8_t>(word.part[i / 4] >> (i % 4 * 8)));
}

}  // namespace histate
