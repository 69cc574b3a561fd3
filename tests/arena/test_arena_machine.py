"""The arena against a naive model, in thousands of random steps with completions that come late."""

from arena_fakes import FakeStreams, check_tiles
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rocline.arena.arena import Arena
from rocline.arena.classes import align_up
from rocline.arena.room import RoomPlan
from rocline.arena.spans import ArenaFull

SLAB_BYTES = 1 << 20
STREAMS = st.sampled_from(["compute", "copy", "side"])
SIZES = st.one_of(
    st.integers(1, 1200),  # the shelf's
    st.sampled_from([4096, 16 << 10, 100_000]),  # met again, so that the reuse layer serves
    st.integers(1025, 300_000),
)


class Model(RuleBasedStateMachine):
    """Knows of each byte range which work on which stream may still touch it; places nothing itself."""

    def __init__(self):
        super().__init__()
        self.streams = FakeStreams()
        self.arena = Arena(SLAB_BYTES, self.streams.record, wait_s=0)
        self.live = []
        self.work = []  # (begin, end, stream, number of the piece) released with it outstanding
        self.rooms = []
        self.handed = []  # spans that an open room has handed over

    def finished(self, stream, number):
        """A stream works in order: a piece counts when it and all before it are done."""
        return all(self.streams.work[stream][: number + 1])

    def largest_unused(self):
        """The largest range that no lent span and no unfinished work touches."""
        taken = [(span.offset, span.offset + span.size_bytes) for span in self.live]
        taken += [(room.offset, room.offset + room.plan.edges[room.end]) for room in self.rooms]
        taken += [(begin, end) for begin, end, stream, number in self.work if not self.finished(stream, number)]
        largest = at = 0
        for begin, end in [*sorted(taken), (SLAB_BYTES, SLAB_BYTES)]:
            largest = max(largest, begin - at)
            at = max(at, end)
        return largest

    @rule(want=SIZES, stream=STREAMS, lasting=st.booleans())
    def take(self, want, stream, lasting):
        try:
            span = self.arena.take(want, stream, lasting=lasting)
        except ArenaFull:
            assert self.largest_unused() < want, "refused, though a finished range was large enough"
            return
        assert want <= span.size_bytes < want + 256
        self.check_new(span.offset, span.offset + span.size_bytes, stream)
        self.live.append(span)

    def check_new(self, begin, end, stream):
        """Nobody else has these bytes, and no other stream has work on them."""
        assert 0 <= begin < end <= SLAB_BYTES
        others = [(other.offset, other.offset + other.size_bytes) for other in self.live]
        others += [(room.offset, room.offset + room.plan.edges[room.end]) for room in self.rooms if room.end]
        for other_begin, other_end in others:
            assert end <= other_begin or other_end <= begin, "two hold the same bytes"
        for work_begin, work_end, work_stream, number in self.work:
            if begin < work_end and work_begin < end and work_stream != stream:
                assert self.finished(work_stream, number), f"{work_stream}'s bytes went to {stream} early"

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=5), stream=STREAMS)
    def open_room(self, sizes, stream):
        code = self.open_room.__code__
        plan = RoomPlan([align_up(size) for size in sizes], [""] * len(sizes), [(code, 0)] * len(sizes))
        room = self.arena.open_room(plan, stream)
        if room is not None:
            self.check_new(room.offset, room.offset + plan.total_bytes, stream)
            self.rooms.append(room)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), what=st.sampled_from(["lend", "lend", "skip", "hand over", "shrink"]))
    def use_room(self, data, what):
        room = data.draw(st.sampled_from(self.rooms))
        if what == "shrink":
            tail = room.tail()
            self.arena.shrink_room(room)
            number = len(self.streams.work[room.stream]) - 1
            self.work += [(begin, begin + size, room.stream, number) for begin, size in tail]
        elif what == "hand over" and room.at and room.at - 1 not in room.gone:
            end = room.offset + room.plan.edges[room.at]
            span = self.arena.hand_over(room, room.at - 1)
            assert span.offset + span.size_bytes == end
            self.handed.append(span)
        elif room.at < room.end:
            if what == "skip":
                room.skip(room.at)
            room.at += 1

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def close_room(self, data):
        room = self.rooms.pop(data.draw(st.integers(0, len(self.rooms) - 1)))
        ranges = room.ranges()
        self.arena.close_room(room)
        number = len(self.streams.work[room.stream]) - 1
        self.work += [(begin, begin + size, room.stream, number) for begin, size in ranges]
        end = room.offset + room.plan.edges[room.end]
        mine = [span for span in self.handed if room.offset <= span.offset < end]
        self.live += mine
        self.handed = [span for span in self.handed if span not in mine]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), others=st.sets(STREAMS, max_size=2))
    def release(self, data, others):
        span = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.arena.release(span, *others)
        for stream in {span.stream, *others}:
            number = len(self.streams.work[stream]) - 1
            self.work.append((span.offset, span.offset + span.size_bytes, stream, number))

    @rule(stream=STREAMS, n=st.integers(1, 4))
    def finish_some(self, stream, n):
        self.streams.finish(stream, n)

    @precondition(lambda self: self.streams.work)
    @rule(data=st.data())
    def finish_out_of_order(self, data):
        pieces = self.streams.work[data.draw(st.sampled_from(sorted(self.streams.work)))]
        if pieces:
            pieces[data.draw(st.integers(0, len(pieces) - 1))] = True

    @rule()
    def poll(self):
        self.arena.poll()

    @rule()
    def end_of_a_request(self):
        """Everything comes back and finishes: one free span is left."""
        for room in self.rooms:
            self.arena.close_room(room)
        for span in self.handed:
            self.arena.release(span)
        self.rooms.clear()
        self.handed.clear()
        for span in self.live:
            self.arena.release(span)
        self.live.clear()
        self.work.clear()
        self.streams.finish_all()
        self.arena.poll()
        self.arena.trim()
        assert self.arena.layout() == [(0, SLAB_BYTES, "free", None)]

    @invariant()
    def tiles(self):
        check_tiles(self.arena)

    def teardown(self):
        self.end_of_a_request()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
