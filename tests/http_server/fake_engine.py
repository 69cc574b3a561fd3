"""An engine with the real one's interface whose steps cost what a test says, and whose answers a test writes."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocline.arena.stats import Stats as ArenaStats
from rocline.engine.config import ModelConfig
from rocline.engine.digest import ids_sha256
from rocline.engine.generation import check_prompt
from rocline.engine.sampling import SamplerState
from rocline.pipeline.headroom import Headroom, Memory, Source
from rocline.pipeline.options import Options
from rocline.pipeline.request import (
    EngineError,
    FinishReason,
    Logprobs,
    NotReady,
    Phase,
    Progress,
    QueueFull,
    Request,
    RequestFailed,
    Summary,
)
from rocline.pipeline.stats import StageStats, State, Stats
from rocline.pipeline.stream import Stream

RETRY_AFTER_S = 2.0


def numbered(request: Request) -> Sequence[int]:
    """The default answer: ids that depend on the prompt's last and the seed, none of them a control token."""
    first = 300 + (request.prompt_ids[-1] + (request.params.seed or 0)) % 500
    return range(first, first + min(request.params.max_tokens, 2000))


class Counting(Sequence[int]):
    """300, 301 … 2299, 300 …: long answers that take no memory."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, place):
        return 300 + place % 2000


@dataclass(eq=False)
class _Running:
    request: Request
    stream: Stream
    sampler: SamplerState
    answer: Sequence[int]
    rows_done: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    output: array[int] = field(default_factory=lambda: array("i"))

    @property
    def phase(self) -> Phase:
        if self.admitted_s is None:
            return Phase.QUEUED
        return Phase.DECODE if self.output else Phase.PREFILL

    @property
    def progress(self) -> Progress:
        return Progress(self.phase, self.rows_done, len(self.request.prompt_ids))


class FakeEngine:
    """
    answer    ids a request will be given, an end token where its author wants one; max_tokens cuts it
    chunk_s   a prefill chunk's time, step_s a decode step's
    gate      clear it to stop all steps
    cancels   numbers of requests whose cancel came while they ran
    steps     chunks and decode steps so far
    memory    of its one card, and what each look at it finds
    """

    def __init__(
        self,
        config: ModelConfig,
        options: Options | None = None,
        *,
        answer: Callable[[Request], Sequence[int]] = numbered,
        chunk_s: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        self.config, self.options = config, options or Options()
        limit = config.text_config.max_position_embeddings
        self.context = min(self.options.context or limit, limit)
        self.answer, self.chunk_s, self.step_s = answer, chunk_s, step_s
        self.gate = threading.Event()
        self.gate.set()
        self.cancels: list[int] = []
        self.steps = 0
        self.memory = Memory(3 << 30, 48 << 30)
        self.headroom = Headroom([Source(0, "0000:03:00.0", lambda: self.memory)], interval_s=None)
        self.fail_next: str | None = None
        self._lock = threading.Condition()
        self._state, self._reason = State.READY, ""
        self._queue: list[_Running] = []
        self._running: list[_Running] = []
        self._n_requests = self._prompt_rows = self._output_tokens = 0
        self._ended: dict[str, int] = {}
        self._opened_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # The engine's interface

    def submit(self, request: Request) -> Stream:
        check_prompt(self.config.text_config, request.prompt_ids, self.context)
        eos = self.config.eos_token_id
        sampler = SamplerState(request.params, request.prompt_ids, [eos], self.config.text_config.vocab_size)
        with self._lock:
            if self._state is not State.READY:
                raise NotReady(f"the engine is {self._state.value}")
            if len(self._running) >= self.options.running and len(self._queue) >= self.options.queue:
                raise QueueFull(len(self._queue), RETRY_AFTER_S)
            stream = Stream(self._n_requests, request, sampler.seed, self._cancel)
            self._n_requests += 1
            self._queue.append(_Running(request, stream, sampler, self.answer(request)))
            self._admit()
            self._lock.notify_all()
        return stream

    def stats(self) -> Stats:
        with self._lock:
            n_prefill = sum(running.phase is Phase.PREFILL for running in self._running)
            return Stats(
                state=self._state,
                reason=self._reason,
                uptime_s=time.monotonic() - self._opened_s,
                queued=len(self._queue),
                prefilling=n_prefill,
                decoding=len(self._running) - n_prefill,
                paused=0,
                running_limit=self.options.running,
                queue_limit=self.options.queue,
                ended=dict(self._ended),
                prompt_rows=self._prompt_rows,
                output_tokens=self._output_tokens,
                engram_wait_s=0.0,
                n_pages=16,
                free_pages=16 - len(self._running),
                page_positions=2048,
                stages=(
                    StageStats(
                        stage=0,
                        device=0,
                        layers=(0, 1),
                        busy=bool(self._running),
                        busy_s=0.5,
                        steps=self.steps,
                        waiting=0,
                        arena=ArenaStats(**_ARENA),
                    ),
                ),
                memory=self.headroom.readings(),
            )

    def drain(self, timeout_s: float) -> bool:
        with self._lock:
            if self._state is State.READY:
                self._state = State.DRAINING
            return self._lock.wait_for(lambda: not self._queue and not self._running, timeout_s)

    def close(self) -> None:
        with self._lock:
            for running in [*self._queue, *self._running]:
                self._end(running, "abort")
            self._state = State.CLOSED
            self._lock.notify_all()

    # What a test may do to it

    def break_down(self, reason: str) -> None:
        """What a stage's failure does."""
        with self._lock:
            self._state, self._reason = State.FAILED, reason
            for running in [*self._queue, *self._running]:
                self._end(running, RequestFailed(reason))

    @property
    def n_active(self) -> int:
        with self._lock:
            return len(self._queue) + len(self._running)

    # Its one thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._running or self._state is State.CLOSED)
                if self._state is State.CLOSED:
                    return
                prefilling = [running for running in self._running if not running.output]
            self.gate.wait()
            decoding = len(prefilling) < len(self._running)
            if pause_s := (self.chunk_s if prefilling else 0) + (self.step_s if decoding else 0):
                time.sleep(pause_s)
            with self._lock:
                self.steps += 1
                for running in list(self._running):
                    if running in prefilling[:1] or running.output:
                        self._step(running)

    def _step(self, running: _Running) -> None:
        n_prompt = len(running.request.prompt_ids)
        if running.rows_done < n_prompt:
            rows = min(self.options.chunk_rows, n_prompt - running.rows_done)
            running.rows_done += rows
            self._prompt_rows += rows
            if running.rows_done < n_prompt:
                running.stream.publish(running.progress)
                return
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            self._end(running, RequestFailed(reason))
            return
        token = running.answer[len(running.output)]
        running.first_token_s = running.first_token_s or time.monotonic()
        running.output.append(token)
        self._output_tokens += 1
        k = running.request.n_logprobs
        prompt_logprobs = None
        if running.request.prompt_logprobs and len(running.output) == 1:
            prompt_logprobs = logprobs_of(running.request.prompt_ids[1:], k or 0)
        logprobs = None if k is None else logprobs_of([token], k)
        running.stream.publish(running.progress, array("i", [token]), logprobs, prompt_logprobs)
        n_output = len(running.output)
        max_tokens = min(running.request.params.max_tokens, self.context - n_prompt)
        if token in running.sampler.stop_ids and n_output > running.request.params.min_tokens:
            self._end(running, "stop")
        elif n_output == min(max_tokens, len(running.answer)):
            self._end(running, "length")

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.options.running:
            running = self._queue.pop(0)
            running.admitted_s = time.monotonic()
            self._running.append(running)
            running.stream.publish(running.progress)

    def _cancel(self, number: int) -> None:
        with self._lock:
            for running in [*self._queue, *self._running]:
                if running.stream.number == number:
                    self.cancels.append(number)
                    self._end(running, "abort")

    def _end(self, running: _Running, outcome: FinishReason | EngineError) -> None:
        for where in (self._queue, self._running):
            if running in where:
                where.remove(running)
        name = outcome if isinstance(outcome, str) else "failed"
        self._ended[name] = self._ended.get(name, 0) + 1
        progress = Progress(Phase.ENDED, running.rows_done, len(running.request.prompt_ids))
        running.stream.end(progress, self._summary(running, outcome) if isinstance(outcome, str) else outcome)
        self._admit()
        self._lock.notify_all()

    def _summary(self, running: _Running, reason: FinishReason) -> Summary:
        start_s, now_s = running.stream.submitted_s, time.monotonic()

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else moment_s - start_s

        return Summary(
            finish_reason=reason,
            prompt_tokens=len(running.request.prompt_ids),
            cached_tokens=0,
            output_tokens=len(running.output),
            seed=running.stream.seed,
            admitted_s=since(running.admitted_s),
            first_token_s=since(running.first_token_s),
            total_s=now_s - start_s,
            pauses=0,
            output_ids_sha256=ids_sha256(running.output),
            logits_sha256=None,
        )


def logprobs_of(ids: Sequence[int], k: int) -> Logprobs:
    """Made up, and easy to know again: -id/100 of the token, alternatives id+1 ... id+k each 1 less."""
    result = Logprobs(k)
    for token in ids:
        result.own_f32.append(-token / 100)
        result.top_ids.extend(range(token + 1, token + 1 + k))
        result.top_f32.extend(-token / 100 - n for n in range(1, k + 1))
    return result


_ARENA = dict.fromkeys(ArenaStats.__dataclass_fields__, 1)
