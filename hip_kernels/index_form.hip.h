// index_form.hip.h: the prepared form of index queries and keys, which scoring reads (index_prepared.py).
#pragma once
#include "port.hip.h"

constexpr int kTileRows = 16, kChannels = 128, kGroups = 4, kGroupBytes = kChannels / kGroups;
constexpr int kTileBytes = kTileRows * (kChannels + kGroups);  // codes [group][row][32], then scale bytes [row][group]
constexpr int kScalesAt = kTileRows * kChannels;

// Exponents of scales within which a common scale may be left out of scores: products, their sums and what BF16 keeps
// of them stay far inside the normal range.
constexpr int kScaleReach = 24;

RL_DEV int scale_byte(int word, int group) { return (word >> (8 * group)) & 255; }
