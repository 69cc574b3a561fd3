"""The headroom sampler over made-up sources, on a clock of the tests' and with its thread."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
from fake_sysfs import GIB, FakeSysfs

from rocline.hip_kernels.driver import Device, devices
from rocline.pipeline import headroom as headroom_module
from rocline.pipeline.headroom import STALE_S, Headroom, Memory, Source, card_source, host_memory, sources
from rocline.pipeline.sysfs_cards import cards


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class FakeMemory:
    """free_bytes may be an error, which a look at it raises."""

    def __init__(self, free_bytes):
        self.free_bytes, self.n_looks = free_bytes, 0

    def __call__(self):
        self.n_looks += 1
        if isinstance(self.free_bytes, Exception):
            raise self.free_bytes
        return Memory(self.free_bytes, 48 * GIB)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memories():
    return [FakeMemory(30), FakeMemory(20), FakeMemory(40)]


@pytest.fixture
def headroom(clock, memories):
    watched = [Source(number, f"0000:0{number}:00.0", memory) for number, memory in enumerate(memories)]
    return Headroom(watched, interval_s=None, now=clock)


def later(headroom, clock, *free_bytes, seconds=1.0):
    """One more look, that finds so much in the first source."""
    for n_bytes in free_bytes:
        clock.now_s += seconds
        headroom._tracks[0].source.read.free_bytes = n_bytes
        headroom.sample()


def test_each_device_has_its_own_figures(headroom, clock, memories):
    before = headroom.readings()
    assert [(r.device, r.pci_id, r.free_bytes, r.total_bytes) for r in before] == [
        (0, "0000:00:00.0", 30, 48 * GIB), (1, "0000:01:00.0", 20, 48 * GIB), (2, "0000:02:00.0", 40, 48 * GIB),
    ]  # fmt: skip
    later(headroom, clock, 25, 35)
    memories[2].free_bytes = 50
    headroom.sample()
    clock.now_s += 3
    first, second, third = headroom.readings()
    assert (first.free_bytes, first.min_free_bytes) == (35, 25)
    assert (second.free_bytes, second.min_free_bytes) == (20, 20)
    assert (third.free_bytes, third.min_free_bytes) == (50, 40)
    assert first.min_free_at_s == pytest.approx(time.time() - 4, abs=0.5)
    assert third.min_free_at_s == pytest.approx(time.time() - 5, abs=0.5)


def test_a_card_that_vanishes_is_reported_and_the_others_are_read(headroom, clock, memories, caplog):
    later(headroom, clock, 25)
    caplog.clear()
    for _ in range(3):
        memories[1].free_bytes = 15
        later(headroom, clock, RuntimeError("hipMemGetInfo of device 0: hipErrorNoDevice (100)"))
    first, second, _ = headroom.readings()
    assert (first.free_bytes, first.min_free_bytes) == (None, 25)
    assert first.error == "RuntimeError: hipMemGetInfo of device 0: hipErrorNoDevice (100)"
    assert (second.free_bytes, second.error) == (15, "")
    (record,) = caplog.records  # once, not ten times a second
    assert (record.levelno, record.message) == (
        logging.WARNING,
        "headroom of device 0 (0000:00:00.0): RuntimeError: hipMemGetInfo of device 0: hipErrorNoDevice (100)",
    )
    later(headroom, clock, 10)
    assert (headroom.readings()[0].free_bytes, headroom.readings()[0].error) == (10, "")
    assert caplog.messages[1:] == ["headroom of device 0 (0000:00:00.0): can be read again"]


def test_what_was_never_read_has_no_figures(clock):
    headroom = Headroom([Source(None, "", FakeMemory(OSError(19, "No such device")))], interval_s=None, now=clock)
    (reading,) = headroom.readings()
    assert (reading.free_bytes, reading.min_free_bytes, reading.min_free_at_s) == (None, None, None)
    assert "No such device" in reading.error
    assert headroom.minimum_since(0) is None


def test_the_minimum_while_something_ran(headroom, clock, memories):
    memories[1].free_bytes = memories[2].free_bytes = 1000
    headroom.sample()  # at 1000 s: 30
    later(headroom, clock, 12, 70, 50, 90, 90)
    assert [headroom.minimum_since(began_s) for began_s in (0, 1000, 1000.5, 1001)] == [12, 12, 12, 12]
    assert [headroom.minimum_since(began_s) for began_s in (1001.5, 1003, 1003.5, 1005)] == [50, 50, 90, 90]
    assert headroom.minimum_since(1005.05) == 90  # shorter than an interval: the last look
    memories[2].free_bytes = 33
    headroom.sample()
    assert headroom.minimum_since(1004) == 33


def test_minima_match_all_samples_kept(clock, rng, monkeypatch):
    """Whatever the figures; with too few places it may tell too little, never too much."""
    monkeypatch.setattr(headroom_module, "LOWS_KEPT", kept := int(rng.choice([3, 8, 1000])))
    memory, history = FakeMemory(500), []
    headroom = Headroom([Source(0, "", memory)], interval_s=None, now=clock)
    for step in range(300):
        clock.now_s += float(rng.exponential())
        memory.free_bytes = int(rng.integers(1, 100) + step * rng.integers(0, 2))
        headroom.sample()
        history.append((clock.now_s, memory.free_bytes))
    for at_s, _ in history:
        want = min(free_bytes for then_s, free_bytes in history if then_s >= at_s)
        got = headroom.minimum_since(at_s)
        assert got == want if kept == 1000 else got <= want
    assert len(headroom._tracks[0].lows._kept) <= kept
    assert headroom.minimum_since(history[-1][0]) == history[-1][1]


def test_memory_that_only_grows_does_not_pile_up(headroom, clock, monkeypatch):
    monkeypatch.setattr(headroom_module, "LOWS_KEPT", 10)
    later(headroom, clock, *range(1, 1000))
    assert len(headroom._tracks[0].lows._kept) == 10
    assert [headroom.minimum_since(began_s) for began_s in (1001, 1500)] == [1, 1]


def test_its_thread_looks_each_interval_and_ends():
    memory = FakeMemory(7)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    headroom = Headroom([Source(0, "", memory)], interval_s=0.01)
    assert "headroom" in {thread.name for thread in threading.enumerate()}
    while memory.n_looks < 20:
        assert time.monotonic() < began_s + 10
        time.sleep(0.005)
    took_s, cpu_s, n_looks = time.monotonic() - began_s, time.process_time() - began_cpu_s, memory.n_looks
    assert n_looks <= 2 + took_s / 0.01  # no busy loop
    assert cpu_s < 0.5 * took_s
    headroom.close()
    assert "headroom" not in {thread.name for thread in threading.enumerate()}
    n_looks = memory.n_looks
    time.sleep(0.03)
    assert memory.n_looks == n_looks
    headroom.close()


def test_a_look_that_hangs_is_reported_and_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(headroom_module, "CLOSE_S", 0.05)
    let_go, hangs = threading.Event(), threading.Event()
    clock = Clock()

    def read():
        if threading.current_thread().name == "headroom":
            hangs.set()
            let_go.wait(10)
        return Memory(5, 10)

    headroom = Headroom([Source(0, "0000:03:00.0", read)], interval_s=0.001, now=clock)
    assert hangs.wait(10)
    assert headroom.readings()[0].free_bytes == 5
    clock.now_s += STALE_S + 1
    (reading,) = headroom.readings()
    assert (reading.free_bytes, reading.min_free_bytes, reading.error) == (None, 5, "no answer for 6 s")
    headroom.close()
    let_go.set()
    headroom._thread.join(10)
    assert not headroom._thread.is_alive()


# What there is to look at


def test_the_host():
    (source,) = sources(None)
    memory = source.read()
    assert (source.device, source.pci_id) == (None, "")
    assert 0 < memory.free_bytes < memory.total_bytes


@pytest.fixture
def sysfs(tmp_path):
    return FakeSysfs(tmp_path / "sys")


def test_a_card_has_the_less_of_what_hip_and_sysfs_say(hip_device, sysfs):
    device = devices()[0]
    pci_id = card_source(0, device, ()).pci_id
    hip = device.memory()
    card = sysfs.add(pci_id, used_bytes=0, total_bytes=hip.total_bytes)
    source = card_source(4, device, cards(sysfs.root))
    assert (source.device, source.pci_id) == (4, pci_id)
    assert source.read() == (device.memory().free_bytes, hip.total_bytes)
    card.use(hip.total_bytes - 1000)  # somebody else's
    assert source.read() == (1000, hip.total_bytes)
    card.remove()  # HIP still answers
    assert source.read() == (device.memory().free_bytes, hip.total_bytes)


def test_hip_is_asked_at_every_look_only_where_sysfs_does_not_answer(hip_device, sysfs, monkeypatch):
    device, asked, clock, memory = devices()[0], [], Clock(), Device.memory
    monkeypatch.setattr(Device, "memory", lambda self: asked.append(self) or memory(self))
    monkeypatch.setattr(headroom_module, "time", SimpleNamespace(monotonic=clock))
    card = sysfs.add(card_source(0, device, ()).pci_id)
    source, alone = card_source(0, device, cards(sysfs.root)), card_source(0, device, ())

    def n_asked(source):
        asked.clear()
        for _ in range(100):
            clock.now_s += 0.1
            source.read()
        return len(asked)

    assert 11 <= n_asked(source) <= 12  # at first, once more, and then once a second
    assert n_asked(alone) == 100
    card.use(2 * GIB)
    assert n_asked(source) <= 12
    card.remove()
    assert n_asked(source) == 100


def test_a_card_that_sysfs_does_not_show(hip_device, sysfs):
    sysfs.add("0000:77:00.0", used_bytes=47 * GIB)
    device = devices()[0]
    memory, hip = card_source(0, device, cards(sysfs.root)).read(), device.memory()
    assert memory == (hip.free_bytes, hip.total_bytes)


def test_hip_devices_in_the_order_of_the_placement(hip_device):
    indices = list(range(len(devices())))[::-1]
    found = sources(indices)
    assert [source.device for source in found] == list(range(len(indices)))
    slab = devices()[indices[0]].allocate(64 << 20)
    try:
        assert found[0].read().free_bytes <= found[0].read().total_bytes - (64 << 20)
    finally:
        slab.free()


def test_an_engine_looks_at_the_host_until_it_is_closed(engines):
    engine = engines()
    (memory,) = engine.stats().memory
    assert (memory.device, memory.pci_id, memory.error) == (None, "", "")
    assert 0 < memory.min_free_bytes <= memory.free_bytes < memory.total_bytes == host_memory().total_bytes
    thread = next(thread for thread in threading.enumerate() if thread.name == "headroom")
    engine.close()
    assert not thread.is_alive()
