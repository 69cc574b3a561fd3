"""The engine: requests in, tokens out, over stages that are threads (design.md sections 5 to 8).

There is no thread of its own: whoever brings news (a caller of `submit`, a worker at the end of a path) moves the
schedule on, under one lock that is held for bookkeeping only.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from rocline.arena.spans import ArenaFull
from rocline.arena.trace import Recorder
from rocline.engine import scratch
from rocline.engine.answer import Answer, Ask, answer
from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
from rocline.engine.digest import LogitsDigest
from rocline.engine.engram import load_id_map
from rocline.engine.engram_ahead import EngramAhead, EngramRows, GatheredLate
from rocline.engine.generation import check_prompt
from rocline.engine.handoff import FirstStep, HandOff, Rows, reach_for
from rocline.engine.layers.head import embed_rows, lookback_rows
from rocline.engine.pages import PAGE_POSITIONS, Pages
from rocline.engine.sampling import SamplerState
from rocline.engine.stage import Stage
from rocline.engine.weights import ModelWeights, StoredWeights, WeightSource
from rocline.pipeline.assembly import Assembly, assemble, lay_out
from rocline.pipeline.costs import CostModel
from rocline.pipeline.headroom import Headroom, sources
from rocline.pipeline.observe import Seen, observe
from rocline.pipeline.options import Options
from rocline.pipeline.request import (
    FinishReason,
    NotReady,
    Request,
    RequestFailed,
    Summary,
)
from rocline.pipeline.running import Running
from rocline.pipeline.schedule import MAX_STEP_ROWS, Entry, Job, Limits, Schedule
from rocline.pipeline.simulate import best_groups
from rocline.pipeline.stats import State, Stats
from rocline.pipeline.stream import Stream
from rocline.pipeline.timeline import Intervals, Timeline
from rocline.pipeline.warm_up import prepare_kernels, warm_up
from rocline.pipeline.watchdog import StepPredictor, Watchdog
from rocline.pipeline.worker import Task, Worker

log = logging.getLogger(__name__)

CLOSE_S = 30.0
HANG_FLOOR_S = 30.0
SHOWN_STEPS = 8


class Engine:
    """A loaded model that serves requests. Thread-safe.

    source          of the weights; where stages run on GPUs, each piece is asked for once and is not kept
    on_failure      called once, from any thread, when only a restart helps: a stage failed or hangs
    page_positions  positions of a KV page
    poison          as in StageMemory (tests)
    warms_up        run warm_up first; None: where stages run on GPUs
    hang_floor_s    a stage step is no hang before
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        options: Options,
        *,
        on_failure: Callable[[str], None] = lambda reason: None,
        page_positions: int = PAGE_POSITIONS,
        poison: bool = False,
        warms_up: bool | None = None,
        hang_floor_s: float = HANG_FLOOR_S,
    ) -> None:
        """Raises PlacementError when the model cannot be cut as `options` say or does not fit, HipError and
        DispatchError where GPUs cannot be used so, and what reading the source raises."""
        text = config.text_config
        self.config, self.options = config, options
        self.context = min(options.context or text.max_position_embeddings, text.max_position_embeddings)
        kv_tokens = options.kv_tokens or 2 * self.context
        layout = lay_out(config, options, self.context, kv_tokens, source)
        self.placement, self._on_failure = layout.placement, on_failure
        self._lock = threading.Condition(threading.Lock())
        self._finding = threading.Lock()  # taken before the other
        self._state, self._reason = State.STARTING, ""
        self._running: dict[int, Running] = {}
        self._ended: Counter[str] = Counter()
        self._n_requests = self._n_steps = self._prompt_rows = self._output_tokens = 0
        self._opened_s = time.monotonic()

        model = CostModel(config)
        limits = Limits(
            chunk_rows=options.chunk_rows,
            mixed_chunk_rows=min(options.mixed_chunk_rows, options.chunk_rows),
            inflight_chunks=options.inflight_chunks,
            running=options.running,
            queue=options.queue,
            reserve_tokens=options.reserve_tokens,
            n_groups=lambda n: options.groups or best_groups(model, self.placement, n),
        )
        warms_up = options.device == "hip" if warms_up is None else warms_up
        if warms_up and options.device == "hip":
            prepare_kernels(config, options)
        self._pages = Pages(-(-kv_tokens // page_positions), page_positions)
        self._assembly = assemble(config, source, options, layout, self._pages, poison)
        self._schedule = Schedule(limits, self._pages, partial(reach_for, text))
        self._timeline = Timeline(options.stages)
        self._watchdog = Watchdog(options.stages, self._on_hang, floor_s=hang_floor_s)
        self.headroom = Headroom(sources(layout.device_indices))
        self._workers = self._make_workers(self._assembly)
        self._tables = {n: table for weights in self._assembly.weights for n, table in weights.engram_tables.items()}
        self._ahead = self._engram_ahead() if self._tables else None
        visits = [stage.visits for stage in self.placement.stages]
        self._path = [(stage, visits[stage].index(visit)) for stage, visit in self.placement.path]
        for worker in self._workers:
            worker.start()
        if warms_up:
            self._warm_up()
        self._state = State.READY

    def _warm_up(self) -> None:
        """Make what is made at its first use. Closes the engine where that fails, and raises what failed."""
        try:
            self._assembly.capture_steps(self.options.running, self.context)
            warm_up(partial(self._take, State.STARTING), self.options, self.context, self.config.text_config.vocab_size)
        except BaseException:
            self.close()
            raise
        self._ended.clear()
        self._n_steps = self._prompt_rows = self._output_tokens = 0

    def _engram_ahead(self) -> EngramAhead:
        on_gpus = self.options.device == "hip"
        ahead = EngramAhead(self._tables, is_pinned=on_gpus)
        if on_gpus:
            ahead.prepare(self.options.chunk_rows, self.options.inflight_chunks)
        return ahead

    def _make_workers(self, assembly: Assembly) -> list[Worker]:
        predictor = StepPredictor()
        most_rows = max(self.options.chunk_rows, MAX_STEP_ROWS)
        shared = assembly.transport, self._timeline, self._watchdog, predictor
        return [
            Worker(number, placed.device, stage, home, most_rows, self, *shared)
            for number, (placed, stage, home) in enumerate(
                zip(self.placement.stages, assembly.stages, assembly.homes, strict=True)
            )
        ]

    @classmethod
    def open(
        cls,
        folder: str | Path,
        options: Options,
        *,
        advance: Callable[[int], None] = lambda n_bytes: None,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> Engine:
        """Check and read a checkpoint folder, and start its stages.

        advance  called with bytes read. Raises ConfigError, CheckpointError, PlacementError, HipError, DispatchError.
        """
        config = ModelConfig.load(folder)
        with Checkpoint.open(folder, config) as checkpoint:
            id_map = load_id_map(folder, config.text_config)
            stored = StoredWeights(checkpoint, config.text_config, id_map, options.engram, advance)
            source = stored.all() if options.device == "cpu" else stored
            engine = cls(config, source, options, on_failure=on_failure)
            stored.finish()
            return engine

    @property
    def weights(self) -> ModelWeights:
        """Of the first stage's device; on the host of the whole model."""
        return self._assembly.weights[0]

    # For callers

    def submit(self, request: Request) -> Stream:
        """Take a request; its Stream tells everything else.

        Raises PromptError and SamplingError for what the model cannot run, TooLong, QueueFull and NotReady.
        """
        return self._take(State.READY, request)

    def _take(self, during: State, request: Request) -> Stream:
        text, params = self.config.text_config, request.params
        prompt_ids = check_prompt(text, request.prompt_ids, self.context)
        sampler = SamplerState(params, prompt_ids, [self.config.eos_token_id], text.vocab_size)
        max_tokens = min(params.max_tokens, self.context - len(prompt_ids))
        mode = "full" if request.prompt_logprobs else self.options.prefill
        with self._lock:
            if self._state is not during:
                raise NotReady(f"the engine is {self._state.value}{': ' * bool(self._reason)}{self._reason}")
            number = self._n_requests
            entry = Entry(number, prompt_ids, max_tokens, mode, request.prompt_logprobs)
            self._schedule.add(entry, time.monotonic())
            self._n_requests += 1
            stream = Stream(number, request, sampler.seed, self.cancel)
            digest = LogitsDigest() if request.logits_digest else None
            self._running[number] = Running(request, entry, stream, sampler, digest=digest)
            self._advance()
        return stream

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended: its stages drop what is theirs at their next step."""
        with self._lock:
            if running := self._running.get(number):
                self._finish(running, "abort")
                self._advance()

    def stats(self) -> Stats:
        """This moment's figures, without waiting for the stages."""
        self._look()
        with self._lock:
            return Stats(
                state=self._state,
                reason=self._reason,
                uptime_s=time.monotonic() - self._opened_s,
                queued=self._schedule.queued,
                prefilling=self._schedule.prefilling,
                decoding=self._schedule.decoding,
                paused=self._schedule.paused,
                running_limit=self.options.running,
                queue_limit=self.options.queue,
                ended=dict(self._ended),
                prompt_rows=self._prompt_rows,
                output_tokens=self._output_tokens,
                engram_wait_s=self._ahead.wait_s if self._ahead else 0.0,
                n_pages=self._pages.n_pages,
                free_pages=self._pages.n_free,
                page_positions=self._pages.page_positions,
                stages=tuple(worker.stats() for worker in self._workers),
                memory=self.headroom.readings(),
            )

    def timeline(self) -> Intervals:
        """What each stage did when, as far back as is kept; of decode steps one in SHOWN_STEPS."""
        self._look()
        return self._timeline.intervals()

    def observe(self, prompt_ids: Sequence[int], seen: Seen) -> None:
        """As observe.observe, while nothing runs here. Raises NotReady where something does."""
        with self._lock:
            if self._state is not State.READY or not self._schedule.is_idle:
                raise NotReady("the engine is not idle, or not ready; nothing can be observed meanwhile")
            observe(self.config.text_config, self._assembly, self._path, self._pages, prompt_ids, seen)

    def record_arena(self, stage: int) -> Recorder:
        """From now on note what a stage takes from its arena; it costs memory until stop_recording."""
        recorder = self._workers[stage].stage.memory.arena.recorder = Recorder()
        return recorder

    def stop_recording(self, stage: int) -> None:
        self._workers[stage].stage.memory.arena.recorder = None

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those there are; whether all have ended, and the stages, in time."""
        with self._lock:
            if self._state is State.READY:
                self._state = State.DRAINING
            return self._lock.wait_for(lambda: self._is_over or self._schedule.is_idle, timeout_s)

    def close(self) -> None:
        """End what still runs as "abort" and stop the threads. Harmless twice."""
        with self._lock:
            for running in list(self._running.values()):
                self._finish(running, "abort")
            if self._state is not State.FAILED:
                self._state = State.CLOSED
        stopped = [worker.close(CLOSE_S) for worker in self._workers]
        self._watchdog.close()
        self.headroom.close()
        if self._ahead:
            self._ahead.close()
        if all(stopped):
            self._assembly.transport.close()
        else:
            log.error("stages %s did not stop in %.0f s", [n for n, ok in enumerate(stopped) if not ok], CLOSE_S)

    # For workers (worker.Line)

    def is_stale(self, job: Job) -> bool:
        return not any(entry.number in self._running for entry in job.entries)

    def first_rows(self, task: Task, stage: Stage) -> HandOff | FirstStep:
        job, table_bf16 = task.job, self._assembly.weights[self._path[0][0]].embed_bf16
        if stage.steps.has(job.spans):
            return FirstStep(job.spans, task.lookback_i32, table_bf16, task.engram)
        text = self.config.text_config
        return embed_rows(text, table_bf16, job.spans, _ids(job), task.engram, task.lookback_i32)

    def answers(self, task: Task, rows: Rows) -> dict[int, Answer] | None:
        if task.place < len(self._path) - 1:
            return {} if rows.is_spent else None
        job = task.job
        asks = {entry.number: self._ask(entry, span.end) for entry, span in zip(job.entries, job.spans, strict=True)}
        with scratch.memory().scope():
            return answer(self.config.text_config, self._assembly.weights[self._path[-1][0]], rows, asks)

    def _ask(self, entry: Entry, end: int) -> Ask:
        running = self._running.get(entry.number)
        return running.ask(end) if running else Ask(None)

    def pass_on(self, task: Task) -> None:
        task.place += 1
        self._put(task)

    def done(self, job: Job, answers: dict[int, Answer]) -> None:
        if not job.is_step:  # of which no rows are checked, and whose pieces go back when many have come together
            self._settle()  # what the job's earlier visits have found is known by now
        with self._lock:
            told = []
            for entry, span in zip(job.entries, job.spans, strict=True):
                if running := self._running.get(entry.number):
                    self._prompt_rows += 0 if job.is_step else span.n_rows
                    told.append((running, self._taken(running, answers.get(entry.number) or Answer())))
            self._schedule.done(job)
            ends = [self._ended_by(running, news) for running, news in told]
            self._advance()  # the next step goes off before readers wake up and want the interpreter too
            for (running, news), summary in zip(told, ends, strict=True):
                self._tell(running, news, summary)

    def _settle(self) -> None:
        """Give back what has been copied, and end requests whose rows are bad."""
        self._assembly.transport.sweep()
        for worker in self._workers:
            self.find_bad(worker)

    def _look(self) -> None:
        self._settle()
        for worker in self._workers:
            worker.look()

    def find_bad(self, worker: Worker) -> None:
        with self._finding:  # or one thread would find them, and another go on before that has told
            if not (rows := worker.found()):
                return
            with self._lock:
                for sequence, position in rows:
                    self._fail_request(
                        sequence,
                        f"the residual streams of position {position} are not finite after stage {worker.number}; "
                        "the request cannot go on",
                    )

    def failed(self, worker: Worker, job: Job | None, error: Exception) -> None:
        if not job or not isinstance(error, ArenaFull):
            log.error("stage %d failed in %s", worker.number, job or "its own work", exc_info=error)
            self._fail(f"stage {worker.number} failed: {type(error).__name__}: {error}; restart the server")
            return
        with self._lock:  # the stage is whole; of these requests it has lost the state
            for entry in job.entries:
                self._fail_request(entry.number, str(error))
            self._schedule.done(job)
            self._advance()

    def _on_hang(self, stage: int, what: str, age_s: float, limit_s: float) -> None:
        self._fail(f"stage {stage} hangs: {what} has run {age_s:.0f} s, limit {limit_s:.0f}; restart the server")

    # Under the lock

    @property
    def _is_over(self) -> bool:
        return self._state in (State.FAILED, State.CLOSED)

    def _advance(self) -> None:
        """Send what can be sent, and close what has ended."""
        if self._is_over:
            return
        now_s, jobs = time.monotonic(), []
        while job := self._schedule.next_job(now_s):
            jobs.append(job)
        retired = self._schedule.retired()
        for entry in retired:
            for worker in self._workers:
                worker.stage.close(entry.number)
        if retired:
            self._assembly.fence()  # their pages go to others
        for entry in self._schedule.opened():
            for worker in self._workers:
                worker.stage.open(entry.number, entry.page_table)
        for job in jobs:
            lookback_i32 = lookback_rows(self.config.text_config, job.spans, _ids(job))
            self._put(Task(job, lookback_i32, self._engram(job, lookback_i32), self._times(job)))
        if self._schedule.is_idle:
            self._lock.notify_all()

    def _engram(self, job: Job, lookback_i32: Tensor) -> EngramRows | None:
        if self._ahead is None:
            return None
        if job.is_step and self.options.engram == "ram":  # the stage's thread has them before another has woken up
            return GatheredLate(self._tables, lookback_i32)
        return self._ahead.start(lookback_i32)  # threads begin to gather

    def _times(self, job: Job) -> int:
        """Of decode steps one in SHOWN_STEPS is timed, from the first on: asking HIP when each visit of each began and
        ended takes a tenth of their time."""
        if not job.is_step:
            return 1
        self._n_steps += 1
        return SHOWN_STEPS if self._n_steps % SHOWN_STEPS == 1 else 0

    def _put(self, task: Task) -> None:
        stage, visit = self._path[task.place]
        self._workers[stage].put(task, visit)

    def _taken(self, running: Running, news: Answer) -> Answer:
        """The news, with its token added to the request's output, or the request ended by an error."""
        if news.prompt_logprobs:
            running.prompt_logprobs_from += len(news.prompt_logprobs)
        if news.why:
            self._fail_request(running.entry.number, news.why)
        elif news.token is not None:
            if running.first_token_s is None:
                running.first_token_s = time.monotonic()
            running.sampler.commit([news.token])
            running.output_ids.append(news.token)
            self._output_tokens += 1
            if running.digest and news.logits_f32 is not None:
                running.digest.add(news.logits_f32)
            self._schedule.commit(running.entry, news.token)
        return news

    def _ended_by(self, running: Running, news: Answer) -> Summary | None:
        """The end of a request whose last token the news has; what it held is free."""
        if news.why:
            return None
        if news.token in running.sampler.stop_ids:
            return self._forget(running, "stop")
        if len(running.output_ids) == running.entry.max_tokens:
            return self._forget(running, "length")
        return None

    def _tell(self, running: Running, news: Answer, summary: Summary | None) -> None:
        """Publish the news to the request's reader, and its end."""
        if news.why:
            return
        ids = None if news.token is None else array("i", [news.token])
        running.stream.publish(running.progress, ids, news.logprobs, news.prompt_logprobs)
        if summary:
            running.stream.end(running.progress, summary)

    def _finish(self, running: Running, reason: FinishReason) -> None:
        running.stream.end(running.progress, self._forget(running, reason))

    def _forget(self, running: Running, reason: FinishReason) -> Summary:
        summary = running.summary(reason)
        self._remove(running, reason)
        return summary

    def _fail_request(self, number: int, why: str) -> None:
        if running := self._running.get(number):
            self._remove(running, "failed")
            running.stream.end(running.progress, RequestFailed(why))

    def _remove(self, running: Running, how: str) -> None:
        del self._running[running.entry.number]
        self._ended[how] += 1
        self._schedule.end(running.entry)

    def _fail(self, reason: str) -> None:
        """Nothing more can be computed: tell everybody."""
        with self._lock:
            if self._is_over:
                return
            self._state, self._reason = State.FAILED, reason
            for number in list(self._running):
                self._fail_request(number, reason)
            self._lock.notify_all()
        log.error("%s", reason)
        self._on_failure(reason)


def _ids(job: Job) -> dict[int, array[int]]:
    return {entry.number: entry.ids for entry in job.entries}
