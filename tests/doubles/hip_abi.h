// hip_abi.h: the few numbers of HIP's binary interface that both doubles of libamdhip64 answer with.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#define HIP_EXPORT extern "C" __attribute__((visibility("default")))

typedef int hipError_t;
enum : hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorInvalidDevice = 101,
  hipErrorNoBinaryForGpu = 209,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorPeerAccessAlreadyEnabled = 704,
  hipErrorLaunchFailure = 719,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorUnknown = 999,
};

constexpr size_t kLdsBytes = 64 << 10;  // gfx1100's, refused past it on every double
constexpr int kMaxThreads = 1024;

// hipDeviceProp_tR0600, whose other fields read 0.
constexpr size_t kPropBytes = 1472, kPropTotalMemory = 288, kPropHostAccess = 708, kPropArch = 1160;
// host_access: directManagedMemAccessFromHost, whether the device's memory is the host's too.
inline void fill_properties(char* prop, const char* name, uint64_t total_bytes, const char* arch, int host_access) {
  memset(prop, 0, kPropBytes);
  snprintf(prop, 256, "%s", name);
  memcpy(prop + kPropTotalMemory, &total_bytes, sizeof total_bytes);
  memcpy(prop + kPropHostAccess, &host_access, sizeof host_access);
  snprintf(prop + kPropArch, 256, "%s", arch);
}
