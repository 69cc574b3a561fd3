"""What waits at one stage's door, and what of it runs next: decode steps, then chunks (design.md section 7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Task = TypeVar("Task")


class Lanes(Generic[Task]):
    """One stage's waiting tasks, decode or verify steps and prefill chunks, in a lane of each for every visit.

    A sequence's rows come in order and leave in order: each lane is first come first served, and a sequence has
    chunks or a step on its way, never both. Not thread-safe.

    Steps go first, but no chunk waits for ever: steps that come while others run wait for a layer of a chunk, if
    there is one. Enough requests decode to fill the slowest stage, and a new one's prefill must still get through.
    """

    def __init__(self, n_visits: int) -> None:
        self._steps: list[deque[Task]] = [deque() for _ in range(n_visits)]
        self._chunks: list[deque[Task]] = [deque() for _ in range(n_visits)]
        self._n_steps = 0
        self._n_before_chunks: int | None = None  # steps still to go before a chunk's layer; None: all that wait

    def __len__(self) -> int:
        return self._n_steps + sum(map(len, self._chunks))

    def put(self, visit: int, task: Task, is_step: bool) -> None:
        """A task that may run its visit here as soon as the stage is free."""
        (self._steps if is_step else self._chunks)[visit].append(task)
        self._n_steps += is_step

    def next(self, blocked: Collection[int] = ()) -> tuple[int, Task] | None:
        """Take (visit, task) to run now: a step, else a chunk of the latest visit that has one.

        blocked  visits whose last chunk's hand-off has not been copied by its receiver. Their chunks stay, so that
                 one hand-off a visit is all that lies in the sender's memory. No stages wait for each other in a
                 ring: a visit is blocked by a chunk that waits at a later one, and the last visit never is.

        The later visit first, because what is nearer to its end frees more: its place in flight, and the visit
        before it.
        """
        if found := self.next_step():
            return found
        for visit in range(len(self._chunks) - 1, -1, -1):
            if self._chunks[visit] and visit not in blocked:
                return visit, self._chunks[visit].popleft()
        return self.next_step()

    def next_step(self) -> tuple[int, Task] | None:
        """Take (visit, step) to run after a layer of a chunk, before the next or before its rows go on.

        To be called until it gives None, which is after as many as waited at the first call. After the last layer
        too: a step behind the chunk would wait for a layer of it at every stage that follows.

        The earlier visit first: with first come first served, groups bunch up behind each other at the slowest stage
        (simulated: eight requests in eight groups on eight cards decode 20 % slower).
        """
        if self._n_before_chunks is None:
            self._n_before_chunks = self._n_steps
        if not self._n_before_chunks:
            self._n_before_chunks = None
            return None
        self._n_before_chunks -= 1
        self._n_steps -= 1
        visit = next(visit for visit, lane in enumerate(self._steps) if lane)
        return visit, self._steps[visit].popleft()

    def drop(self, unwanted: Callable[[Task], bool]) -> list[tuple[int, Task]]:
        """Take out every (visit, task) that is unwanted; the order of the others stays."""
        dropped = []
        for lanes in (self._steps, self._chunks):
            for visit, lane in enumerate(lanes):
                dropped += [(visit, task) for task in lane if unwanted(task)]
                lanes[visit] = deque(task for task in lane if not unwanted(task))
        self._n_steps, self._n_before_chunks = sum(map(len, self._steps)), None
        return dropped
