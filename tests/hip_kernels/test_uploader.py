"""Weights on their way: every byte, in order, never written over while a copy or a kernel waits; nothing is left."""

import hip_doubles
import pytest
import torch

from rocline.hip_kernels import uploader
from rocline.hip_kernels.driver import Event, HostBuffer, Stream, copy_async, devices
from rocline.hip_kernels.staging import Staging, fetch
from rocline.hip_kernels.uploader import PARTS, Stored, Uploader

DTYPES = torch.uint8, torch.bfloat16, torch.float32


class Shelf(Stored):
    """A tensor that is stored in another one. refuses: the item of which no byte can be read."""

    def __init__(self, tensor, refuses=None):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._tensor, self._refuses = tensor, refuses

    def __getitem__(self, part):
        return Shelf(self._tensor[part], self._refuses)

    def read(self, start, out_u8):
        if self._refuses is not None and self._tensor[0, 0, 0] == self._refuses:
            raise OSError(f"item {self._refuses} is lost")
        out_u8[:] = self._tensor.contiguous().view(-1).view(torch.uint8).numpy()[start : start + len(out_u8)]


@pytest.fixture
def small(monkeypatch):
    """Parts that a test fills many times over."""
    monkeypatch.setattr(uploader, "PART_BYTES", 4096)
    monkeypatch.setattr(uploader, "READ_BYTES", 300)
    monkeypatch.setattr(uploader, "SMALL_BYTES", 64)


@pytest.fixture
def pinned(monkeypatch):
    """Buffers of uploaders that have not been freed."""
    held = []

    class Counted(HostBuffer):
        def __init__(self, n_bytes):
            super().__init__(n_bytes)
            held.append(self)

        def free(self):
            super().free()
            held.remove(self)

    monkeypatch.setattr(uploader, "HostBuffer", Counted)
    return held


@pytest.fixture
def stream(device, small):
    """Current meanwhile."""
    with devices()[0].stream() as stream:
        yield stream


@pytest.fixture
def uploads(stream, pinned):
    """uploads(): an uploader of the stream; in the end nothing is pinned, and the card has its memory back."""
    gpu, stagings = devices()[0], []
    before = gpu.memory().slab_bytes

    def make():
        stagings.append(Staging())
        return Uploader(gpu, stagings[-1])

    yield make
    assert pinned == []
    assert gpu.memory().slab_bytes == before
    for staging in stagings:
        staging.close()


def numbers(rng, *shape, dtype=torch.uint8):
    return torch.from_numpy(rng.integers(0, 256, shape)).to(dtype)


def test_every_dtype_and_size_arrives(uploads, rng):
    with uploads() as up:
        for n in (0, 1, 63, 65, 300, 4095, 4096, 4097, 50_000):
            for dtype in DTYPES:
                source = numbers(rng, n, 3, dtype=dtype)
                for form in (source, source.t().contiguous().t(), Shelf(source)):
                    got = up.put(form)
                    assert got.is_contiguous()
                    assert torch.equal(fetch(got), source), (n, dtype)


def test_parts_arrive_in_order_and_together(uploads, rng):
    """Of mixed sizes, smaller and larger than what goes through pinned memory at a time."""
    parts = [
        (numbers(rng, n, 50), numbers(rng, n, 2, dtype=torch.float32), Shelf(numbers(rng, n + 1, 7)))
        for n in (1, 2, 30, 17, 400, 50, 3, 3, 3, 41, 42, 0, 43, 1)
    ]
    with uploads() as up:
        got = [[fetch(tensor) for tensor in tensors] for tensors in up.each(iter(parts))]
    for tensors, sources in zip(got, parts, strict=True):
        for tensor, source in zip(tensors, sources, strict=True):
            assert torch.equal(tensor, source.load() if isinstance(source, Stored) else source)


