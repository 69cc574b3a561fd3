"""Hand-offs between devices: the bits that arrive, when the sender's memory is given back, and pairs that fail.

On the CPU double, whose copies can be held back and disturbed; --hip cuda or rocm runs the rest on two GPUs.
"""

import ctypes
import logging
import queue
import shutil
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import product

import hip_doubles
import hip_start
import numpy as np
import pytest
import torch

from rocline.engine import scratch
from rocline.engine.handoff import HandOff, Layout, Packed, Reach, RowKind, RowSpan, StepRows
from rocline.engine.model import Model, split_layers
from rocline.engine.scratch import StageMemory
from rocline.hip_kernels.driver import Event, HostBuffer, copy_async, devices, fill_async
from rocline.hip_kernels.runtime import HipError
from rocline.pipeline import transport
from rocline.pipeline.transport import InProcess, PeerCopies, Verdict, check_pairs

MIB = 1 << 20
N_DEVICES = 3
PAIRS = list(product(range(N_DEVICES), repeat=2))
DIRECT = dict.fromkeys(PAIRS, Verdict("direct"))


@pytest.fixture(scope="module")
def hip(request):
    """HIP, started. Gives the CPU double's switches, None on a machine with two GPUs or more."""
    kind = request.config.option.hip
    if kind != "rocm" and not shutil.which("g++"):
        pytest.skip("HIP double: needs g++")
    hip_start.start(kind, request.config.cache.mkdir("hip-doubles"))
    if len(devices()) < 2:
        pytest.skip(f"hand-offs between devices: {len(devices())} GPU, want two")
    return hip_doubles.CpuDouble() if kind == "cpu" else None


@pytest.fixture
def double(hip):
    if hip is None:
        pytest.skip("only the CPU double's copies can be held back and disturbed")
    return hip


@pytest.fixture(scope="module")
def small_checks():
    """Pairs are checked with what the whole sizes would show, in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "CHECK_BYTES", (1, 256, 4099))
        yield


@pytest.fixture(scope="module")
def sent_rows(data_folder):
    """The hand-offs of a prompt and a decode step of the micro checkpoint, in host memory: what stages copy."""
    seen = []

    def copied(rows):
        seen.append(with_each_tensor(rows, torch.clone))
        return whole(rows)

    whole = HandOff.copied
    model = Model.load(data_folder / "micro" / "model", arena_bytes=64 * MIB)
    config = model.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HandOff, "copied", copied)
        model = Model(config, model.weights, split_layers(config, 5, early_kv_side=True), arena_bytes=64 * MIB)
        handle = model.open()
        model.prefill(handle, list(range(3, 40)), mode="full")
        model.decode([(handle, 7)])
    assert any(rows.fresh for rows in seen)
    assert any(rows.blocks_i32 is not None for rows in seen)
    return seen


def with_each_tensor(rows, change):
    return replace(
        rows,
        lease=None,
        positions_i32=change(rows.positions_i32),
        lookback_i32=change(rows.lookback_i32),
        streams_bf16=change(rows.streams_bf16),
        pre_f32=change(rows.pre_f32),
        selected_i32=None if rows.selected_i32 is None else change(rows.selected_i32),
        blocks_i32=None if rows.blocks_i32 is None else change(rows.blocks_i32),
        fresh=tuple(replace(f, rows_u8=change(f.rows_u8), keys_u8=change(f.keys_u8)) for f in rows.fresh),
    )


class Card:
    """A device with a stage's memory on it, and the stream its stage works on."""

    def __init__(self, number):
        self.device = devices()[number % len(devices())]
        self.number = self.device.index
        self.stream = self.device.stream()
        self.slab = self.device.allocate(8 * MIB)
        slab_u8 = self.slab.tensor() if torch.cuda.is_available() else bytes_at(self.slab.address, 8 * MIB)
        self.memory = StageMemory(8 * MIB, slab_u8=slab_u8, record_completion=self.completion)

    def completion(self, stream):
        with self.stream:
            return Event().record().done

    def put(self, rows):
        """Rows as a stage leaves them here, once the stream gets there: until then their bytes are wrong."""
        with self.stream, scratch.use(self.memory), self.memory.scope():
            made = with_each_tensor(rows, lambda tensor: scratch.like(tensor, len(tensor)))
            for tensor, wanted in zip(made.tensors(), rows.tensors(), strict=True):
                if tensor.numel():
                    fill_async(tensor.data_ptr(), 0xEE, tensor.nbytes)
                    copy_async(tensor.data_ptr(), wanted.data_ptr(), tensor.nbytes)
            return replace(made, lease=self.memory.lease(made.tensors()))

    def used_bytes(self):
        return self.memory.arena.stats().used_bytes


