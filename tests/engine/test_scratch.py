"""Tensors over an arena's slab: how long they live, what poison shows, and what errors and reports name."""

import gc
import threading
import weakref
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rocline.arena.spans import MIB, ArenaFull
from rocline.engine import scratch
from rocline.engine.scratch import StageMemory

KIB = 1024


@pytest.fixture
def memory():
    return StageMemory(MIB, name="arena of layers 3..4", poison=True)


@pytest.fixture
def used(memory):
    with scratch.use(memory):
        yield memory


def used_bytes(memory):
    return memory.arena.stats().used_bytes


def is_poison(tensor):
    return bool((tensor.contiguous().flatten().view(torch.uint8) == scratch.POISON_BYTE).all())


# Lives


def test_a_scope_gives_back_what_was_lent_in_it(used):
    with used.scope():
        outer = scratch.f32(4, 8).fill_(1)
        with used.scope():
            inner = scratch.i64(512).fill_(2)
            assert used_bytes(used) == 256 + 4096
        assert used_bytes(used) == 256
        assert is_poison(inner)
        assert (outer == 1).all()
    assert used_bytes(used) == 0
    assert used.arena.live_spans() == []


@pytest.mark.parametrize(
    ("lend", "dtype"),
    [
        (scratch.bf16, torch.bfloat16),
        (scratch.f32, torch.float32),
        (scratch.i32, torch.int32),
        (scratch.i64, torch.int64),
        (scratch.u8, torch.uint8),
    ],
)
@pytest.mark.parametrize("shape", [(7,), (3, 5, 2), (1, 1), ()])
def test_a_tensor_is_contiguous_in_its_own_bytes_of_the_slab(used, lend, dtype, shape):
    with used.scope():
        one, two = lend(*shape), lend(*shape)
        for tensor in (one, two):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 256 == one.data_ptr() % 256
        one.fill_(1)
        two.fill_(2)
        assert (one == 1).all()


def test_like_takes_rows_of_the_same_kind(used):
    with used.scope():
        rows = scratch.like(torch.empty(4, 3, 2, dtype=torch.bfloat16), 9)
        assert (rows.shape, rows.dtype) == ((9, 3, 2), torch.bfloat16)
        assert used_bytes(used) == 256


def test_a_raising_body_gives_everything_back(used):
    def body():
        with used.scope():
            scratch.f32(100)
            with used.scope():
                used.keep([scratch.f32(200)])
                scratch.f32(300)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert used_bytes(used) == 0
    with used.scope():  # and the scopes are closed: this one is the outermost
        scratch.f32(100)
    assert used_bytes(used) == 0


def test_a_kept_tensor_lives_as_long_as_the_scope_around(used):
    with used.scope():
        with used.scope():
            with used.scope():
                tensor = scratch.f32(64).fill_(7)
                scratch.f32(64)
                used.keep([tensor])
            used.keep([tensor])
        assert (tensor == 7).all()
        assert used_bytes(used) == 256
    assert used_bytes(used) == 0
    assert is_poison(tensor)


def test_a_leased_tensor_lives_until_its_lease_is_released(used):
    with used.scope():
        with used.scope():
            tensor = scratch.f32(64).fill_(7)
            used.keep([tensor])
        lease = used.lease([tensor, scratch.f32(0)])
    assert (tensor == 7).all()
    assert used_bytes(used) == 256
    lease.release()
    assert used_bytes(used) == 0
    assert is_poison(tensor)
    lease.release()  # nothing is left in it
    assert used_bytes(used) == 0


def test_a_tensor_freed_early_makes_room_at_once(used):
    with used.scope():
        for _ in range(3):
            first = scratch.u8(700 * KIB)
            used.free([first])
            assert used_bytes(used) == 0
            assert is_poison(first)


def test_what_was_handed_on_once_is_not_the_scopes_any_more(used):
    with used.scope():
        tensor = scratch.f32(64)
        used.free([tensor])
        with pytest.raises(RuntimeError, match="is no whole tensor of the innermost scope"):
            used.free([tensor])


@pytest.mark.parametrize("hand_on", [StageMemory.keep, StageMemory.lease, StageMemory.free])
def test_a_view_cannot_be_handed_on(used, hand_on):
    with used.scope(), used.scope():
        tensor = scratch.f32(4, 64)
        with pytest.raises(
            RuntimeError,
            match=r"^arena of layers 3\.\.4: a tensor of shape \[64\] at offset 0x[0-9a-f]+ is no whole tensor of the "
            "innermost scope; hand on the tensor it is a view of, in its own scope$",
        ):
            hand_on(used, [tensor[1]])
        with used.scope(), pytest.raises(RuntimeError, match="innermost scope"):
            hand_on(used, [tensor])  # of the scope around
        assert used_bytes(used) == 1024
    assert used_bytes(used) == 0


