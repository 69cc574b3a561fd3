"""What is known of a stage's work later than the host queued it: bad rows, and moments."""

import time

import hip_doubles
import pytest
import torch

from rocline.engine import scratch
from rocline.engine.handoff import HandOff, Reach, RowKind, RowSpan
from rocline.engine.marks import HostClock, StreamClock
from rocline.engine.row_checks import SLOTS, DeviceChecks, HostChecks
from rocline.engine.scratch import StageMemory
from rocline.hip_kernels.driver import devices

MOST_ROWS = 9


def rows_of(sequence, bad_row=None, put=lambda tensor: tensor):
    streams_bf16 = torch.ones((MOST_ROWS, 4, 32), dtype=torch.bfloat16)
    if bad_row is not None:
        streams_bf16[bad_row, 1, 5] = float("nan")
    spans = (RowSpan(sequence, 100, MOST_ROWS, RowKind.PREFILL, Reach(200, 16, 5, 2), 199),)
    positions_i32 = torch.arange(MOST_ROWS, dtype=torch.int32)
    return HandOff(spans, positions_i32, positions_i32[:, None], put(streams_bf16), torch.zeros(MOST_ROWS, 4))


def test_on_the_host_everything_is_known_at_once():
    checks = HostChecks()
    checks.begin(rows_of(3, 4))
    checks.begin(rows_of(5))
    assert checks.found() == [(3, 104)]
    assert checks.found() == []
    before_ns = time.monotonic_ns()
    assert before_ns <= HostClock().mark()() <= time.monotonic_ns()


@pytest.fixture
def memory(hip_device):
    gpu = devices()[0]
    slab = gpu.allocate(1 << 20)
    yield StageMemory(1 << 20, slab_u8=slab.tensor())
    slab.free()


def test_on_a_device_it_is_known_when_the_device_has_come_there(hip_device, memory):
    if hip_device != "cpu":
        pytest.skip("only the CPU double can be held back")
    checks = DeviceChecks(MOST_ROWS)
    with devices()[0].stream() as stream, scratch.use(memory):
        clock = StreamClock(stream)
        with hip_doubles.CpuDouble().held():
            with memory.scope():
                began = clock.mark()
                checks.begin(rows_of(3, 4))
                checks.begin(rows_of(5))
                ended = clock.mark()
            assert checks.found() == []
            assert began() is None
            stream.synchronize()
        assert checks.found() == [(3, 104)]
        assert began() <= ended() <= time.monotonic_ns()
        checks.close()


def test_more_checks_than_there_is_room_for_lose_nothing(hip_device, memory):
    put = (lambda tensor: tensor.to("cuda")) if hip_device != "cpu" else (lambda tensor: tensor)
    checks = DeviceChecks(MOST_ROWS)
    with devices()[0].stream() as stream, scratch.use(memory), memory.scope():
        for sequence in range(3 * SLOTS):
            checks.begin(rows_of(sequence, sequence % MOST_ROWS if sequence % 2 else None, put))
        stream.synchronize()
    assert checks.found() == [(n, 100 + n % MOST_ROWS) for n in range(3 * SLOTS) if n % 2]
    checks.close()