def bytes_at(address, n_bytes):
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def cards(hip):
    made = [Card(number) for number in range(min(N_DEVICES, len(devices())))]
    yield made
    for card in made:
        card.slab.free()


@pytest.fixture
def copies(cards, small_checks):
    made = PeerCopies([card.device for card in cards])
    yield made
    made.close()


def hop(copies, rows, source, target):
    """Send rows from one card to the other; what arrived, in host memory, and the sent rows."""
    with source.stream:
        sent = copies.send(source.put(rows), source.number)
    with target.stream as stream, target.memory.scope():
        received = copies.receive(sent, source.number, target.number, target.memory)
        stream.synchronize()
        return with_each_tensor(received, lambda tensor: tensor.cpu().clone()), sent


def assert_same_rows(got, want):
    assert got.spans == want.spans
    assert [(f.source, f.sequence, f.first) for f in got.fresh] == [(f.source, f.sequence, f.first) for f in want.fresh]
    assert (got.selected_i32 is None, got.blocks_i32 is None) == (want.selected_i32 is None, want.blocks_i32 is None)
    for tensor, wanted in zip(got.tensors(), want.tensors(), strict=True):
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(tensor.contiguous().flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


# What arrives


def test_real_hand_offs_arrive_whole_over_every_pair(copies, cards, sent_rows):
    for source, target in product(cards, repeat=2):
        for rows in sent_rows:
            got, sent = hop(copies, rows, source, target)
            assert_same_rows(got, rows)
            sent.release()
    copies.settle()
    assert [card.used_bytes() for card in cards] == [0] * len(cards)


def step_rows(n_bytes):
    """A step's piece, on the host."""
    made = np.random.default_rng(n_bytes)
    piece_u8 = torch.from_numpy(made.integers(0, 256, n_bytes, dtype=np.uint8))
    span = RowSpan(0, 7, 1, RowKind.DECODE, Reach(8, 16, 5, 6), 7)
    return StepRows((span,), Packed(piece_u8, Layout.of(1, n_bytes, 16, ())), (3,))


@pytest.mark.parametrize("route", ["direct", "host"])
def test_a_step_arrives_where_its_capture_reads_it(request, cards, small_checks, route):
    """Ended by a word and not; its sender's memory is back when the copy is done."""
    source, target = cards[:2]
    fault = nullcontext() if route == "direct" else request.getfixturevalue("double").fault(0, 1, "corrupt")
    with fault:
        copies = PeerCopies([card.device for card in cards])
        assert copies.verdicts[source.number, target.number].route == route
    for n_bytes in (41_003, 4096, 5 << 20):
        rows = step_rows(n_bytes)
        with source.stream, scratch.use(source.memory), source.memory.scope():
            made = rows.moved(lambda tensor: scratch.like(tensor, len(tensor)))
            for tensor, wanted in zip(made.tensors(), rows.tensors(), strict=True):
                copy_async(tensor.data_ptr(), wanted.data_ptr(), tensor.nbytes)
            sent = copies.send(replace(made, lease=source.memory.lease(made.tensors())), source.number)
        with target.stream as stream, target.memory.scope():
            room_u8 = target.memory.lend((n_bytes,), torch.uint8, "room")
            got = copies.receive(sent, source.number, target.number, target.memory, room_u8)
            assert got.packed.data_u8 is room_u8
            stream.synchronize()
            for tensor, wanted in zip(got.tensors(), rows.tensors(), strict=True):
                assert torch.equal(tensor.cpu(), wanted)
        assert (got.spans, got.rings) == (rows.spans, rows.rings)
        sent.release()
        copies.sweep()
        assert source.used_bytes() == target.used_bytes() == 0
    copies.close()


def test_in_one_process_rows_are_copied(sent_rows):
    memory = StageMemory(8 * MIB)
    for rows in sent_rows:
        with memory.scope():
            got = InProcess().receive(InProcess().send(rows, 0), 0, 0, memory)
            assert_same_rows(got, rows)
            assert memory.arena.stats().used_bytes >= rows.streams_bf16.nbytes
    assert memory.arena.stats().used_bytes == 0


def test_rows_that_are_not_whole_are_refused(copies, cards, sent_rows):
    source, target = cards[:2]
    lying = replace(source.put(sent_rows[0]), pre_f32=torch.zeros(4, sent_rows[0].n_rows).T)
    with source.stream:
        sent = copies.send(lying, source.number)
    with target.stream, target.memory.scope(), pytest.raises(ValueError, match=r"strides .*; send whole tensors"):
        copies.receive(sent, source.number, target.number, target.memory)
    sent.release()
    assert source.used_bytes() == 0


def test_misuse_is_named(copies, cards, sent_rows):
    source, target = cards[:2]
    rows = source.put(sent_rows[0])
    with pytest.raises(ValueError, match="no lease"), source.stream:
        copies.send(replace(rows, lease=None), source.number)
    with pytest.raises(ValueError, match="send from device 0: the current stream is of device 1"), target.stream:
        copies.send(rows, source.number)
    with pytest.raises(ValueError, match="were not sent"), target.stream, target.memory.scope():
        copies.receive(rows, source.number, target.number, target.memory)
    with source.stream:
        sent = copies.send(rows, source.number)
    with pytest.raises(ValueError, match="receive on device 1: the current"), source.stream, target.memory.scope():
        copies.receive(sent, source.number, target.number, target.memory)
    sent.release()
    assert source.used_bytes() == 0


# When


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 2)])
def test_the_senders_memory_lives_until_the_copy_has_passed(double, copies, cards, sent_rows, pair, newest_first):
    """Nothing has run on any device while the hosts go on; then everything runs, in an order that is not theirs."""
    source, target = (cards[number] for number in pair)
    rows = sent_rows[3]
    with double.held():
        with source.stream:
            sent = copies.send(source.put(rows), source.number)
        # An earlier step of the receiver, not finished: what it was lent, the arena lends again on the same stream.
        with target.stream, scratch.use(target.memory), target.memory.scope():
            before = scratch.u8(rows.streams_bf16.nbytes)
            fill_async(before.data_ptr(), 0x55, before.nbytes)
        with target.stream, target.memory.scope():
            received = copies.receive(sent, source.number, target.number, target.memory)
            sent.release()
            assert used_by_sender(source, target, received) > 0
            out = with_each_tensor(received, torch.empty_like)
            for there, here in zip(received.tensors(), out.tensors(), strict=True):
                copy_async(here.data_ptr(), there.data_ptr(), here.nbytes)  # the stage's first work
            copies.send(replace(received, lease=target.memory.lease([])), target.number)  # somebody looks
            assert used_by_sender(source, target, received) > 0
            double.let_go(newest_first)
            assert_same_rows(out, rows)
    copies.settle()
    assert (source.used_bytes(), target.used_bytes()) == (0, 0)