def test_tensors_from_elsewhere_are_nobodys_business(used):
    other = StageMemory(MIB)
    with other.scope(), used.scope():
        theirs = other.lend((64,), torch.float32, "theirs")
        used.free([theirs, torch.ones(64), torch.empty(0)])
        used.lease([theirs, torch.ones(64)]).release()
        assert used_bytes(other) == 256


def test_an_empty_tensor_needs_no_memory(used):
    with used.scope():
        empty = scratch.bf16(0, 5120)
        assert (empty.shape, empty.dtype) == ((0, 5120), torch.bfloat16)
        used.free([empty])
        assert used.arena.stats().takes == 0


def test_without_a_memory_tensors_are_plain(memory):
    plain = scratch.i32(3, 2)
    assert (plain.shape, plain.dtype) == ((3, 2), torch.int32)
    with scratch.use(memory), memory.scope():
        scratch.i32(3)
    scratch.i32(3)
    assert memory.arena.stats().takes == 1


def test_use_nests_and_ends_with_a_raising_body(memory):
    other = StageMemory(MIB)

    def body():
        with scratch.use(memory), memory.scope():
            with scratch.use(other), other.scope():
                scratch.f32(1)
            scratch.f32(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    scratch.f32(1)
    assert (memory.arena.stats().takes, other.arena.stats().takes) == (1, 1)


def test_memory_given_by_its_owner_is_lent_as_it_is():
    slab_u8 = torch.zeros(MIB, dtype=torch.uint8)
    memory = StageMemory(64 * KIB, slab_u8=slab_u8)
    with memory.scope():
        tensor = memory.lend((16,), torch.int32, "test").fill_(-1)
        at = tensor.data_ptr() - slab_u8.data_ptr()
        assert (slab_u8[at : at + 64] == 255).all()
        assert slab_u8.sum() == 64 * 255
        with pytest.raises(ArenaFull, match=r"of 0\.1 used"):
            memory.lend((64 * KIB + 1,), torch.uint8, "test")


def test_memory_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="arena: slab_u8 has 1000 bytes, want at least 65536"):
        StageMemory(64 * KIB, slab_u8=torch.zeros(1000, dtype=torch.uint8))


def test_a_span_with_unfinished_work_is_pending_and_its_stream_may_have_it():
    finished = False
    memory = StageMemory(64 * KIB, record_completion=lambda stream: lambda: finished)
    with memory.scope():
        before = memory.lend((60 * KIB,), torch.uint8, "test")
    assert memory.arena.stats().pending_bytes == 60 * KIB
    with memory.scope():
        assert memory.lend((60 * KIB,), torch.uint8, "test").data_ptr() == before.data_ptr()
    finished = True
    memory.arena.poll()
    assert memory.arena.stats().pending_bytes == 0


def test_a_memory_goes_with_its_last_reference():
    """Gigabytes: not left to the cycle collector."""
    gc.disable()
    try:
        memory = StageMemory(MIB)
        with memory.scope():
            memory.lend((64,), torch.float32, "test")
        gone = weakref.ref(memory)
        del memory
        assert gone() is None
    finally:
        gc.enable()


# Poison


@pytest.mark.parametrize("lend", [scratch.bf16, scratch.f32])
def test_what_was_not_written_reads_as_nan(used, lend):
    with used.scope():
        first = lend(1000)
        assert first.isnan().all()
        first.fill_(1)
    assert first.isnan().all()  # given back
    with used.scope():
        again = lend(1000)
        assert again.data_ptr() == first.data_ptr()
        assert again.isnan().all()


def test_without_poison_bytes_stay_as_they_are():
    memory = StageMemory(MIB)
    with memory.scope():
        before = memory.lend((1000,), torch.float32, "test").fill_(3)
    assert (before == 3).all()


# What errors and reports name


def wants_too_much():
    return scratch.bf16(1024, 1024)


def test_a_chunk_that_does_not_fit_is_told_which_flag_to_change(used):
    with used.scope():
        scratch.u8(300 * KIB)
        with pytest.raises(ArenaFull) as refused:
            wants_too_much()
    words = str(refused.value)
    assert words.startswith("arena of layers 3..4: no room for 2.0 MiB; 0.7 free in 1 spans, largest 0.7; ")
    assert words.endswith("0.3 of 1.0 used by 1; lower --chunk-rows or raise --arena-gib")


