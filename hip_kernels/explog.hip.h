// explog.hip.h: explog.py's exp and log, the same FP32 operations in the same order, so the same bits on every target.
#pragma once
#include "port.hip.h"

namespace rl {
// Constants as explog.py's Python numbers become FP32.
RL_DEV float log(float x) {  // of a positive, finite, normal number
  const int bits = as_int(x) + ((127 << 23) - 0x3F3504F3);
  const int k = (bits >> 23) - 127;
  const float m = as_float((bits & 0x7FFFFF) + 0x3F3504F3);
  float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  float series = z * (float)(1.0 / 9) + (float)(1.0 / 7);
  series = series * z + (float)(1.0 / 5);
  series = series * z + (float)(1.0 / 3);
  s = s + s;
  return (float)k * (float)0.6931471805599453 + (s * (series * z) + s);
}

RL_DEV float exp(float x) {  // of a number at most 0, -inf included; of a NaN a NaN
  const float floor = -86.0f;
  if (x < floor) return 0.0f;
  // Adding 1.5 * 2^23 rounds to a whole number, half to even.
  const float t = x * (float)(1 / 0.6931471805599453) + 12582912.0f, k = t - 12582912.0f;
  const float r = (x - k * 0.693145751953125f) - k * (float)(0.6931471805599453 - 0.693145751953125);
  float series = r * (float)(1.0 / 5040) + (float)(1.0 / 720);
  series = series * r + (float)(1.0 / 120);
  series = series * r + (float)(1.0 / 24);
  series = series * r + (float)(1.0 / 6);
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  // Of a NaN, t's low bits are anything: adding them could make a number of it.
  return x == x ? as_float((int)((rl_u32)as_int(series) + ((rl_u32)as_int(t) << 23))) : x;
}

RL_DEV float sigmoid(float x) {  // a NaN stays one
  const float e = exp(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
}  // namespace rl
