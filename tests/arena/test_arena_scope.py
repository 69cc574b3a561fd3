"""Scopes give temporaries back together, and leaks are named by where they were taken."""

import logging
import sys
import threading

import pytest
from arena_fakes import FakeStreams

from rocline.arena.arena import Arena
from rocline.arena.spans import MIB

SLAB_BYTES = 64 * MIB


def test_a_scope_gives_everything_back_also_when_the_body_raises():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record)

    def chunk():
        with arena.scope("compute") as scope:
            scope.take(MIB)
            early = scope.take(MIB)
            scope.release(early)
            arena.release(scope.take(MIB))  # past the scope, and right all the same
            scope.take(256)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        chunk()
    assert arena.live_spans() == []
    assert len(streams.work["compute"]) == 3  # two early ones, and one completion for all the rest
    streams.finish_all()
    arena.poll()
    arena.trim()
    assert arena.largest_free_bytes() == SLAB_BYTES


def test_nested_scopes_and_kept_spans():
    arena = Arena(SLAB_BYTES)
    with arena.scope() as outer:
        outer.take(MIB)
        with arena.scope() as inner:
            result = inner.keep(inner.take(MIB))
            inner.take(MIB)
        assert inner.leaked == []
        assert len(arena.live_spans()) == 2
    assert outer.leaked == []
    assert arena.live_spans() == [result]
    arena.release(result)


def test_a_leaked_span_is_reported_with_where_it_was_taken(caplog):
    arena = Arena(SLAB_BYTES, name="arena on device 3")
    before = arena.take(4096)
    other_thread = threading.Thread(target=arena.take, args=(4096,))
    with caplog.at_level(logging.WARNING), arena.scope() as scope:
        scope.take(MIB)
        leaked = arena.take(2 * MIB, label="index_score")
        line = leaked_line() - 1
        arena.take(4096, lasting=True)
        other_thread.start()
        other_thread.join()
    assert scope.leaked == [leaked]
    assert leaked in arena.live_spans()
    assert before in arena.live_spans()
    (message,) = caplog.messages
    assert message.startswith("arena on device 3: 2.0 MiB (index_score) taken at ")
    assert f"{__file__}:{line} " in message
    assert leaked.taken_at == f"{__file__}:{line}"


def leaked_line():
    """The line that called this."""
    return sys._getframe(1).f_lineno


def test_frames_up_names_the_caller_of_a_wrapper():
    arena = Arena(SLAB_BYTES)

    def workspace():
        return arena.take(4096, frames_up=2)

    span = workspace()
    assert span.taken_at == f"{__file__}:{leaked_line() - 1}"