@pytest.mark.parametrize("rows", [None, torch.empty(0, dtype=torch.float32)])
def test_a_leak_names_the_line_that_asked_for_it_and_its_function(used, rows):
    with used.scope():
        line = test_a_leak_names_the_line_that_asked_for_it_and_its_function.__code__.co_firstlineno + 4
        tensor = scratch.f32(64) if rows is None else scratch.like(rows, 64)
        lease = used.lease([tensor])
    (span,) = used.arena.live_spans()
    assert span.taken_at == f"{__file__}:{line}"
    assert span.label == "test_a_leak_names_the_line_that_asked_for_it_and_its_function"
    lease.release()


def test_a_device_allocation_is_counted_once(used):
    for _ in range(3):
        with used.scope():
            scratch.f32(1000)
    assert used.arena.stats().device_allocs == 1


# Threads


def test_each_thread_lends_from_its_own_memory():
    memories = [StageMemory(MIB) for _ in range(4)]
    begin, wrong = threading.Barrier(4), []

    def work(number):
        memory = memories[number]
        with scratch.use(memory):
            begin.wait()
            for turn in range(200):
                with memory.scope():
                    tensors = [scratch.i32(64 * (1 + turn % 5)).fill_(number) for _ in range(4)]
                    wrong.extend(tensor for tensor in tensors if (tensor != number).any())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert [memory.arena.stats().takes for memory in memories] == [800] * 4
    assert [used_bytes(memory) for memory in memories] == [0] * 4


# Against a naive model


class ScratchMachine(RuleBasedStateMachine):
    """Every live tensor keeps the value it was filled with; every dead one shows poison or another's bytes."""

    @initialize()
    def begin(self):
        self.memory = StageMemory(MIB, poison=True)
        self.open = ExitStack()
        self.open.enter_context(scratch.use(self.memory))
        self.scopes = []  # the open ones, outermost first: (its context, tensors with their values)
        self.leases = []
        self.n_lent = 0
        self.enter()

    @rule()
    def enter(self):
        context = self.memory.scope()
        context.__enter__()
        self.scopes.append((context, []))

    @precondition(lambda self: len(self.scopes) > 1)
    @rule(raises=st.booleans())
    def leave(self, raises):
        context, _ = self.scopes.pop()
        if raises:
            assert not context.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        else:
            context.__exit__(None, None, None)

    @rule(shape=st.lists(st.integers(0, 40), max_size=3), lend=st.sampled_from([scratch.i32, scratch.i64]))
    def lend(self, shape, lend):
        try:
            tensor = lend(*shape)
        except ArenaFull:
            assert used_bytes(self.memory) + tensor_bytes(shape, 8) > MIB // 2
            return
        assert is_poison(tensor)
        self.n_lent += 1
        self.scopes[-1][1].append((tensor.fill_(self.n_lent), self.n_lent))

    def pick(self, data):
        return data.draw(st.lists(st.sampled_from(self.scopes[-1][1]), unique_by=id)) if self.scopes[-1][1] else []

    def take_out(self, picked):
        left = [item for item in self.scopes[-1][1] if not any(item is one for one in picked)]
        self.scopes[-1][1][:] = left
        return [tensor for tensor, _ in picked]

    @precondition(lambda self: len(self.scopes) > 1)
    @rule(data=st.data())
    def keep(self, data):
        picked = self.pick(data)
        self.memory.keep(self.take_out(picked))
        self.scopes[-2][1].extend(picked)

    @rule(data=st.data())
    def lease(self, data):
        picked = self.pick(data)
        self.leases.append((self.memory.lease(self.take_out(picked)), picked))

    @rule(data=st.data())
    def free(self, data):
        self.memory.free(self.take_out(self.pick(data)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()

    @invariant()
    def live_tensors_are_whole(self):
        live = [item for _, tensors in self.scopes for item in tensors]
        live += [item for _, tensors in self.leases for item in tensors]
        assert all(bool((tensor == value).all()) for tensor, value in live)
        sizes = [-(-tensor.nbytes // 256) * 256 for tensor, _ in live]
        assert used_bytes(self.memory) == sum(sizes)
        assert len(self.memory.arena.live_spans()) == sum(size > 0 for size in sizes)

    def teardown(self):
        while self.scopes:
            self.scopes.pop()[0].__exit__(None, None, None)
        for lease, _ in self.leases:
            lease.release()
        self.open.close()
        assert used_bytes(self.memory) == 0


def tensor_bytes(shape, item_bytes):
    return torch.Size(shape).numel() * item_bytes


TestScratchMachine = ScratchMachine.TestCase
TestScratchMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
