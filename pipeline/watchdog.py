"""Finds a stage step that hangs: older than max(30 s, 20 x predicted) (design.md section 7)."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass

FLOOR_S = 30.0
FACTOR = 20.0
CHECK_EVERY_S = 1.0
ROW_CLASSES = (16, 64, 128)  # most rows of each but the last: where kernels change their shape (design.md section 3)

log = logging.getLogger(__name__)

OnHang = Callable[[int, str, float, float], None]  # stage, what, age_s, limit_s
StepCost = Callable[[int, int, Hashable, int], float | None]  # stage, visit, kind, n_rows: seconds


@dataclass(slots=True)
class _Step:
    """began_s moves on by what ran inside the step: only its own time makes it old."""

    entered_s: float
    began_s: float
    limit_s: float
    what: object


class Watchdog:
    """Watches the steps of stages, each stage's from its own thread.

    on_hang        called once, with the first step found to hang: its stage, what it is, its age and its limit in
                   seconds. The stacks of all threads are in the log by then
    now            seconds, never going back
    check_every_s  between two looks of a thread of its own; None: there is no thread, check() is called from outside
    """

    def __init__(
        self,
        n_stages: int,
        on_hang: OnHang,
        floor_s: float = FLOOR_S,
        factor: float = FACTOR,
        now: Callable[[], float] = time.monotonic,
        check_every_s: float | None = CHECK_EVERY_S,
    ) -> None:
        self._on_hang, self._floor_s, self._factor, self._now = on_hang, floor_s, factor, now
        self._steps: list[list[_Step]] = [[] for _ in range(n_stages)]  # innermost last
        self._lock = threading.Lock()  # of checks; stages take none
        self._has_fired = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if check_every_s is not None:
            self._thread = threading.Thread(target=self._watch, args=(check_every_s,), name="watchdog", daemon=True)
            self._thread.start()

    def began(self, stage: int, predicted_s: float | None, what: object) -> None:
        """A step of this stage begins, perhaps inside another one. What str() says of `what` goes to the log: no
        prompt text."""
        limit_s = max(self._floor_s, self._factor * (predicted_s or 0.0))
        now_s = self._now()
        self._steps[stage].append(_Step(now_s, now_s, limit_s, what))

    def ended(self, stage: int) -> float:
        """The stage's innermost step has ended. Returns its own seconds, without those of steps inside it."""
        steps, now_s = self._steps[stage], self._now()
        step = steps[-1]
        if len(steps) > 1:  # first, or a check in between would find the outer step older than it is
            steps[-2].began_s += now_s - step.entered_s
        steps.pop()
        return now_s - step.began_s

    def check(self, now_s: float | None = None) -> None:
        """Look at the step that each stage is in."""
        now_s = self._now() if now_s is None else now_s
        for stage, steps in enumerate(self._steps):
            try:
                step = steps[-1]
            except IndexError:
                continue
            age_s = now_s - step.began_s
            if age_s > step.limit_s:
                self._fire(stage, step, age_s)

    def close(self) -> None:
        """End the thread. Harmless when called again, and from on_hang."""
        self._closing.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self, check_every_s: float) -> None:
        while not self._closing.wait(check_every_s):
            self.check()

    def _fire(self, stage: int, step: _Step, age_s: float) -> None:
        with self._lock:
            if self._has_fired:
                return
            self._has_fired = True
        log.critical(
            "stage %d hangs: %s is %.1f s old, its limit is %.1f s. All threads:\n%s",
            *(stage, step.what, age_s, step.limit_s, all_stacks()),
        )
        try:
            self._on_hang(stage, str(step.what), age_s, step.limit_s)
        except Exception:
            log.exception("watchdog: on_hang failed")


def all_stacks() -> str:
    """Where each thread is: files, lines and functions, no values of anything."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


class StepPredictor:
    """What a step will take, from what a row took in those before it: of one stage, visit, kind and row class.

    modelled  for steps of which nothing is known yet

    Each stage's steps come from one thread.
    """

    def __init__(self, modelled: StepCost | None = None) -> None:
        self._modelled = modelled
        self._row_s: dict[tuple[int, int, Hashable, int], float] = {}

    def predict(self, stage: int, visit: int, kind: Hashable, n_rows: int) -> float | None:
        """Seconds, None where nobody knows."""
        row_s = self._row_s.get((stage, visit, kind, bisect_left(ROW_CLASSES, n_rows)))
        if row_s is not None:
            return row_s * max(n_rows, 1)
        return self._modelled(stage, visit, kind, n_rows) if self._modelled else None

    def learn(self, stage: int, visit: int, kind: Hashable, n_rows: int, seconds: float) -> None:
        """A step has taken so many seconds of its own."""
        key = (stage, visit, kind, bisect_left(ROW_CLASSES, n_rows))
        row_s = seconds / max(n_rows, 1)
        known_s = self._row_s.get(key, row_s)
        # Up at once, down slowly: a prediction that is too low would call a slow step a hang.
        self._row_s[key] = max(row_s, known_s + (row_s - known_s) / 8)
