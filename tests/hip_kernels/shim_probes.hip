// Kernels that are wrong in ways a GPU need not notice. test_cpu_shim.py holds how the CPU double answers.
#include "port.hip.h"

RL_KERNEL(64) some_miss_a_wave_barrier() {
  if (rl_tid() < 5)
    rl_wave_sync();
  else
    rl_sync();
}
RL_EXPORT(some_miss_a_wave_barrier)

RL_KERNEL(64) waves_wait_for_different_things() {
  if (rl_tid() & 1) rl_sync();
  else rl_wave_sync();
}
RL_EXPORT(waves_wait_for_different_things)

RL_KERNEL(32) lanes_disagree(int* out) {
  out[rl_tid()] = rl_tid() < 7 ? rl::shfl(1, 0) : (int)rl::ballot(true);
}
RL_EXPORT(lanes_disagree)

RL_KERNEL(32) matrix_step_of_some(int* out, const rl_i8* rows) {
  if (rl_tid() == 31) return;
  rl::AccI32 acc = {};
  const rl::FragI8 rows_frag = rl::load_rows(rows, 32);
  rl::mma(acc, rows_frag, rows_frag);
  out[rl_tid()] = acc.v[0];
}
RL_EXPORT(matrix_step_of_some)

RL_KERNEL(64) runs_over_its_stack(int* out) {
  if (rl_tid() == 7) {
    volatile char large[300 << 10];
    for (int i = (300 << 10) - 1; i >= 0; i -= 32) large[i] = 1;
  }
  rl_sync();
  out[rl_tid()] = 1;
}
RL_EXPORT(runs_over_its_stack)

// Without the barrier it needs: what a thread reads depends on who ran first.
RL_KERNEL(64) race(int* out) {
  RL_DYN_SHARED(int, lds);
  lds[rl_tid()] = rl_tid();
  out[rl_tid()] = lds[63 - rl_tid()];
}
RL_EXPORT(race)

RL_KERNEL(32) reads_unwritten_lds(int* out) {
  RL_DYN_SHARED(int, lds);
  out[rl_tid()] = lds[rl_tid()];
  rl_sync();
  lds[rl_tid()] = 0;  // the next workgroup must not see it
}
RL_EXPORT(reads_unwritten_lds)

RL_KERNEL(32) shuffles_from_a_returned_lane(int* out) {
  if (rl_tid() == 3) return;
  out[rl_tid()] = rl::shfl(1, rl_tid() == 0 ? 3 : 0);
}
RL_EXPORT(shuffles_from_a_returned_lane)

// Threads that have returned hold up no barrier and vote in no ballot.
RL_KERNEL(96) early_return(int* out) {
  const int t = rl_tid();
  if (t % 3 == 0 || t >= 64) return;
  const rl_u32 there = rl::ballot(true);
  rl_sync();
  out[t] = (int)there;
}
RL_EXPORT(early_return)
