"""One stage's thread: takes tasks at its door, runs its layers on them, and hands the rows on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.answer import Answer
from rocline.engine.engram_ahead import EngramRows
from rocline.engine.handoff import FirstStep, HandOff, Rows
from rocline.engine.home import Home
from rocline.engine.marks import Moment
from rocline.engine.row_checks import BadRow
from rocline.engine.stage import Stage
from rocline.pipeline.lanes import Lanes
from rocline.pipeline.schedule import Job
from rocline.pipeline.stats import StageStats
from rocline.pipeline.timeline import Kind, Timeline
from rocline.pipeline.transport import Transport
from rocline.pipeline.watchdog import StepPredictor, Watchdog

# Between two looks at what a device is still doing, twice as long each time. A chunk's layer takes many of the first,
# and threads that ask all the time keep the interpreter from those that launch; one layer queued ahead covers the last.
POLL_S, MOST_POLL_S = 1e-4, 1e-3
# Python's own 5 ms, after which a thread gives way, are longer than a stage's visit of a step. For entry points.
SWITCH_INTERVAL_S = 5e-4
MOST_LASTING = 64  # things that the timeline does not have yet


@dataclass(eq=False, slots=True)
class Task:
    """A job on its way.

    lookback_i32  [R, N] of its rows, as in HandOff, on the host
    engram        table rows for it, or what gathers them; None for a model without Engram
    timed         of a decode step: how many steps it stands for on the timeline; 0: it is not shown
    place         on the path: the visit that is next
    rows          for that visit; None before the first
    sender        worker and visit that made `rows`: it makes no further chunk before they are copied
    """

    job: Job
    lookback_i32: Tensor
    engram: EngramRows | None = None
    timed: int = 1
    place: int = 0
    rows: Rows | None = None
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

    def first_rows(self, task: Task, stage: Stage) -> HandOff | FirstStep:
        """A task's rows as the path begins, in the memory of the calling thread, for the stage that it begins on."""

    def answers(self, task: Task, rows: Rows) -> dict[int, Answer] | None:
        """What comes of the rows that a visit has made, by sequence; None when they go on to another visit."""

    def pass_on(self, task: Task) -> None:
        """task.rows goes to the next visit."""

    def done(self, job: Job, answers: dict[int, Answer]) -> None:
        """The job's rows have gone as far as they go, or nobody wants them."""

    def find_bad(self, worker: Worker) -> None:
        """End the requests whose rows the worker has found to be not finite. When it returns they have ended, whichever
        thread found them."""

    def failed(self, worker: Worker, job: Job | None, error: Exception) -> None:
        """A visit has raised: its sequences' state on this stage is lost. Without a job: the worker itself has."""


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a watchdog says of a visit."""

    job: Job
    visit: int

    def __str__(self) -> str:
        return f"{self.job} in visit {self.visit}"


class _Lasting(NamedTuple):
    """Something that is done when its end has come; its time at work counts so many times."""

    start: Moment
    end: Moment
    visit: int
    kind: Kind
    job: int
    n_rows: int
    times: int


class Worker:
    """Runs one stage. The decode steps that wait run first, and between two layers of a chunk.

    On a GPU the thread is ahead of the stage: what it has queued is done later, and look() says what came of it.

    home       that the stage lives in
    most_rows  of a task
    transport, timeline, watchdog, predictor  shared by all workers; of the last three each uses its stage's part
    """

    def __init__(
        self,
        number: int,
        device: int,
        stage: Stage,
        home: Home,
        most_rows: int,
        line: Line,
        transport: Transport,
        timeline: Timeline,
        watchdog: Watchdog,
        predictor: StepPredictor,
    ) -> None:
        self.number, self.device, self.stage = number, device, stage
        self.busy_s = 0.0
        self.n_steps = 0
        self._line, self._transport, self._timeline = line, transport, timeline
        self._watchdog, self._predictor = watchdog, predictor
        self._lanes: Lanes[Task] = Lanes(len(stage.visits))
        self._uncopied = [0] * len(stage.visits)  # chunks made and not yet copied by who is next
        self._sent: list[Rows | None] = [None] * len(stage.visits)  # the latest chunk of each visit
        self._clock, self._checks = home.clock(), home.checks(most_rows)
        self._is_performing = False
        self._layer_done: Moment | None = None  # of the chunk that is being queued
        self._lasting: deque[_Lasting] = deque()  # not known yet to be done, by end
        self._looking = threading.Lock()
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
    def is_busy(self) -> bool:
        return self._is_performing or bool(self._lasting)

    def found(self) -> list[BadRow]:
        """Bad rows that the device has found since the last call. Any thread."""
        return self._checks.found()

    def look(self) -> None:
        """What the device has done since the last look goes on the timeline. Any thread. It asks HIP about every visit,
        which holds up threads that launch: not for each step."""
        with self._looking:
            while self._lasting:
                of = self._lasting[0]
                if (end_ns := of.end()) is None or (start_ns := of.start()) is None:
                    break
                self._timeline.record(start_ns, end_ns, self.number, of.visit, of.kind, of.job, of.n_rows)
                self.busy_s += of.times * (end_ns - start_ns) * 1e-9
                self._lasting.popleft()

    def stats(self) -> StageStats:
        """This moment's figures; what the device has done since the last look is not in them."""
        return StageStats(
            stage=self.number,
            device=self.device,
            layers=tuple(layer for visit in self.stage.visits for layer in visit.layers),
            busy=self.is_busy,
            busy_s=self.busy_s,
            steps=self.n_steps,
            waiting=len(self._lanes),
            arena=self.stage.memory.arena.stats(),
        )

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
            # Entering these for each visit takes longer than a small step has.
            with torch.inference_mode(), scratch.use(self.stage.memory):
                while found := self._next():
                    self._is_performing = True
                    self._perform(*found)
                    self._is_performing = False
        except Exception as error:  # the engine's own: without this thread everything would wait for ever
            self._line.failed(self, None, error)

    def _next(self) -> tuple[int, Task] | None:
        poll_s = POLL_S
        with self._door:
            while not self._closing:
                on_their_way = [visit for visit, sent in enumerate(self._sent) if sent and not self._has_left(visit)]
                blocked = [*on_their_way, *(visit for visit, n_chunks in enumerate(self._uncopied) if n_chunks)]
                if found := self._lanes.next(blocked):
                    return found
                self._door.wait(poll_s if on_their_way and len(self._lanes) else None)
                poll_s = min(2 * poll_s, MOST_POLL_S)
        return None

    def _has_left(self, visit: int) -> bool:
        """Whether the visit's last chunk is copied, on the device too: the memory it lay in is free again."""
        sent = self._sent[visit]
        if sent and not self._uncopied[visit] and self._transport.has_left(sent):
            self._sent[visit] = None
        return self._sent[visit] is None

    def _steps_between(self) -> None:
        while True:
            with self._door:
                found = None if self._closing else self._lanes.next_step()
            if not found:
                return
            self._perform(*found, is_outer=False)

    def _between(self) -> None:
        """Between two layers of a chunk: steps that wait, and no layer is queued before the last but one is done.

        A device would come to a step only after all that the thread has queued; one layer ahead keeps it busy.
        """
        done, self._layer_done = self._layer_done, self._clock.mark()
        self._steps_between()
        poll_s = POLL_S
        while done is not None and done() is None:
            with self._door:
                self._door.wait(poll_s)
            poll_s = min(2 * poll_s, MOST_POLL_S)
            self._steps_between()

    def _perform(self, visit: int, task: Task, is_outer: bool = True) -> None:
        """One visit of one task, and the news of it."""
        job, line, number = task.job, self._line, self.number
        if line.is_stale(job):
            task.end()
            line.done(job, {})
            return
        kind = Kind[job.kind.name]
        n_rows = task.rows.n_rows if task.rows else job.n_rows  # that enter the visit
        self._watchdog.began(number, self._predictor.predict(number, visit, kind, n_rows), _Doing(job, visit))
        try:
            answers = self._visit(visit, task, is_outer)
        except Exception as error:  # whatever it is, requests wait for the news
            self._watchdog.ended(number)
            task.end()
            line.failed(self, job, error)
            return
        took_s = self._watchdog.ended(number)
        if job.is_step and answers is None:
            line.pass_on(task)  # before all else: the next stage waits for nothing but this
        self._predictor.learn(number, visit, kind, n_rows, took_s)
        self.n_steps += 1
        if len(self._lasting) >= MOST_LASTING:
            self.look()
        if not job.is_step:
            line.find_bad(self)
            self._steps_between()  # or they would follow the chunk, and wait a layer of it at every stage
            if answers is None:
                line.pass_on(task)
        if answers is not None:
            task.end()
            line.done(job, answers)

    def _visit(self, visit: int, task: Task, is_outer: bool) -> dict[int, Answer] | None:
        """Run the layers; task.rows is then what they made, or nothing where nobody needs it."""
        memory, job = self.stage.memory, task.job
        kind, n_rows = Kind[job.kind.name], task.rows.n_rows if task.rows else job.n_rows
        between = _nothing if job.is_step else self._between
        if not job.is_step:
            self._layer_done = None
        began = self._clock.mark() if task.timed else None
        made = self.stage.run(partial(self._rows_for, task, visit), visit, between=between)
        try:
            # Of a step's row what is no number stays so up to its logits, which are looked at.
            if isinstance(made, HandOff) and not job.is_step:
                with memory.scope():
                    self._checks.begin(made)
            answers = self._line.answers(task, made)
            if answers is None:
                task.rows, task.sender = self._transport.send(made, self.device), (self, visit)
        except BaseException:
            made.release()
            raise
        if began:
            times = task.timed if is_outer else 0
            self._lasting.append(_Lasting(began, self._clock.mark(), visit, kind, job.number, n_rows, times))
        if answers is not None:
            made.release()
        elif not job.is_step:
            with self._door:
                self._uncopied[visit] += 1
                self._sent[visit] = task.rows
        return answers

    def _rows_for(self, task: Task, visit: int) -> Rows | FirstStep:
        """The task's rows in this stage's memory, called inside the stage's run."""
        if not task.rows or not task.sender:
            return self._line.first_rows(task, self.stage)
        (sender, _), stage, job = task.sender, self.stage, task.job
        began = None if job.is_step else self._clock.mark()  # a step's copy is too short to be shown
        room_u8 = stage.room_for(visit, task.rows)
        copied = self._transport.receive(task.rows, sender.device, self.device, stage.memory, room_u8)
        task.let_go()
        if began:
            ended = self._clock.mark()
            self._lasting.append(_Lasting(began, ended, visit, Kind.COPY, job.number, copied.n_rows, 0))
        return copied


def _nothing() -> None:
    return
