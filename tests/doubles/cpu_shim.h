// cpu_shim.h: port.hip.h's primitives on the CPU. Include it first, with RL_CPU defined; g++ or clang++, C++17.
//
// Every GPU thread is a fiber. The lanes of a wave meet in wave operations, the whole workgroup in rl_sync(), and
// what a GPU would leave undefined ends the launch with an error: lanes that meet in different operations, barriers
// that not all reach, a matrix step of fewer than 32 lanes. LDS starts poisoned, and lanes run in ascending order in
// one launch and in descending order in the next, so a missing barrier tends to give two answers. Workgroups are
// spread over OS threads.
#pragma once
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace rl_cpu {

// ---- fibers ----
constexpr size_t kStackBytes = 256 << 10, kEndBytes = 64;  // only touched pages cost memory
constexpr int kPoison = 0xCD, kPoisonWord = (int)0xCDCDCDCD;

#if defined(__x86_64__)
typedef void* Context;
extern "C" void rl_cpu_switch(Context* save, Context to);
// Saves what the calling convention says a function must keep, on the stack it leaves.
asm(".weak rl_cpu_switch\n.hidden rl_cpu_switch\n.type rl_cpu_switch,@function\nrl_cpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nretq\n");
inline void switch_to(Context& from, Context& to) { rl_cpu_switch(&from, to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = (void**)(stack + kStackBytes) - 1;  // where entry would find its return address
  *top = nullptr;
  *--top = (void*)entry;
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
  context = top;
}
#else
typedef ucontext_t Context;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

// Of all fibers of a workgroup, one after the other in one memory mapping: a process may have some ten thousand of those,
// a guard page between stacks would take one each, and there are as many sets as kernels. What runs over the end of its
// stack is found at its next switch, before the fiber it ran into goes on.
class Stacks {
 public:
  ~Stacks() { unmap(); }
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  void operator=(const Stacks&) = delete;
  void make_room(int n) {
    if (n <= n_) return;
    unmap();
    n_ = n;
    base_ = (char*)mmap(nullptr, (n + 1) * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
    if (base_ == MAP_FAILED) abort();
    mend();
  }
  void mend() {
    for (int i = 0; i < n_; ++i) memset(at(i), kPoison, kEndBytes);
  }
  char* at(int i) const { return base_ + (i + 1) * kStackBytes; }  // below the first is room to run into
  bool is_whole(int i) const {
    const char* end = at(i);  // stacks grow down
    if ((char*)__builtin_frame_address(0) < end + kEndBytes) return false;
    for (size_t at = 0; at < kEndBytes; ++at)
      if (end[at] != (char)kPoison) return false;
    return true;
  }

 private:
  void unmap() {
    if (base_) munmap(base_, (n_ + 1) * kStackBytes);
  }
  char* base_ = nullptr;
  int n_ = 0;
};

// ---- a workgroup ----
enum class Op { kNone, kSync, kShuffle, kBallot, kMmaI8, kMmaBf16 };

struct Lane {
  Context context;
  bool done;
  const unsigned* waits_for;  // a barrier's phase counter; null: can run
  unsigned phase;             // the phase it arrived in
  int value, source, result;  // of a shuffle or ballot
  const void *a, *b;          // of a matrix step
  void* acc;
};

struct Barrier {
  unsigned phase = 0;
  int arrived = 0, live = 0;
  Op op = Op::kNone;
};

struct Workgroup {
  unsigned group_x, group_y;
  int n_threads, current, step;
  int n_done;
  char* lds;
  void (*entry)(void*);
  void* arguments;
  Context main;
  Stacks stacks;
  std::vector<Lane> lanes;
  std::vector<Barrier> waves;
  Barrier all;
  std::string error;
};

inline thread_local Workgroup* group = nullptr;

inline Lane& self() { return group->lanes[group->current]; }

// Ends the workgroup from inside a fiber. The other fibers are dropped: kernels own nothing.
inline void fail(const char* what) {
  Workgroup& g = *group;
  g.error = std::string(what) + " (workgroup " + std::to_string(g.group_x) + "," + std::to_string(g.group_y) +
            ", thread " + std::to_string(g.current) + ")";
  switch_to(self().context, g.main);
}

// Runs the next fiber that can go on.
inline void yield() {
  Workgroup& g = *group;
  const int me = g.current;
  if (!g.stacks.is_whole(me)) fail("a thread ran over its stack");
  for (int i = 1, next = me; i <= g.n_threads; ++i) {
    next = (next + g.step + g.n_threads) % g.n_threads;
    Lane& lane = g.lanes[next];
    if (lane.done || (lane.waits_for && *lane.waits_for == lane.phase)) continue;
    lane.waits_for = nullptr;
    g.current = next;
    if (next != me) switch_to(g.lanes[me].context, lane.context);
    return;
  }
  if (g.n_done < g.n_threads) fail("deadlock: threads wait at different barriers");
  switch_to(g.lanes[me].context, g.main);
}

// ---- matrix steps: gfx1100's layout, lane L holding row L % 16 of A and of B ----
template <class T, class Sum, int kDepth, Sum (*kValue)(T)>
void mma(Lane* lanes) {
  Sum b[kDepth][16], sums[16][16] = {};
  for (int n = 0; n < 16; ++n)
    for (int k = 0; k < kDepth; ++k) b[k][n] = kValue(((const T*)lanes[n].b)[k]);
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < kDepth; ++k) {
      const Sum a = kValue(((const T*)lanes[m].a)[k]);
      for (int n = 0; n < 16; ++n) sums[m][n] += a * b[k][n];
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 8; ++i) ((Sum*)lanes[lane].acc)[i] += sums[2 * i + (lane >> 4)][lane & 15];
}
inline int value_i8(int8_t v) { return v; }
inline float value_bf16(uint16_t v) {
  const uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline void shuffle(Lane* lanes, int n) {
  for (int i = 0; i < n; ++i) {
    const int source = lanes[i].source & 31;
    const bool there = source < n && !lanes[source].done;
    lanes[i].result = there ? lanes[source].value : kPoisonWord;
  }
}
inline void vote(Lane* lanes, int n) {
  uint32_t mask = 0;
  for (int i = 0; i < n; ++i) mask |= (uint32_t)(!lanes[i].done && lanes[i].value) << i;
  for (int i = 0; i < n; ++i) lanes[i].result = (int)mask;
}

// ---- barriers ----
inline void complete(Barrier& barrier, int first_lane) {
  Workgroup& g = *group;
  Lane* lanes = &g.lanes[first_lane];
  const int n = g.n_threads - first_lane < 32 ? g.n_threads - first_lane : 32;
  if ((barrier.op == Op::kMmaI8 || barrier.op == Op::kMmaBf16) && barrier.live != 32)
    fail("a matrix step in a wave of fewer than 32 lanes");
  switch (barrier.op) {
    case Op::kShuffle: shuffle(lanes, n); break;
    case Op::kBallot: vote(lanes, n); break;
    case Op::kMmaI8: mma<int8_t, int, 32, value_i8>(lanes); break;
    case Op::kMmaBf16: mma<uint16_t, float, 16, value_bf16>(lanes); break;
    default: break;
  }
  barrier.arrived = 0;
  barrier.op = Op::kNone;
  ++barrier.phase;
}
inline void complete_if_all_are_here(Barrier& barrier, int first_lane) {
  if (barrier.arrived && barrier.arrived == barrier.live) complete(barrier, first_lane);
}
inline void meet(Barrier& barrier, int first_lane, Op op) {
  if (barrier.arrived && barrier.op != op) fail("lanes of a wave meet in different operations");
  const unsigned phase = barrier.phase;
  barrier.op = op;
  ++barrier.arrived;
  complete_if_all_are_here(barrier, first_lane);
  if (barrier.phase != phase) return;
  self().phase = phase;
  self().waits_for = &barrier.phase;
  yield();
}
inline void meet_wave(Op op) {
  const int wave = group->current >> 5;
  meet(group->waves[wave], wave * 32, op);
}
inline int shuffle(int value, int source) {
  self().value = value;
  self().source = source;
  meet_wave(Op::kShuffle);
  return self().result;
}
inline uint32_t ballot(bool value) {
  self().value = value;
  meet_wave(Op::kBallot);
  return (uint32_t)self().result;
}
inline void mma_step(Op op, void* acc, const void* a, const void* b) {
  Lane& lane = self();
  lane.acc = acc;
  lane.a = a;
  lane.b = b;
  meet_wave(op);
}
inline void mma_i8(int* acc, const signed char* a, const signed char* b) { mma_step(Op::kMmaI8, acc, a, b); }
inline void mma_bf16(float* acc, const unsigned short* a, const unsigned short* b) {
  mma_step(Op::kMmaBf16, acc, a, b);
}

// ---- launches ----
inline void fiber() {
  Workgroup& g = *group;
  g.entry(g.arguments);
  Lane& lane = self();
  const int wave = g.current >> 5;
  lane.done = true;
  ++g.n_done;
  --g.waves[wave].live;  // a thread that has returned holds up no barrier
  --g.all.live;
  complete_if_all_are_here(g.waves[wave], wave * 32);
  complete_if_all_are_here(g.all, 0);
  yield();
}

inline void run(Workgroup& g) {
  const int n_waves = (g.n_threads + 31) / 32;
  g.waves.assign(n_waves, Barrier());
  for (int w = 0; w < n_waves; ++w) g.waves[w].live = g.n_threads - w * 32 < 32 ? g.n_threads - w * 32 : 32;
  g.all = Barrier();
  g.all.live = g.n_threads;
  g.n_done = 0;
  g.lanes.resize(std::max((int)g.lanes.size(), g.n_threads));
  g.stacks.make_room(g.n_threads);
  for (int t = 0; t < g.n_threads; ++t) {
    Lane& lane = g.lanes[t];
    lane.done = false;
    lane.waits_for = nullptr;
    prepare(lane.context, g.stacks.at(t), fiber);
  }
  g.current = g.step > 0 ? 0 : g.n_threads - 1;
  switch_to(g.main, self().context);
}

// A workgroup between launches of this module: its stacks serve whichever thread comes next.
struct Idle {
  std::mutex mutex;
  std::unique_ptr<Workgroup> group;

  std::unique_ptr<Workgroup> take() {
    std::lock_guard<std::mutex> hold(mutex);
    return group ? std::move(group) : std::make_unique<Workgroup>();
  }
  void put(std::unique_ptr<Workgroup> used) {
    std::lock_guard<std::mutex> hold(mutex);
    group.swap(used);  // what was there goes after the lock
  }
};
inline Idle idle;

struct Shape {
  unsigned grid_x, grid_y;
  int n_threads;
  size_t lds_bytes;
  int step;  // +1 or -1: the order in which lanes run
};

// Returns what went wrong, empty if nothing.
inline std::string launch(void (*entry)(void*), void* arguments, const Shape& shape) {
  const uint64_t n_groups = (uint64_t)shape.grid_x * shape.grid_y;
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::string error;
  auto work = [&] {
    std::unique_ptr<Workgroup> taken = idle.take();
    Workgroup& g = *taken;
    group = &g;
    g.n_threads = shape.n_threads;
    g.step = shape.step;
    g.entry = entry;
    g.arguments = arguments;
    std::unique_ptr<char, decltype(&free)> lds((char*)aligned_alloc(64, (shape.lds_bytes / 64 + 1) * 64), free);
    g.lds = lds.get();
    for (uint64_t i; (i = next++) < n_groups;) {
      memset(g.lds, kPoison, shape.lds_bytes);
      g.group_x = (unsigned)(i % shape.grid_x);
      g.group_y = (unsigned)(i / shape.grid_x);
      g.error.clear();
      run(g);
      if (g.error.empty()) continue;
      g.stacks.mend();
      next = n_groups;
      std::lock_guard<std::mutex> hold(mutex);
      error = g.error;
      break;
    }
    idle.put(std::move(taken));
  };
  const uint64_t n_cores = std::thread::hardware_concurrency();
  std::vector<std::thread> threads;
  for (uint64_t i = 1; i < n_cores && i < n_groups; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return error;
}

// A kernel's arguments as HIP's kernelParams hands them over: one pointer each.
template <class... Args>
struct Call {
  void (*kernel)(Args...);
  void** params;
  template <size_t... I>
  void apply(std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<Args>*)params[I]...);
  }
  static void entry(void* call) { ((Call*)call)->apply(std::index_sequence_for<Args...>()); }
};
// What the HIP double keeps of them while a graph is captured: their sizes, and 0 at the end.
template <class... Args>
constexpr std::array<size_t, sizeof...(Args) + 1> argument_bytes(void (*)(Args...)) {
  return {sizeof(Args)..., 0};
}
template <class... Args>
std::string launch_kernel(void (*kernel)(Args...), void** params, const Shape& shape) {
  Call<Args...> call{kernel, params};
  return launch(&Call<Args...>::entry, &call, shape);
}

}  // namespace rl_cpu

// ---- what port.hip.h expects ----
#define RL_DEV static inline
#define RL_KERNEL(threads) extern "C" void
#define RL_DYN_SHARED(T, name) T* const name = (T*)rl_cpu::group->lds
// What the HIP double looks up: 0, or 1 with the reason in `error`.
#define RL_EXPORT(name)                                                                                        \
  extern "C" __attribute__((visibility("default"))) int name##__launch(void** params, const rl_cpu::Shape* shape, \
                                                                       char* error, size_t error_bytes) {      \
    const std::string what = rl_cpu::launch_kernel(name, params, *shape);                                      \
    if (what.empty()) return 0;                                                                                \
    strncpy(error, what.c_str(), error_bytes - 1);                                                             \
    return 1;                                                                                                  \
  }                                                                                                            \
  extern "C" {                                                                                                 \
  extern __attribute__((visibility("default"))) const size_t* const name##__argument_bytes;                    \
  static constexpr auto name##_argument_bytes = rl_cpu::argument_bytes(name);                                  \
  const size_t* const name##__argument_bytes = name##_argument_bytes.data();                                   \
  }

