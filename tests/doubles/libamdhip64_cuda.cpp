// libamdhip64.so over the CUDA driver: the calls that rocline makes, so that the same Python and the same kernel
// sources run and are timed on an NVIDIA card. Devices' primary contexts are shared with torch's CUDA build.
#include <cuda.h>
#include <mutex>
#include <string>

#include "hip_abi.h"

namespace {
constexpr int kMaxDevices = 16;
thread_local int current = 0;

// The codes that rocline tells apart.
hipError_t error_of(CUresult result) {
  switch (result) {
    case CUDA_SUCCESS: return hipSuccess;
    case CUDA_ERROR_INVALID_VALUE: return hipErrorInvalidValue;
    case CUDA_ERROR_OUT_OF_MEMORY: return hipErrorOutOfMemory;
    case CUDA_ERROR_INVALID_DEVICE: return hipErrorInvalidDevice;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE: return hipErrorNoBinaryForGpu;
    case CUDA_ERROR_NOT_FOUND: return hipErrorNotFound;
    case CUDA_ERROR_NOT_READY: return hipErrorNotReady;
    case CUDA_ERROR_ILLEGAL_ADDRESS: return hipErrorIllegalAddress;
    case CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: return hipErrorPeerAccessAlreadyEnabled;
    case CUDA_ERROR_LAUNCH_FAILED: return hipErrorLaunchFailure;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: return hipErrorStreamCaptureUnsupported;
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: return hipErrorStreamCaptureInvalidated;
    default: return hipErrorUnknown;
  }
}

CUcontext context(int device) {
  static std::mutex mutex;
  static CUcontext held[kMaxDevices];
  std::lock_guard<std::mutex> hold(mutex);
  if (device < 0 || device >= kMaxDevices) return nullptr;
  CUdevice handle;
  if (!held[device] && !cuInit(0) && !cuDeviceGet(&handle, device)) cuDevicePrimaryCtxRetain(&held[device], handle);
  return held[device];
}

// Runs a driver call with the current device's context.
template <class Call>
hipError_t on_device(Call call) {
  CUcontext wanted = context(current), set = nullptr;
  if (!wanted) return hipErrorInvalidDevice;
  cuCtxGetCurrent(&set);
  if (set != wanted) cuCtxSetCurrent(wanted);
  return error_of(call());
}
CUdeviceptr pointer(const void* p) { return (CUdeviceptr)p; }
}  // namespace

HIP_EXPORT hipError_t hipGetDeviceCount(int* n) {
  const CUresult result = cuInit(0);
  return error_of(result ? result : cuDeviceGetCount(n));
}
HIP_EXPORT hipError_t hipSetDevice(int device) {
  if (!context(device)) return hipErrorInvalidDevice;
  current = device;
  return on_device([] { return CUDA_SUCCESS; });
}
HIP_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  *version = RUNTIME_VERSION;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGetDevicePropertiesR0600(char* prop, int device) {
  CUdevice handle;
  if (cuInit(0) || cuDeviceGet(&handle, device)) return hipErrorInvalidDevice;
  char name[256], arch[32];
  size_t total_bytes = 0;
  int major = 0, minor = 0;
  cuDeviceGetName(name, sizeof name, handle);
  cuDeviceTotalMem(&total_bytes, handle);
  cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
  cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle);
  snprintf(arch, sizeof arch, "sm_%d%d", major, minor);
  fill_properties(prop, name, total_bytes, arch, 0);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return on_device([=] { return cuMemGetInfo(free_bytes, total_bytes); });
}
HIP_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  CUdevice from, to;
  if (cuDeviceGet(&from, device) || cuDeviceGet(&to, peer)) return hipErrorInvalidDevice;
  return error_of(cuDeviceCanAccessPeer(can, from, to));
}
HIP_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned) {
  return on_device([=] { return cuCtxEnablePeerAccess(context(peer), 0); });
}

HIP_EXPORT hipError_t hipMalloc(void** p, size_t n_bytes) {
  *p = nullptr;
  return n_bytes ? on_device([=] { return cuMemAlloc((CUdeviceptr*)p, n_bytes); }) : hipSuccess;
}
HIP_EXPORT hipError_t hipFree(void* p) {
  return p ? on_device([=] { return cuMemFree(pointer(p)); }) : hipSuccess;
}
HIP_EXPORT hipError_t hipHostMalloc(void** p, size_t n_bytes, unsigned) {
  return on_device([=] { return cuMemHostAlloc(p, n_bytes, CU_MEMHOSTALLOC_PORTABLE); });
}
HIP_EXPORT hipError_t hipHostFree(void* p) {
  return on_device([=] { return cuMemFreeHost(p); });
}
HIP_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t n_bytes, int, void* stream) {
  return on_device([=] { return cuMemcpyAsync(pointer(to), pointer(from), n_bytes, (CUstream)stream); });
}
HIP_EXPORT hipError_t hipMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t n_bytes,
                                         void* stream) {
  return on_device([=] {
    return cuMemcpyPeerAsync(pointer(to), context(to_device), pointer(from), context(from_device), n_bytes,
                             (CUstream)stream);
  });
}
HIP_EXPORT hipError_t hipMemsetAsync(void* p, int value, size_t n_bytes, void* stream) {
  return on_device([=] { return cuMemsetD8Async(pointer(p), (unsigned char)value, n_bytes, (CUstream)stream); });
}