@pytest.fixture(params=[False, True], ids=["oldest first", "newest first"])
def late(request, device, monkeypatch):
    """The double, whose streams run only when they are waited for, and then in this order."""
    if device.is_card:
        pytest.skip("only the double holds its streams")
    double = hip_doubles.CpuDouble()

    class LateEvent(Event):
        def synchronize(self):
            double.let_go(newest_first=request.param)
            double._library.double_hold()

    monkeypatch.setattr(uploader, "Event", LateEvent)
    double._library.double_hold()
    yield double
    double.let_go()


def test_nothing_is_written_over_while_it_waits(device, uploads, late, rng):
    """Copies, and what reads what they bring, run as late as they may."""
    sources = [numbers(rng, 60, 50) for _ in range(4 * PARTS)]
    targets = [device.full((60, 50), 0, torch.uint8) for _ in sources]
    with uploads() as up:
        for (came,), target in zip(up.each((source,) for source in sources), targets, strict=True):
            copy_async(target.data_ptr(), came.data_ptr(), target.nbytes)
        whole = up.put(torch.cat(sources))
    assert all(torch.equal(fetch(target), source) for target, source in zip(targets, sources, strict=True))
    assert torch.equal(fetch(whole), torch.cat(sources))


def test_a_part_waits_for_what_reads_it(uploads, rng, monkeypatch):
    """The double cannot be late enough to show it: whenever the host waits, all that can run does."""
    waited, wait = [], Stream.wait

    def noted(stream, event):
        waited.append(event)
        wait(stream, event)

    monkeypatch.setattr(Stream, "wait", noted)
    with uploads() as up:
        for _ in up.each((numbers(rng, 3000),) for _ in range(2 * PARTS)):
            pass
        assert waited == 2 * [part.used for part in up._parts]


def test_memory_of_a_tensor_that_is_still_read_is_not_written(device, uploads, late, rng, monkeypatch):
    """torch lends it again at once, for what the current stream does later."""
    before, source = numbers(rng, 3000), numbers(rng, 3000)
    lent, kept = before.clone(), device.full((3000,), 0, torch.uint8)
    copy_async(kept.data_ptr(), lent.data_ptr(), lent.nbytes)
    with uploads() as up:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, **kwargs: lent)
            assert up.put(source) is lent
        late.let_go(newest_first=True)
    assert torch.equal(kept, before)
    assert torch.equal(lent, source)


def test_what_the_device_has_is_not_copied(card, uploads):
    with uploads() as up:
        there = torch.ones(5000, device="cuda")
        assert up.put(there) is there
        assert [tensor.data_ptr() for (tensor,) in up.each([(there,)])] == [there.data_ptr()]
        assert not up._parts


def test_no_more_is_pinned_than_parts(uploads, pinned, rng):
    with uploads() as up:
        up.put(numbers(rng, 100))
        assert len(pinned) == 1
        for _ in range(3):
            up.put(numbers(rng, 50_000))
        assert len(pinned) == PARTS
        assert sum(buffer.n_bytes for buffer in pinned) == PARTS * 4096


def drive(up, parts, seen, stop=None):
    """Note each part's first byte; an interrupt at `stop`."""
    for (tensor,) in up.each(parts):
        seen.append(int(fetch(tensor).view(-1)[0]))
        if seen[-1] == stop:
            raise KeyboardInterrupt


def test_a_read_that_fails_ends_it(uploads):
    items = torch.arange(20, dtype=torch.uint8)[:, None, None].expand(20, 1, 3000)
    shelf, seen = Shelf(items, refuses=11), []
    with uploads() as up, pytest.raises(OSError, match="item 11 is lost"):
        drive(up, ((shelf[n : n + 1],) for n in range(20)), seen)
    assert seen == list(range(11))


def test_an_interrupt_leaves_nothing(uploads, pinned):
    """With parts being read, copied and used."""
    seen = []
    with pytest.raises(KeyboardInterrupt), uploads() as up:
        drive(up, ((torch.full((3000,), n, dtype=torch.uint8),) for n in range(20)), seen, stop=6)
    assert seen == list(range(7))
    assert pinned == []
