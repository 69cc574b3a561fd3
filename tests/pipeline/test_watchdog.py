"""The watchdog on a clock of the tests', its thread, and what it predicts."""

import logging
import sys
import threading

import pytest

from rocline.pipeline.watchdog import StepPredictor, Watchdog


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def tick(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hangs():
    return []


@pytest.fixture
def watchdog(clock, hangs):
    return Watchdog(3, lambda *hang: hangs.append(hang), now=clock, check_every_s=None)


@pytest.mark.parametrize(
    ("predicted_s", "limit_s"),
    [(None, 30), (0.0, 30), (0.2, 30), (1.5, 30), (1.6, 32), (4.0, 80)],
)
def test_a_step_hangs_when_it_is_older_than_its_limit(watchdog, clock, hangs, predicted_s, limit_s):
    watchdog.began(1, predicted_s, "prefill step of 1,024 rows")
    clock.tick(limit_s)
    watchdog.check()
    assert hangs == []
    clock.tick(0.25)
    watchdog.check()
    assert hangs == [(1, "prefill step of 1,024 rows", limit_s + 0.25, limit_s)]


def test_other_floors_and_factors(clock, hangs):
    watchdog = Watchdog(1, lambda *hang: hangs.append(hang), floor_s=2, factor=3, now=clock, check_every_s=None)
    watchdog.began(0, 5.0, "slow")
    watchdog.check(clock.now_s + 15)
    assert hangs == []
    watchdog.ended(0)
    watchdog.began(0, None, "quick")
    watchdog.check(clock.now_s + 2.5)
    assert hangs == [(0, "quick", 2.5, 2)]


def test_it_fires_once(watchdog, clock, hangs):
    watchdog.began(0, None, "first")
    watchdog.began(2, None, "second")
    clock.tick(100)
    for _ in range(3):
        watchdog.check()
    watchdog.ended(0)
    watchdog.check()
    assert [what for _, what, _, _ in hangs] == ["first"]


def test_slow_steps_as_predicted_never_fire(watchdog, clock, hangs):
    for _ in range(20):
        watchdog.began(1, 50.0, "slow")
        for _ in range(10):
            clock.tick(50)
            watchdog.check()
        assert watchdog.ended(1) == 500
    clock.tick(10_000)  # idle: no step, nothing to be late
    watchdog.check()
    assert hangs == []


def test_a_step_inside_another_does_not_make_it_older(watchdog, clock, hangs):
    watchdog.began(0, None, "chunk")
    for _ in range(10):
        clock.tick(2)
        watchdog.began(0, None, "decode step")
        clock.tick(25)
        watchdog.check()
        assert watchdog.ended(0) == 25
        watchdog.check()
    assert hangs == []
    clock.tick(11)
    watchdog.check()
    assert hangs == [(0, "chunk", 31, 30)]
    assert watchdog.ended(0) == 31


def test_steps_three_deep(watchdog, clock):
    watchdog.began(0, None, "outer")
    clock.tick(1)
    watchdog.began(0, None, "middle")
    clock.tick(2)
    watchdog.began(0, None, "inner")
    clock.tick(4)
    assert watchdog.ended(0) == 4
    clock.tick(8)
    assert watchdog.ended(0) == 10
    clock.tick(16)
    assert watchdog.ended(0) == 17


def test_an_inner_step_can_hang(watchdog, clock, hangs):
    watchdog.began(0, 100.0, "chunk")
    clock.tick(5)
    watchdog.began(0, 0.01, "decode step")
    clock.tick(31)
    watchdog.check()
    assert hangs == [(0, "decode step", 31, 30)]


def test_every_thread_is_in_the_log_and_no_value(watchdog, clock, caplog):
    prompt = "-".join(["a", "secret", "prompt"])  # put together here, so that no source line spells it
    waiting, go_on = threading.Event(), threading.Event()

    def stuck_in_a_kernel(text):
        waiting.set()
        go_on.wait()

    thread = threading.Thread(target=stuck_in_a_kernel, args=(prompt,), name="stage 1")
    thread.start()
    waiting.wait()
    watchdog.began(1, None, "decode step of 8 rows")
    with caplog.at_level(logging.CRITICAL):
        watchdog.check(clock.now_s + 31)
    go_on.set()
    thread.join()
    (message,) = caplog.messages
    assert message.startswith("stage 1 hangs: decode step of 8 rows is 31.0 s old, its limit is 30.0 s.")
    assert "thread stage 1:" in message
    assert "in stuck_in_a_kernel" in message
    assert "thread MainThread:" in message
    assert prompt not in message


def test_an_on_hang_that_raises_is_logged(clock, caplog):
    watchdog = Watchdog(1, lambda *hang: 1 // 0, now=clock, check_every_s=None)
    watchdog.began(0, None, "x")
    with caplog.at_level(logging.ERROR):
        watchdog.check(clock.now_s + 31)
    assert "watchdog: on_hang failed" in caplog.messages


def test_its_thread_checks_and_ends(clock):
    found = threading.Event()

    def on_hang(*hang):
        watchdog.close()  # from the thread itself
        found.set()

    watchdog = Watchdog(1, on_hang, now=clock, check_every_s=0.001)
    watchdog.began(0, None, "x")
    clock.tick(31)
    assert found.wait(10)
    watchdog.close()
    watchdog.close()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_a_check_between_any_two_lines_finds_no_hang(watchdog, clock, hangs):
    """No step takes longer than 20 s of its own; only one counted into another could fire."""
    n_checks = 0

    def between_lines(frame, event, argument):
        nonlocal n_checks
        if frame.f_code not in (Watchdog.began.__code__, Watchdog.ended.__code__):
            return None
        n_checks += 1
        watchdog.check()
        return between_lines

    before = sys.gettrace()
    sys.settrace(between_lines)
    try:
        watchdog.began(0, None, "chunk")
        for _ in range(4):
            clock.tick(5)
            watchdog.began(0, None, "decode step")
            clock.tick(20)
            watchdog.ended(0)
        watchdog.ended(0)
    finally:
        sys.settrace(before)
    assert n_checks > 50
    assert hangs == []


# Predictions


def test_nothing_seen_nothing_predicted():
    assert StepPredictor().predict(0, 0, "decode", 1) is None


def test_the_model_is_asked_until_there_is_something_better():
    predictor = StepPredictor(lambda stage, visit, kind, n_rows: 0.5 * n_rows if kind == "decode" else None)
    assert predictor.predict(3, 0, "decode", 4) == 2.0
    assert predictor.predict(3, 0, "prefill", 4) is None
    predictor.learn(3, 0, "decode", 4, 1.0)
    assert predictor.predict(3, 0, "decode", 8) == 2.0
    assert predictor.predict(3, 0, "decode", 17) == 8.5  # another row class
    assert predictor.predict(3, 1, "decode", 8) == 4.0  # another visit
    assert predictor.predict(2, 0, "decode", 8) == 4.0  # another stage


@pytest.mark.parametrize("rows", [(1, 16), (17, 64), (65, 128), (129, 4096)])
def test_row_classes_begin_and_end_where_kernels_change(rows):
    for known in rows:
        predictor = StepPredictor()
        predictor.learn(0, 0, "prefill", known, known * 0.5)
        predicted = {n: predictor.predict(0, 0, "prefill", n) for n in (1, 16, 17, 64, 65, 128, 129, 4096)}
        assert predicted == {n: n * 0.5 if rows[0] <= n <= rows[1] else None for n in predicted}


def test_a_step_without_rows_takes_as_long_as_one_row():
    predictor = StepPredictor()
    predictor.learn(0, 1, "prefill", 0, 0.25)
    assert predictor.predict(0, 1, "prefill", 0) == 0.25


def test_predictions_rise_at_once_and_fall_slowly():
    predictor = StepPredictor()
    for seconds in (1.0, 5.0):
        predictor.learn(0, 0, "decode", 1, seconds)
    assert predictor.predict(0, 0, "decode", 1) == 5.0
    predictor.learn(0, 0, "decode", 1, 1.0)
    assert predictor.predict(0, 0, "decode", 1) == 4.5
    for _ in range(60):
        predictor.learn(0, 0, "decode", 1, 1.0)
    assert predictor.predict(0, 0, "decode", 1) == pytest.approx(1.0, abs=0.01)  # (7/8)^61 of 4 s is left


def test_a_prompt_that_gets_slower_with_its_history_never_fires(watchdog, clock, hangs):
    """A step of the release's last chunks on a slow device: minutes each, far over the floor."""
    predictor = StepPredictor(lambda *step: 10.0)
    for chunk in range(100):
        watchdog.began(0, predictor.predict(0, 0, "prefill", 1024), "chunk")
        clock.tick(20 + 5 * chunk)
        watchdog.check()
        predictor.learn(0, 0, "prefill", 1024, watchdog.ended(0))
    assert hangs == []
