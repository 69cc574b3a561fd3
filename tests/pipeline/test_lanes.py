"""A stage's door: who goes first, who waits, and that nobody waits for ever."""

import pytest

from rocline.pipeline.lanes import Lanes


def filled(*tasks, n_visits=2):
    """Lanes with (visit, task) in order; tasks whose name begins with s are steps."""
    lanes = Lanes(n_visits)
    for visit, task in tasks:
        lanes.put(visit, task, is_step=task[0] == "s")
    return lanes


def all_of(lanes, blocked=()):
    found = []
    while task := lanes.next(blocked):
        found.append(task)
    return found


def test_steps_then_the_later_visit_s_chunks_each_lane_in_order():
    lanes = filled((0, "c1"), (1, "c2"), (0, "s1"), (0, "c3"), (1, "c4"), (1, "s2"), (0, "s3"))
    assert len(lanes) == 7
    assert all_of(lanes) == [(0, "s1"), (0, "s3"), (1, "s2"), (1, "c2"), (1, "c4"), (0, "c1"), (0, "c3")]
    assert len(lanes) == 0
    assert lanes.next() is None


def test_chunks_of_a_blocked_visit_are_passed_over_and_steps_are_not():
    lanes = filled((0, "c1"), (1, "c2"), (1, "s1"))
    assert lanes.next({1}) == (1, "s1")
    assert lanes.next({1}) == (0, "c1")
    assert lanes.next({1}) is None
    assert len(lanes) == 1
    assert lanes.next() == (1, "c2")


def test_between_layers_only_the_steps_run_that_waited_when_the_layer_ended():
    lanes = filled((0, "s1"), (1, "s2"), (0, "c1"))
    assert lanes.next_step() == (0, "s1")
    lanes.put(0, "s3", is_step=True)
    assert lanes.next_step() is not None
    assert lanes.next_step() is None  # a layer of the chunk now
    assert lanes.next_step() is not None
    assert lanes.next_step() is None


def test_steps_that_never_cease_let_a_chunk_through():
    lanes = filled((0, "s1"), (0, "c1"))
    for _ in range(3):
        visit, task = lanes.next()
        if task == "c1":
            break
        lanes.put(visit, task, is_step=True)  # it is back before anything else is asked for
    assert task == "c1"
    assert lanes.next() == (0, "s1")


def test_steps_alone_never_wait():
    lanes = filled((0, "s1"))
    for _ in range(5):
        assert lanes.next() == (0, "s1")
        lanes.put(0, "s1", is_step=True)
        lanes.put(0, "c1", is_step=False)
        assert lanes.drop(lambda task: task == "c1") == [(0, "c1")]
    lanes.put(1, "c2", is_step=False)
    assert lanes.next({1}) == (0, "s1")  # nor for a chunk that is blocked
    lanes.put(0, "s1", is_step=True)
    assert lanes.next({1}) == (0, "s1")


@pytest.mark.parametrize("n_taken", [0, 1])
def test_dropped_tasks_are_handed_back_and_the_others_keep_their_order(n_taken):
    lanes = filled((0, "s1"), (0, "s2"), (1, "s3"), (0, "c1"), (1, "c2"), (0, "c3"), (1, "c4"))
    taken = [lanes.next() for _ in range(n_taken)]
    dropped = lanes.drop(lambda task: task in ("s2", "c1", "c4"))
    assert sorted(dropped) == [(0, "c1"), (0, "s2"), (1, "c4")]
    assert taken + all_of(lanes) == [(0, "s1"), (1, "s3"), (1, "c2"), (0, "c3")]
    assert lanes.drop(lambda task: True) == []
