"""Scopes that run by heart: who gets a room, what a surprise costs, and that nothing else changes."""

import pytest
import torch

from rocline.arena.spans import MIB
from rocline.engine import scratch
from rocline.engine.scratch import StageMemory

KIB = 1024


@pytest.fixture
def used():
    memory = StageMemory(MIB, poison=True)
    with scratch.use(memory):
        yield memory


def used_bytes(memory):
    return memory.arena.stats().used_bytes


def is_poison(tensor):
    return bool((tensor.view(torch.uint8) == scratch.POISON_BYTE).all())


def layer(used, sizes, hand_on=()):
    """A scope that asks for int32 tensors of these sizes at one place each; those at `hand_on` are kept."""
    with used.scope():
        tensors = []
        tensors.append(scratch.i32(sizes[0]))
        tensors.append(scratch.i32(sizes[1]))
        tensors.append(scratch.i32(sizes[2]))
        tensors.append(scratch.i32(sizes[3]))
        assert used_bytes(used) == sum(-(-4 * size // 256) * 256 for size in sizes) + layer.around_bytes
        assert all(is_poison(tensor) for tensor in tensors)
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert [int(tensor.min()) for tensor in tensors] == [0, 1, 2, 3]
        used.keep([tensors[at] for at in hand_on])
    return tensors


layer.around_bytes = 0


def n_own_takes(memory, body):
    """Takes that found their own places while body ran: the others came from rooms."""
    before, rooms = memory.n_taken, []
    close_room = memory.arena.close_room
    memory.arena.close_room = lambda room: rooms.append(room.n_lent()) or close_room(room)
    try:
        body()
    finally:
        del memory.arena.close_room
    return memory.n_taken - before - sum(rooms)


def in_a_step(used, *layers):
    def body():
        with used.scope():
            for sizes in layers:
                layer(used, sizes)

    return body


def test_a_second_run_finds_its_tensors_in_a_room(used):
    step = in_a_step(used, (100, 200, 300, 400), (50, 60, 70, 80))
    assert [n_own_takes(used, step) for _ in range(4)] == [8, 0, 0, 0]
    assert used.arena.stats().takes == 32
    assert used_bytes(used) == 0


def test_a_size_that_changes_costs_one_take_of_its_own(used):
    """Scores over a history that grows: from its second change on it is expected."""
    n_own = [n_own_takes(used, in_a_step(used, (100, 1000 + 100 * turn, 300, 400))) for turn in range(5)]
    assert n_own == [4, 1, 1, 1, 1]


def test_another_sequence_is_learnt_in_the_place_of_the_old(used):
    one, other = in_a_step(used, (100, 200, 300, 400)), in_a_step(used, (100, 900, 800, 700))
    assert [n_own_takes(used, step) for step in (one, one, other, other, other)][:2] == [4, 0]
    assert n_own_takes(used, other) <= 3  # their places in the code are known for changing shapes


def test_what_is_kept_finds_its_own_place_from_then_on(used):
    def step():
        with used.scope():
            kept = layer(used, (100, 200, 300, 400), hand_on=[1])[1]
            assert used_bytes(used) == 1024
            assert (kept == 1).all()
            layer.around_bytes = 1024
            layer(used, (10, 20, 30, 40))
            layer.around_bytes = 0
            assert (kept == 1).all()

    assert [n_own_takes(used, step) for _ in range(3)] == [8, 1, 1]


def test_a_tensor_of_a_room_may_be_leased_all_the_same(used):
    leases = []
    for turn in range(3):
        with used.scope():
            tensors = [scratch.i32(64) for _ in range(4)]
            tensors[2].fill_(turn)
            if turn:
                leases.append((used.lease([tensors[2]]), tensors[2], turn))
        assert used_bytes(used) == 256 * len(leases)
    assert all((tensor == turn).all() for _, tensor, turn in leases)
    assert len(used.arena.live_spans()) == 2
    for lease, _, _ in leases:
        lease.release()
    assert used_bytes(used) == 0


def test_a_run_that_ends_early_gives_everything_back(used):
    step = in_a_step(used, (100, 200, 300, 400))
    step(), step()

    def broken():
        with used.scope(), used.scope():
            scratch.i32(100)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert used_bytes(used) == 0
    assert used.arena.stats().n_used == 0
    assert n_own_takes(used, step) == 0


def test_a_room_makes_way_for_a_request_that_finds_no_other(used):
    def step(n_surprise):
        with used.scope():
            with used.scope():
                small, large = scratch.u8(1000), None
                if n_surprise:
                    large = scratch.u8(n_surprise)
                rest = [scratch.u8(100 * KIB) for _ in range(2 if n_surprise else 4)]
                assert len({tensor.data_ptr() for tensor in (small, *rest)}) == 1 + len(rest)
                assert large is None or len(large) == n_surprise
            assert used_bytes(used) == 0

    for n_surprise in (0, 0, 700 * KIB, 0):
        step(n_surprise)
    assert used.arena.stats().refusals == 0


def test_a_room_makes_way_before_anybody_waits():
    """Work that ends late is no reason to wait while a room holds what it has not handed out."""
    memory = StageMemory(MIB, record_completion=lambda stream: lambda: False)
    with scratch.use(memory):
        for n_surprise in (0, 0, 700 * KIB):
            with memory.scope():
                scratch.u8(1000)
                if n_surprise:
                    scratch.u8(n_surprise)
                for _ in range(2 if n_surprise else 4):
                    scratch.u8(100 * KIB)
    stats = memory.arena.stats()
    assert (stats.waits, stats.refusals, stats.used_bytes) == (0, 0, 0)


def test_a_slab_full_to_the_planned_byte_is_used_as_planned():
    """With less than 1/16 to spare there are no rooms, and every run places like the first."""
    memory = StageMemory(MIB, poison=True)
    with scratch.use(memory):
        for _ in range(4):
            with memory.scope():
                lent = [scratch.u8(200 * KIB) for _ in range(5)]
                assert [tensor.data_ptr() - lent[0].data_ptr() for tensor in lent] == [200 * KIB * n for n in range(5)]
    assert memory.n_taken == 20


def test_leaks_past_the_memory_are_told_with_rooms_too(used, caplog):
    step = in_a_step(used, (100, 200, 300, 400))
    step(), step()
    with used.scope():
        layer(used, (100, 200, 300, 400))
        used.arena.take(4096, label="stray")
    (message,) = caplog.messages
    assert "(stray) taken at " in message
    assert f"{__file__}:" in message


@pytest.mark.parametrize("repeat", range(4))
def test_repeated_programs_keep_their_values_and_counts(rng, repeat):
    """A random tree of scopes run again and again, a few requests changed in each run."""
    memory = StageMemory(MIB, poison=True)
    program = [[int(rng.integers(1, 4000)) for _ in range(int(rng.integers(0, 9)))] for _ in range(5)]
    fates = [[str(rng.choice(["dies", "dies", "dies", "keep", "free"])) for _ in sizes] for sizes in program]
    n_own = []
    with scratch.use(memory):
        for turn in range(8):
            before = memory.arena.stats().takes
            n_own.append(n_own_takes(memory, lambda turn=turn: run_program(memory, program, fates, turn, rng)))
            assert memory.arena.stats().takes - before >= n_own[-1]
            assert used_bytes(memory) == 0
            assert memory.arena.layout()[0][2] in ("free", "kept")
    assert n_own[0] >= max(n_own[1:]) - 8


def run_program(memory, program, fates, turn, rng):
    outer = []
    with memory.scope():
        for sizes, of_each in zip(program, fates, strict=True):
            with memory.scope():
                inner = []
                for size, fate in zip(sizes, of_each, strict=True):
                    size += int(rng.integers(300)) if rng.random() < 0.05 * (turn % 3) else 0
                    value = int(rng.integers(1 << 30))
                    inner.append((scratch.i32(size).fill_(value), value, fate))
                check_values(memory, outer + inner)
                memory.keep(tensor for tensor, _, fate in inner if fate != "dies")
            outer += [one for one in inner if one[2] != "dies"]
            check_values(memory, outer)
            memory.free(tensor for tensor, _, fate in outer if fate == "free")
            outer = [one for one in outer if one[2] != "free"]
        check_values(memory, outer)


def check_values(memory, tensors):
    assert all(bool((tensor == value).all()) for tensor, value, _ in tensors)
    assert used_bytes(memory) == sum(-(-tensor.nbytes // 256) * 256 for tensor, _, _ in tensors)
    assert len(memory.arena.live_spans()) == len(tensors)
