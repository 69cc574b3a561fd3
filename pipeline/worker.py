"""One stage's thread: takes tasks at its door, runs its layers on them, and hands the rows on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from rocline.engine import scratch
from rocline.engine.answer import Answer
from rocline.engine.engram_ahead import Gathered
from rocline.engine.handoff import HandOff, bad_rows
from rocline.engine.stage import Stage
from rocline.pipeline.lanes import Lanes
from rocline.pipeline.schedule import Job
from rocline.pipeline.timeline import Kind, Timeline
from rocline.pipeline.transport import Transport
from rocline.pipeline.watchdog import StepPredictor, Watchdog


@dataclass(eq=False, slots=True)
class Task:
    """A job on its way.

    place   on the path: the visit that is next
    engram  table rows on their way for it; None for a model without Engram
    rows    for that visit; None before the first
    sender  worker and visit that made `rows`: it makes no further chunk before they are copied
    """

    job: Job
    engram: Gathered | None = None
    place: int = 0
    rows: HandOff | None = None
    sender: tuple[Worker, int] | None = None

    def let_go(self) -> None:
        """`rows` are copied, or nobody wants them: their memory goes back and their sender goes on."""
        if self.rows and self.sender:
            self.rows.release()
            worker, visit = self.sender
            self.rows = self.sender = None
            if not self.job.is_step:
                worker.unblock(visit)

    def end(self) -> None:
        """It goes no further, whether it has come to its end or not."""
        self.let_go()
        if self.engram:
            self.engram.release()


class Line(Protocol):
    """What the workers of a pipeline ask and tell its engine, holding none of their locks."""

    def is_stale(self, job: Job) -> bool:
        """Whether no request of the job wants its rows any more."""

    def first_rows(self, task: Task) -> HandOff:
        """A task's rows as the path begins, in the memory of the calling thread."""

    def answers(self, task: Task, rows: HandOff) -> dict[int, Answer] | None:
        """What comes of the rows that a visit has made, by sequence; None when they go on to another visit."""

    def pass_on(self, task: Task) -> None:
        """task.rows goes to the next visit."""

    def done(self, job: Job, answers: dict[int, Answer]) -> None:
        """The job's rows have gone as far as they go, or nobody wants them."""

    def bad(self, worker: Worker, rows: list[tuple[int, int]]) -> None:
        """Rows (sequence, position) whose residual streams are not finite after the worker's visit."""

    def failed(self, worker: Worker, job: Job | None, error: Exception) -> None:
        """A visit has raised: its sequences' state on this stage is lost. Without a job: the worker itself has."""


class Worker:
    """Runs one stage. The decode steps that wait run first, and between two layers of a chunk.

    transport, timeline, watchdog, predictor  shared by all workers; of the last three each uses its stage's part
    """

    def __init__(
        self,
        number: int,
        device: int,
        stage: Stage,
        line: Line,
        transport: Transport,
        timeline: Timeline,
        watchdog: Watchdog,
        predictor: StepPredictor,
    ) -> None:
        self.number, self.device, self.stage = number, device, stage
        self.is_busy = False
        self.busy_s = 0.0
        self.n_steps = 0
        self._line, self._transport, self._timeline = line, transport, timeline
        self._watchdog, self._predictor = watchdog, predictor
        self._lanes: Lanes[Task] = Lanes(len(stage.visits))
        self._uncopied = [0] * len(stage.visits)  # chunks made and not yet copied by who is next
        self._door = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"stage {number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, task: Task, visit: int) -> None:
        with self._door:
            self._lanes.put(visit, task, task.job.is_step)
            self._door.notify()

    def unblock(self, visit: int) -> None:
        """The chunk that `visit` made has been copied."""
        with self._door:
            self._uncopied[visit] -= 1
            self._door.notify()

    @property
    def n_waiting(self) -> int:
        return len(self._lanes)

    def close(self, timeout_s: float) -> bool:
        """Stop after the step that runs; tasks at the door are forgotten. False if that takes too long."""
        with self._door:
            self._closing = True
            self._door.notify()
        if self._thread.ident and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(1)  # a row's bits must not depend on how many threads added it up
        try:
            while found := self._next():
                self.is_busy = True
                self.busy_s += self._perform(*found)
                self.is_busy = False
        except Exception as error:  # the engine's own: without this thread everything would wait for ever
            self._line.failed(self, None, error)

    def _next(self) -> tuple[int, Task] | None:
        with self._door:
            while not self._closing:
                blocked = [visit for visit, n_chunks in enumerate(self._uncopied) if n_chunks]
                if found := self._lanes.next(blocked):
                    return found
                self._door.wait()
        return None

    def _steps_between(self) -> None:
        while True:
            with self._door:
                found = None if self._closing else self._lanes.next_step()
            if not found:
                return
            self._perform(*found)

    def _perform(self, visit: int, task: Task) -> float:
        """One visit of one task, and the news of it. Seconds that the stage was busy."""
        job, line, number = task.job, self._line, self.number
        if line.is_stale(job):
            task.end()
            line.done(job, {})
            return 0.0
        kind, began_ns = Kind[job.kind.name], time.monotonic_ns()
        n_rows = task.rows.n_rows if task.rows else job.n_rows  # that enter the visit
        self._watchdog.began(number, self._predictor.predict(number, visit, kind, n_rows), f"{job} in visit {visit}")
        try:
            answers = self._visit(visit, task)
        except Exception as error:  # whatever it is, requests wait for the news
            self._watchdog.ended(number)
            task.end()
            line.failed(self, job, error)
            return 0.0
        self._predictor.learn(number, visit, kind, n_rows, self._watchdog.ended(number))
        ended_ns = time.monotonic_ns()
        self._timeline.record(began_ns, ended_ns, number, visit, kind, job.number, n_rows)
        self.n_steps += 1
        if not job.is_step:
            self._steps_between()  # or they would follow the chunk, and wait a layer of it at every stage
        if answers is None:
            line.pass_on(task)
        else:
            task.end()
            line.done(job, answers)
        return (ended_ns - began_ns) * 1e-9

    def _rows_for(self, task: Task, visit: int) -> HandOff:
        """The task's rows in this stage's memory, called inside the stage's run."""
        if not task.rows or not task.sender:
            return self._line.first_rows(task)
        began_ns = time.monotonic_ns()
        sender, _ = task.sender
        copied = self._transport.receive(task.rows, sender.device, self.device, self.stage.memory)
        task.let_go()
        job = task.job
        self._timeline.record(began_ns, time.monotonic_ns(), self.number, visit, Kind.COPY, job.number, copied.n_rows)
        return copied

    def _visit(self, visit: int, task: Task) -> dict[int, Answer] | None:
        """Run the layers; task.rows is then what they made, or nothing where nobody needs it."""
        memory, is_step = self.stage.memory, task.job.is_step
        between = _nothing if is_step else self._steps_between
        made = self.stage.run(partial(self._rows_for, task, visit), visit, between=between)
        if found := bad_rows(made):
            self._line.bad(self, found)
        with scratch.use(memory), memory.scope():
            answers = self._line.answers(task, made)
        if answers is not None:
            made.release()
            return answers
        task.rows = self._transport.send(made, self.device)
        task.sender = self, visit
        if not is_step:
            with self._door:
                self._uncopied[visit] += 1
        return None


def _nothing() -> None:
    return
