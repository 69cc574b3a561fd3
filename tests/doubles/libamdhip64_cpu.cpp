// libamdhip64.so without a GPU: the calls that rocline makes, over host memory and cpu_shim.h. A code object is the
// host library that libhiprtc_cpu.cpp builds. Streams run at once, so every event is done when it is recorded, unless a
// test holds them: see double_hold. A graph is a list of what its stream was given while it was captured. Stricter than a
// card: a copy that leaves its allocation or names the wrong device is an error, not damage.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <vector>

#include "hip_abi.h"

namespace {
constexpr int kDevices = 8;
constexpr size_t kTotalBytes = (size_t)4 << 30, kAlignment = 256;
constexpr int kPoison = 0xCD;

struct Allocation {
  size_t n_bytes;
  int device;  // -1: pinned host memory
};
std::mutex mutex;
std::map<const char*, Allocation> allocations;
size_t used_bytes[kDevices];
thread_local int current = 0;

// Whether [p, p + n_bytes) may be touched on behalf of `device` (-1: any). Memory that is not ours is the test's.
bool fits(const void* p, size_t n_bytes, int device = -1) {
  std::lock_guard<std::mutex> hold(mutex);
  auto after = allocations.upper_bound((const char*)p);
  if (after == allocations.begin()) return true;
  const auto& [start, held] = *--after;
  const size_t offset = (const char*)p - start;
  if (offset >= held.n_bytes) return true;
  return n_bytes <= held.n_bytes - offset && (device < 0 || held.device < 0 || held.device == device);
}

hipError_t allocate(void** p, size_t n_bytes, int device) {
  std::lock_guard<std::mutex> hold(mutex);
  *p = nullptr;
  if (device >= 0 && n_bytes > kTotalBytes - used_bytes[device]) return hipErrorOutOfMemory;
  const size_t rounded = (n_bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (!n_bytes || !(*p = aligned_alloc(kAlignment, rounded))) return n_bytes ? hipErrorOutOfMemory : hipSuccess;
  if (n_bytes <= 64 << 20) memset(*p, kPoison, n_bytes);  // more would only cost time
  allocations[(const char*)*p] = {n_bytes, device};
  if (device >= 0) used_bytes[device] += n_bytes;
  return hipSuccess;
}

hipError_t release(void* p) {
  std::lock_guard<std::mutex> hold(mutex);
  if (!p) return hipSuccess;
  auto found = allocations.find((const char*)p);
  if (found == allocations.end()) return hipErrorInvalidValue;
  if (found->second.device >= 0) used_bytes[found->second.device] -= found->second.n_bytes;
  allocations.erase(found);
  free(p);
  return hipSuccess;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Mark {  // one recording of an event
  std::atomic<bool> passed{false};
  double at_ms = 0;
};
typedef std::shared_ptr<Mark> Passing;
struct Event {
  int device;
  Passing mark;  // empty before the first recording
};
struct Task {
  Passing after;  // nothing, or what must have passed
  std::function<void()> work;
};
struct Graph {
  std::vector<std::function<hipError_t()>> nodes;  // in the order of their stream
  bool is_broken = false;                          // by a call that no graph can hold
};
struct Stream : std::deque<Task> {
  int device = 0;
  std::unique_ptr<Graph> captured;  // while it is captured
};
thread_local Stream* captures = nullptr;  // the stream that this thread captures
std::recursive_mutex streams_mutex;
std::list<Stream> streams(1);  // oldest first; the first is every device's null stream
std::atomic<bool> held{false};

Stream& stream_of(void* handle) { return handle ? *(Stream*)handle : streams.front(); }

void enqueue(void* stream, std::function<void()> work, Passing after = nullptr) {
  if (Graph* graph = stream_of(stream).captured.get()) {
    graph->nodes.push_back([=] {
      work();
      return hipSuccess;
    });
  } else if (held) {
    std::lock_guard<std::recursive_mutex> hold(streams_mutex);
    stream_of(stream).push_back({after, work});
  } else if (work) {
    work();
  }
}

// Until no stream may go on, a task of the newest or the oldest stream that may.
void drain(bool newest_first = false) {
  if (!held) return;
  std::lock_guard<std::recursive_mutex> hold(streams_mutex);
  const auto step = [](Stream& stream) {
    if (stream.empty() || (stream.front().after && !stream.front().after->passed)) return false;
    if (stream.front().work) stream.front().work();
    stream.pop_front();
    return true;
  };
  while (newest_first ? std::any_of(streams.rbegin(), streams.rend(), step)
                      : std::any_of(streams.begin(), streams.end(), step)) {
  }
}

// Whether the calling thread captures, in which it must not wait for the device or change memory.
bool breaks_capture() {
  if (captures) captures->captured->is_broken = true;
  return captures;
}

// Faults of copies between two devices, or a device and the host's memory, which is number kDevices.
enum Fault { kNone, kCorrupt, kRefuse };
std::atomic<int> faults[kDevices + 1][kDevices + 1];

int place_of(const void* p) {  // a device, or the host
  std::lock_guard<std::mutex> hold(mutex);
  auto after = allocations.upper_bound((const char*)p);
  if (after == allocations.begin()) return kDevices;
  const auto& [start, allocation] = *--after;
  return allocation.device >= 0 && (size_t)((const char*)p - start) < allocation.n_bytes ? allocation.device : kDevices;
}

hipError_t copy(void* to, int to_device, const void* from, int from_device, size_t n_bytes, void* stream) {
  if (!fits(to, n_bytes, to_device) || !fits(from, n_bytes, from_device)) return hipErrorInvalidValue;
  const int fault = faults[place_of(from)][place_of(to)];
  if (fault == kRefuse) return hipErrorUnknown;
  enqueue(stream, [=] {
    memmove(to, from, n_bytes);
    if (fault == kCorrupt && n_bytes) ((char*)to)[n_bytes / 2] ^= 1;
  });
  return hipSuccess;
}

struct Shape {  // rl_cpu's
  unsigned grid_x, grid_y;
  int n_threads;
  size_t lds_bytes;
  int step;
};
typedef int (*Launch)(void** params, const Shape* shape, char* error, size_t error_bytes);
struct Function {
  Launch launch;
  const size_t* argument_bytes;  // 0 behind the last
};

hipError_t run_kernel(Launch launch, void** params, Shape shape) {
  static std::atomic<unsigned> n_launches{0};
  shape.step = n_launches++ % 2 ? -1 : 1;
  char error[256] = "";
  if (!launch(params, &shape, error, sizeof error)) return hipSuccess;
  fprintf(stderr, "HIP double: %s\n", error);
  return hipErrorLaunchFailure;
}

// The same launch later, of the arguments as they are now.
std::function<hipError_t()> kernel_node(const Function& function, void** params, const Shape& shape) {
  std::vector<std::vector<char>> arguments;
  for (const size_t* n_bytes = function.argument_bytes; *n_bytes; ++n_bytes) {
    const char* value = (const char*)params[arguments.size()];
    arguments.emplace_back(value, value + *n_bytes);
  }
  return [=, launch = function.launch]() mutable {
    std::vector<void*> pointers;
    for (std::vector<char>& argument : arguments) pointers.push_back(argument.data());
    return run_kernel(launch, pointers.data(), shape);
  };
}
}  // namespace

// For tests. While held, copies, fills and events stay queued on their streams; a call that waits for the device lets
// them run, and so does a launch. let_go ends it: run with both orders, a wait that is missing shows.
HIP_EXPORT void double_hold() { held = true; }
HIP_EXPORT void double_let_go(int newest_first) {
  std::lock_guard<std::recursive_mutex> hold(streams_mutex);
  drain(newest_first);
  held = false;
}
HIP_EXPORT void double_fault(int from, int to, int fault) {
  faults[from < 0 ? kDevices : from][to < 0 ? kDevices : to] = fault;
}

HIP_EXPORT hipError_t hipGetDeviceCount(int* n) {
  *n = kDevices;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= kDevices) return hipErrorInvalidDevice;
  current = device;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  *version = RUNTIME_VERSION;  // changes with whatever changes compiled code
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGetDevicePropertiesR0600(char* prop, int device) {
  if (device < 0 || device >= kDevices) return hipErrorInvalidDevice;
  fill_properties(prop, "CPU double", kTotalBytes, "cpu", 1);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> hold(mutex);
  *total_bytes = kTotalBytes;
  *free_bytes = kTotalBytes - used_bytes[current];
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned) {
  static bool enabled[kDevices][kDevices];
  if (peer < 0 || peer >= kDevices || peer == current) return hipErrorInvalidDevice;
  std::lock_guard<std::mutex> hold(mutex);
  const bool again = enabled[current][peer];
  enabled[current][peer] = true;
  return again ? hipErrorPeerAccessAlreadyEnabled : hipSuccess;
}

HIP_EXPORT hipError_t hipMalloc(void** p, size_t n_bytes) {
  return breaks_capture() ? hipErrorStreamCaptureUnsupported : allocate(p, n_bytes, current);
}
HIP_EXPORT hipError_t hipFree(void* p) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  drain();
  return release(p);
}
HIP_EXPORT hipError_t hipHostMalloc(void** p, size_t n_bytes, unsigned) {
  return breaks_capture() ? hipErrorStreamCaptureUnsupported : allocate(p, n_bytes, -1);
}
HIP_EXPORT hipError_t hipHostFree(void* p) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  drain();
  return release(p);
}
HIP_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t n_bytes, int, void* stream) {
  return copy(to, -1, from, -1, n_bytes, stream);
}
HIP_EXPORT hipError_t hipMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t n_bytes,
                                         void* stream) {
  return copy(to, to_device, from, from_device, n_bytes, stream);
}
HIP_EXPORT hipError_t hipMemsetAsync(void* p, int value, size_t n_bytes, void* stream) {
  if (!fits(p, n_bytes)) return hipErrorInvalidValue;
  enqueue(stream, [=] { memset(p, value, n_bytes); });
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamCreateWithFlags(void** stream, unsigned) {
  std::lock_guard<std::recursive_mutex> hold(streams_mutex);
  Stream& made = streams.emplace_back();
  made.device = current;
  *stream = &made;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamDestroy(void* stream) {
  std::lock_guard<std::recursive_mutex> hold(streams_mutex);
  if (!stream_of(stream).empty()) drain();
  streams.remove_if([=](const Stream& each) { return &each == stream; });
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamSynchronize(void*) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  drain();
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamWaitEvent(void* stream, void* event, unsigned) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  enqueue(stream, nullptr, ((Event*)event)->mark);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDeviceSynchronize() {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  drain();
  return hipSuccess;
}
HIP_EXPORT hipError_t hipEventCreateWithFlags(void** event, unsigned) {
  *event = new Event{current, nullptr};
  return hipSuccess;
}
HIP_EXPORT hipError_t hipEventDestroy(void* event) {
  delete (Event*)event;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipEventRecord(void* event, void* stream) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  if ((stream ? stream_of(stream).device : current) != ((Event*)event)->device) return hipErrorUnknown;  // as CUDA's
  const Passing mark = ((Event*)event)->mark = std::make_shared<Mark>();
  enqueue(stream, [=] {
    mark->at_ms = now_ms();
    mark->passed = true;
  });
  return hipSuccess;
}
HIP_EXPORT hipError_t hipEventSynchronize(void*) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  drain();
  return hipSuccess;
}
HIP_EXPORT hipError_t hipEventQuery(void* event) {
  if (breaks_capture()) return hipErrorStreamCaptureUnsupported;
  const Passing& mark = ((Event*)event)->mark;
  return !mark || mark->passed ? hipSuccess : hipErrorNotReady;
}
HIP_EXPORT hipError_t hipEventElapsedTime(float* ms, void* from, void* to) {
  const Passing &start = ((Event*)from)->mark, &end = ((Event*)to)->mark;
  if (!start || !end) return hipErrorInvalidValue;
  *ms = (float)(end->at_ms - start->at_ms);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipModuleLoadData(void** module, const void* image) {
  const char* elf = (const char*)image;
  if (memcmp(elf, "\177ELF", 4)) return hipErrorNoBinaryForGpu;
  uint64_t sections;  // where the section table, the last thing in the file, starts
  uint16_t section_bytes, n_sections;
  memcpy(&sections, elf + 40, sizeof sections);
  memcpy(&section_bytes, elf + 58, sizeof section_bytes);
  memcpy(&n_sections, elf + 60, sizeof n_sections);
  const size_t n_bytes = sections + (size_t)section_bytes * n_sections;
  // A file of its own: dlopen takes a library of the same path for the same library.
  char path[] = "/tmp/hip-double-XXXXXX";
  const int file = mkstemp(path);
  *module = nullptr;
  if (file >= 0 && write(file, elf, n_bytes) == (ssize_t)n_bytes) *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fprintf(stderr, "HIP double: %s\n", dlerror());
  if (file >= 0) {
    close(file);
    unlink(path);
  }
  return *module ? hipSuccess : hipErrorNoBinaryForGpu;
}
HIP_EXPORT hipError_t hipModuleUnload(void* module) {
  dlclose(module);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipModuleGetFunction(void** function, void* module, const char* name) {
  const Launch launch = (Launch)dlsym(module, (std::string(name) + "__launch").c_str());
  const auto sizes = (const size_t* const*)dlsym(module, (std::string(name) + "__argument_bytes").c_str());
  *function = launch && sizes ? new Function{launch, *sizes} : nullptr;  // as long as the process, as modules are
  return *function ? hipSuccess : hipErrorNotFound;
}
HIP_EXPORT hipError_t hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned threads_x, unsigned threads_y, unsigned threads_z,
                                            unsigned lds_bytes, void* stream, void** params, void**) {
  if (!grid_x || !grid_y || grid_z != 1 || !threads_x || threads_x > kMaxThreads || threads_y != 1 ||
      threads_z != 1 || lds_bytes > kLdsBytes)
    return hipErrorInvalidValue;
  const Shape shape = {grid_x, grid_y, (int)threads_x, lds_bytes, 1};
  if (Graph* graph = stream_of(stream).captured.get()) {
    graph->nodes.push_back(kernel_node(*(const Function*)function, params, shape));
    return hipSuccess;
  }
  drain();  // the arguments live no longer than this call
  return run_kernel(((const Function*)function)->launch, params, shape);
}

HIP_EXPORT hipError_t hipStreamBeginCapture(void* stream, int) {
  if (!stream || captures || stream_of(stream).captured) return hipErrorStreamCaptureUnsupported;
  captures = &stream_of(stream);
  captures->captured = std::make_unique<Graph>();
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;
  if (!captures || captures != stream) return hipErrorInvalidValue;
  std::unique_ptr<Graph> captured = std::move(captures->captured);
  captures = nullptr;
  if (captured->is_broken) return hipErrorStreamCaptureInvalidated;
  *graph = captured.release();
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*(const Graph*)graph);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGraphUpload(void*, void*) { return hipSuccess; }
HIP_EXPORT hipError_t hipGraphDestroy(void* graph) {
  delete (Graph*)graph;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGraphExecDestroy(void* executable) { return hipGraphDestroy(executable); }
HIP_EXPORT hipError_t hipGraphLaunch(void* executable, void* stream) {
  if (stream_of(stream).captured) return hipErrorStreamCaptureUnsupported;
  drain();  // as a launch does
  for (const std::function<hipError_t()>& node : ((const Graph*)executable)->nodes)
    if (const hipError_t error = node()) return error;
  return hipSuccess;
}