def used_by_sender(source, target, received):
    """Bytes of the source's memory, without what was received there."""
    mine = sum(-(-tensor.nbytes // 256) * 256 for tensor in received.tensors()) if source is target else 0
    return source.used_bytes() - mine


def test_whoever_looks_next_gives_the_memory_back(double, copies, cards, sent_rows):
    source, target = cards[:2]
    with double.held():
        with source.stream:
            sent = copies.send(source.put(sent_rows[1]), source.number)
        with target.stream, target.memory.scope():
            copies.receive(sent, source.number, target.number, target.memory)
        sent.release()
        sent.release()  # again: harmless
        assert source.used_bytes() > 0
    assert source.used_bytes() > 0
    with target.stream:
        copies.send(target.put(sent_rows[0]), target.number).release()
    assert (source.used_bytes(), target.used_bytes()) == (0, 0)


def test_settling_waits_for_copies(double, copies, cards, sent_rows):
    source, target = cards[:2]
    with double.held():
        with source.stream:
            sent = copies.send(source.put(sent_rows[1]), source.number)
        with target.stream, target.memory.scope():
            copies.receive(sent, source.number, target.number, target.memory)
        sent.release()
        copies.settle()
        assert source.used_bytes() == 0


def test_rows_that_nobody_received_go_back_at_once(copies, cards, sent_rows):
    with cards[0].stream:
        sent = copies.send(cards[0].put(sent_rows[1]), cards[0].number)
    sent.release()
    assert cards[0].used_bytes() == 0


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_bounce_keeps_order_too(double, cards, small_checks, sent_rows, monkeypatch, newest_first):
    """In pieces far smaller than the rows, so that each half of the buffer is filled many times."""
    monkeypatch.setattr(transport, "BOUNCE_BYTES", 300)
    source, target = cards[:2]
    with double.fault(0, 1, "corrupt"):
        copies = PeerCopies([card.device for card in cards])
        with double.held():
            with source.stream:
                sent = copies.send(source.put(sent_rows[3]), source.number)
            with target.stream, target.memory.scope():
                received = copies.receive(sent, source.number, target.number, target.memory)
                sent.release()
                assert source.used_bytes() > 0
                double.let_go(newest_first)
                assert_same_rows(with_each_tensor(received, torch.clone), sent_rows[3])
        copies.close()
    assert source.used_bytes() == 0


def test_a_copy_that_is_refused_later_gives_everything_back(double, copies, cards, sent_rows):
    source, target = cards[:2]
    with source.stream:
        sent = copies.send(source.put(sent_rows[1]), source.number)
    refused = double.fault(0, 1, "refuse")
    with refused, target.stream, pytest.raises(HipError, match="from device 0 to 1"), target.memory.scope():
        copies.receive(sent, source.number, target.number, target.memory)
    sent.release()
    copies.settle()
    assert (source.used_bytes(), target.used_bytes()) == (0, 0)


def test_workers_on_their_own_threads(double, cards, small_checks, sent_rows, monkeypatch):
    """Rows go round all devices, several at a time, one pair of three through host memory."""
    monkeypatch.setattr(transport, "BOUNCE_BYTES", 1000)
    doors = [queue.Queue() for _ in cards]
    arrived, failed = [], []
    with double.fault(0, 1, "corrupt"):
        copies = PeerCopies([card.device for card in cards])

        def work(card, door, next_door):
            try:
                while (task := door.get(timeout=30)) is not None:
                    rows, source, sent, n_hops = task
                    with card.stream, card.memory.scope(), scratch.use(card.memory):
                        received = copies.receive(sent, source, card.number, card.memory)
                        sent.release()
                        if n_hops == 30:
                            arrived.append((rows, with_each_tensor(received, torch.clone)))
                            continue
                        made = replace(received, lease=card.memory.lease(received.tensors()))
                        next_door.put((rows, card.number, copies.send(made, card.number), n_hops + 1))
            except Exception as error:
                failed.append(error)
            next_door.put(None)

        for place, rows in enumerate(sent_rows[:7]):
            source = cards[place % N_DEVICES]
            with source.stream:
                sent = copies.send(source.put(rows), source.number)
            doors[(place + 1) % N_DEVICES].put((rows, source.number, sent, 0))
        ring = zip(cards, doors, [*doors[1:], doors[0]], strict=True)
        threads = [threading.Thread(target=work, args=members) for members in ring]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + 30
        while len(arrived) < 7 and not failed and time.monotonic() < until_s:
            time.sleep(0.005)
        doors[0].put(None)
        for thread in threads:
            thread.join()
        copies.close()
    assert failed == []
    assert len(arrived) == 7
    for rows, got in arrived:
        assert_same_rows(got, rows)
    assert [card.used_bytes() for card in cards] == [0] * N_DEVICES


# The check of pairs


def test_pairs_are_checked_whole(double):
    """The real sizes, on devices 1 and 2, one direction disturbed."""
    with double.fault(2, 1, "corrupt"):
        verdicts = check_pairs(devices()[1:3])
    assert {pair for pair, verdict in verdicts.items() if verdict.route == "host"} == {(2, 1)}
    assert verdicts.keys() == set(product((1, 2), repeat=2))


@pytest.mark.parametrize("kind", ["corrupt", "refuse"])
@pytest.mark.parametrize("bad", [(0, 1), (2, 0)])
def test_a_pair_that_fails_goes_through_the_host_and_is_named(
    double, cards, small_checks, sent_rows, caplog, bad, kind
):
    with double.fault(*bad, kind):
        with caplog.at_level(logging.WARNING):
            copies = PeerCopies([card.device for card in cards])
        assert {pair: verdict.route for pair, verdict in copies.verdicts.items()} == {
            pair: "host" if pair == bad else "direct" for pair in PAIRS
        }
        (warning,) = caplog.messages
        assert f"copies from device {bad[0]} (CPU double) to device {bad[1]} (CPU double): " in warning
        assert {"corrupt": "the first at 0: 0x", "refuse": "hipMemcpyPeerAsync of 1 bytes"}[kind] in warning
        for source, target in product(cards, repeat=2):
            got, sent = hop(copies, sent_rows[1], source, target)
            assert_same_rows(got, sent_rows[1])
            sent.release()
        copies.close()
    assert [card.used_bytes() for card in cards] == [0] * N_DEVICES


@pytest.mark.parametrize("n_bytes", [1, 256, 4099])
def test_a_single_bit_anywhere_is_found(double, small_checks, monkeypatch, n_bytes):
    monkeypatch.setattr(transport, "CHECK_BYTES", (n_bytes,))
    with double.fault(1, 0, "corrupt"):
        verdicts = check_pairs(devices()[:2])
    assert verdicts[0, 1] == Verdict("direct")
    assert verdicts[1, 0].route == "host"
    assert f"of {n_bytes} bytes and 256 after them 1 differ, the first at {n_bytes // 2}: " in verdicts[1, 0].problem


@pytest.mark.parametrize("damage", ["nothing copied", "too much copied"])
def test_a_copy_left_undone_or_too_long_is_found(double, small_checks, monkeypatch, damage):
    real = transport.copy_peer_async

    def copy(to_address, to_device, from_address, from_device, n_bytes):
        if damage == "too much copied":
            real(to_address, to_device, from_address, from_device, n_bytes + 1)

    monkeypatch.setattr(transport, "copy_peer_async", copy)
    verdicts = check_pairs(devices()[:2])
    assert {pair: verdict.route for pair, verdict in verdicts.items()} == {
        (0, 0): "direct", (0, 1): "host", (1, 0): "host", (1, 1): "direct",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["corrupt", "refuse"])
def test_a_pair_that_the_host_does_not_help_is_refused(double, small_checks, kind):
    host = hip_doubles.CpuDouble.HOST
    with ExitStack() as faults:
        faults.enter_context(double.fault(0, 1, "corrupt"))
        faults.enter_context(double.fault(host, 1, kind))
        with pytest.raises(HipError, match=r"from device 0 .* to device 1 .*; through host memory: .*leave one of"):
            check_pairs(devices()[:2])


def test_a_device_that_cannot_copy_within_itself_is_refused(double, small_checks):
    with double.fault(1, 1, "corrupt"), pytest.raises(HipError, match=r"from device 1 .* to device 1 .*leave it out"):
        check_pairs(devices()[:2])


def test_a_check_leaves_no_memory_behind(double, small_checks, monkeypatch):
    held = []

    class Counted(HostBuffer):
        def __init__(self, n_bytes):
            super().__init__(n_bytes)
            held.append(self.address)

        def free(self):
            held.remove(self.address)
            super().free()

    monkeypatch.setattr(transport, "HostBuffer", Counted)
    before = [device.memory().slab_bytes for device in devices()[:2]]
    with double.fault(0, 1, "corrupt"):
        check_pairs(devices()[:2])
        assert held == []
        copies = PeerCopies(devices()[:2])
        assert len(held) == 1
        copies.close()
    assert held == []
    assert [device.memory().slab_bytes for device in devices()[:2]] == before