RL_DEV int rl_tid() { return rl_cpu::group->current; }
RL_DEV int rl_bid_x() { return (int)rl_cpu::group->group_x; }
RL_DEV int rl_bid_y() { return (int)rl_cpu::group->group_y; }
RL_DEV void rl_sync() { rl_cpu::meet(rl_cpu::group->all, 0, rl_cpu::Op::kSync); }
RL_DEV void rl_wave_sync() { rl_cpu::meet_wave(rl_cpu::Op::kSync); }

namespace rl {
RL_DEV int uniform(int v) { return v; }
RL_DEV int shfl(int v, int source) { return rl_cpu::shuffle(v, source); }
template <int kMask>
RL_DEV int shfl_xor(int v) {
  return rl_cpu::shuffle(v, rl_cpu::group->current ^ kMask);
}
RL_DEV uint32_t ballot(bool p) { return rl_cpu::ballot(p); }
RL_DEV int popcount(uint32_t v) { return __builtin_popcount(v); }
RL_DEV int leading_zeros(uint32_t v) { return v ? __builtin_clz(v) : 32; }
RL_DEV int dot4(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
  return c;
}
RL_DEV int as_int(float v) {
  int bits;
  memcpy(&bits, &v, 4);
  return bits;
}
RL_DEV float as_float(int v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
RL_DEV float fma(float a, float b, float c) { return std::fma(a, b, c); }
RL_DEV float max(float a, float b) { return a > b ? a : b; }
RL_DEV int lds_add(int* p, int v) { return (*p += v) - v; }
RL_DEV int device_add(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
RL_DEV void device_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
RL_DEV void no_overlap() {}
}  // namespace rl
