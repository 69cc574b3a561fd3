"""The CPU double notices what a GPU would leave undefined: the reason it can stand for one in CI."""

from pathlib import Path

import pytest
import torch

from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.runtime import HipError

PROBES = Path(__file__).with_name("shim_probes.hip")
POISON = -842150451  # 0xCDCDCDCD


@pytest.fixture(autouse=True)
def cpu(device):
    if device.is_card:
        pytest.skip("misuse that only the CPU double answers")


def run(name, out, *inputs, threads=32, lds_bytes=0, grid=(1, 1)):
    args = (out, *inputs) if out is not None else ()
    kernel = Kernel(PROBES, name, "P" * len(args), threads=threads, lds_bytes=lds_bytes)
    launch(kernel, grid=grid, args=args, lds_bytes=lds_bytes)
    return out


def ints(n):
    return torch.full((n,), -1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "threads", "reason"),
    [
        ("some_miss_a_wave_barrier", 64, "deadlock: threads wait at different barriers"),
        ("waves_wait_for_different_things", 64, "deadlock: threads wait at different barriers"),
        ("lanes_disagree", 32, "lanes of a wave meet in different operations"),
        ("runs_over_its_stack", 64, "a thread ran over its stack"),
        ("matrix_step_of_some", 32, "a matrix step in a wave of fewer than 32 lanes"),
    ],
)
def test_misuse_ends_the_launch(capfd, name, threads, reason):
    inputs = {"matrix_step_of_some": [ints(128)], "some_miss_a_wave_barrier": None}.get(name, [])
    out = None if "wait" in name or "miss" in name else ints(64)
    with pytest.raises(HipError, match=f"{name} on device 0: hipErrorLaunchFailure") as caught:
        run(name, out, *(inputs or []), threads=threads, grid=(3, 1))
    assert caught.value.name == "hipErrorLaunchFailure"
    assert reason in capfd.readouterr().err
    early = run("early_return", ints(96), threads=96)  # the next launch is not touched by it
    assert early[1] != -1


def test_two_launches_run_lanes_in_opposite_orders():
    first = run("race", ints(64), threads=64, lds_bytes=256)
    second = run("race", ints(64), threads=64, lds_bytes=256)
    assert not torch.equal(first, second)


def test_every_workgroup_starts_with_poisoned_lds():
    assert run("reads_unwritten_lds", ints(32), lds_bytes=128, grid=(5, 5)).eq(POISON).all()


def test_a_returned_lane_has_no_value():
    out = run("shuffles_from_a_returned_lane", ints(32))
    assert out[0] == POISON
    assert out[4:].eq(1).all()


def test_returned_threads_are_not_waited_for():
    out = run("early_return", ints(96), threads=96)
    for t in range(96):
        there = [lane for lane in range(32) if (t // 32 * 32 + lane) % 3]
        want = sum(1 << lane for lane in there) if t % 3 and t < 64 else -1
        assert (int(out[t]) - want) % 2**32 == 0, t