HIP_EXPORT hipError_t hipStreamCreateWithFlags(void** stream, unsigned flags) {
  return on_device([=] { return cuStreamCreate((CUstream*)stream, flags); });
}
HIP_EXPORT hipError_t hipStreamDestroy(void* stream) {
  return on_device([=] { return cuStreamDestroy((CUstream)stream); });
}
HIP_EXPORT hipError_t hipStreamSynchronize(void* stream) {
  return on_device([=] { return cuStreamSynchronize((CUstream)stream); });
}
HIP_EXPORT hipError_t hipStreamWaitEvent(void* stream, void* event, unsigned) {
  return on_device([=] { return cuStreamWaitEvent((CUstream)stream, (CUevent)event, 0); });
}
HIP_EXPORT hipError_t hipDeviceSynchronize() {
  return on_device([] { return cuCtxSynchronize(); });
}
HIP_EXPORT hipError_t hipEventCreateWithFlags(void** event, unsigned flags) {  // hipEventDisableTiming is CUDA's 2
  return on_device([=] { return cuEventCreate((CUevent*)event, flags); });
}
HIP_EXPORT hipError_t hipEventDestroy(void* event) {
  return on_device([=] { return cuEventDestroy((CUevent)event); });
}
HIP_EXPORT hipError_t hipEventRecord(void* event, void* stream) {
  return on_device([=] { return cuEventRecord((CUevent)event, (CUstream)stream); });
}
HIP_EXPORT hipError_t hipEventSynchronize(void* event) {
  return on_device([=] { return cuEventSynchronize((CUevent)event); });
}
HIP_EXPORT hipError_t hipEventQuery(void* event) {
  return on_device([=] { return cuEventQuery((CUevent)event); });
}
HIP_EXPORT hipError_t hipEventElapsedTime(float* ms, void* from, void* to) {
  return on_device([=] { return cuEventElapsedTime(ms, (CUevent)from, (CUevent)to); });
}

HIP_EXPORT hipError_t hipModuleLoadData(void** module, const void* image) {
  return on_device([=] { return cuModuleLoadData((CUmodule*)module, image); });
}
HIP_EXPORT hipError_t hipModuleUnload(void* module) {
  return on_device([=] { return cuModuleUnload((CUmodule)module); });
}
HIP_EXPORT hipError_t hipModuleGetFunction(void** function, void* module, const char* name) {
  const hipError_t error = on_device([=] { return cuModuleGetFunction((CUfunction*)function, (CUmodule)module, name); });
  if (error) return error;
  // gfx1100 gives a workgroup its 64 KiB without asking. A kernel's form for this card may want more: it says how much.
  return on_device([=] {
    int n_bytes = kLdsBytes;
    CUdeviceptr wanted;
    size_t size;
    if (!cuModuleGetGlobal(&wanted, &size, (CUmodule)module, (std::string(name) + "_lds_bytes").c_str()))
      cuMemcpyDtoH(&n_bytes, wanted, sizeof n_bytes);
    return cuFuncSetAttribute((CUfunction)*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, n_bytes);
  });
}
HIP_EXPORT hipError_t hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned threads_x, unsigned threads_y, unsigned threads_z,
                                            unsigned lds_bytes, void* stream, void** params, void** extra) {
  if (lds_bytes > kLdsBytes) return hipErrorInvalidValue;
  return on_device([=] {
    int most_bytes = 0;
    cuFuncGetAttribute(&most_bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (CUfunction)function);
    return cuLaunchKernel((CUfunction)function, grid_x, grid_y, grid_z, threads_x, threads_y, threads_z,
                          most_bytes > (int)kLdsBytes ? most_bytes : lds_bytes, (CUstream)stream, params, extra);
  });
}

HIP_EXPORT hipError_t hipStreamBeginCapture(void* stream, int mode) {  // modes are CUDA's
  return on_device([=] { return cuStreamBeginCapture((CUstream)stream, (CUstreamCaptureMode)mode); });
}
HIP_EXPORT hipError_t hipStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;
  return on_device([=] { return cuStreamEndCapture((CUstream)stream, (CUgraph*)graph); });
}
HIP_EXPORT hipError_t hipGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  return on_device([=] { return cuGraphInstantiateWithFlags((CUgraphExec*)executable, (CUgraph)graph, flags); });
}
HIP_EXPORT hipError_t hipGraphUpload(void* executable, void* stream) {
  return on_device([=] { return cuGraphUpload((CUgraphExec)executable, (CUstream)stream); });
}
HIP_EXPORT hipError_t hipGraphDestroy(void* graph) {
  return on_device([=] { return cuGraphDestroy((CUgraph)graph); });
}
HIP_EXPORT hipError_t hipGraphExecDestroy(void* executable) {
  return on_device([=] { return cuGraphExecDestroy((CUgraphExec)executable); });
}
HIP_EXPORT hipError_t hipGraphLaunch(void* executable, void* stream) {
  return on_device([=] { return cuGraphLaunch((CUgraphExec)executable, (CUstream)stream); });
}
