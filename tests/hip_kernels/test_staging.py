"""Host tensors on their way to a device: whole, in order, and never written over while a copy waits."""

import hip_doubles
import pytest
import torch

from rocline.hip_kernels import staging
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.staging import Staging, fetch


@pytest.fixture
def stream(device):
    return devices()[0].stream()


def test_every_dtype_and_size_arrives(device, stream, rng, monkeypatch):
    monkeypatch.setattr(staging, "PART_BYTES", 64)
    with stream:
        room = Staging()
        for n, dtype in (
            (0, torch.int32),
            (1, torch.uint8),
            (5, torch.int64),
            (3, torch.bfloat16),
            (1000, torch.float32),
        ):
            source = torch.from_numpy(rng.integers(-99, 99, n)).to(dtype)
            target = device.full((n,), 1, dtype)
            room.put(source, target)
            assert torch.equal(fetch(target), source)
        room.close()


def test_parts_are_written_again_only_when_their_copies_have_passed(device, stream, rng, monkeypatch):
    if device.is_card:
        pytest.skip("only the double holds its streams")
    monkeypatch.setattr(staging, "PART_BYTES", 256)
    sources = [torch.from_numpy(rng.integers(0, 256, 100)).to(torch.uint8) for _ in range(40)]
    targets = [device.full((100,), 0, torch.uint8) for _ in sources]
    with stream:
        room = Staging()
        with hip_doubles.CpuDouble().held():  # Staging itself must wait, or bytes of a later put arrive
            for source, target in zip(sources, targets, strict=True):
                room.put(source, target)
        room.close()
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


def test_what_does_not_fit_is_refused(device, stream):
    with stream:
        room = Staging()
        with pytest.raises(BindError, match=r"put: \[3\] torch.float32 to \[4\] torch.float32"):
            room.put(torch.zeros(3), device.full((4,), 0))
        with pytest.raises(BindError, match=r"strides \(2,\)"):
            room.put(torch.zeros(4), device.full((8,), 0)[::2])
        room.close()
