"""The engine as its callers see it: admission, streams, cancellation, errors of one request, failure of all."""

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import WAIT_S, check, collect, make_ask, nothing_left, prompt_ids

from rocline.engine.model import PromptError
from rocline.engine.sampling import SamplingError, SamplingParams
from rocline.hip_kernels.sampling import logprobs_ref
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.request import NotReady, Phase, QueueFull, Request, RequestFailed, TooLong
from rocline.pipeline.stats import State

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def request(rng, n_rows: int, max_tokens: int = 8, **fields: object) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_ids=prompt_ids(rng, n_rows), params=params, **fields)  # type: ignore[arg-type]


def until(condition, timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.001)


class Gate:
    """Holds a stage's runs until it is opened, and counts them."""

    def __init__(self, engine: Engine, stage: int = 0) -> None:
        self.open = threading.Event()
        self.n_runs = 0
        self._stage = engine._workers[stage].stage
        self._run = self._stage.run
        self._stage.run = self.run  # type: ignore[method-assign]

    def run(self, *args, **kwargs):
        self.n_runs += 1
        assert self.open.wait(WAIT_S)
        return self._run(*args, **kwargs)


class SlowDevice:
    """A clock whose moments come when the test lets them."""

    def __init__(self) -> None:
        self.n_marks = self.n_passed = 0

    def mark(self):
        self.n_marks += 1
        number = self.n_marks
        return lambda: time.monotonic_ns() if number <= self.n_passed else None


def test_a_chunk_is_queued_one_layer_ahead_of_the_device(engines, rng):
    """Or a decode step that comes meanwhile would follow all of the chunk's layers, not one."""
    engine = engines(stages=1, chunk_rows=64)
    (worker,), layers = engine._workers, []
    worker._clock, step = SlowDevice(), worker.stage._step
    worker.stage._step = lambda work, layer, *rest: layers.append(layer) or step(work, layer, *rest)  # type: ignore[method-assign]
    with nothing_left(engine):
        stream = engine.submit(request(rng, 30, max_tokens=1))
        for n_layers in (2, 3, 4):
            until(lambda: len(layers) == n_layers)  # noqa: B023
            time.sleep(0.02)
            assert len(layers) == n_layers  # its last but one is not done
            worker._clock.n_passed += 2 if n_layers == 2 else 1  # the visit's begin, and a layer
        worker._clock.n_passed = 1000
        assert len(collect(stream)) == 1
    assert layers == [0, 1, 2, 3, 4]


# Admission


def test_the_queue_is_bounded_exactly(engines, rng):
    """Case B15: at running 1 and queue 2 the fourth request is refused, and told when to come again."""
    engine = engines(running=1, queue=2)
    gate = Gate(engine)
    with nothing_left(engine):
        streams = [engine.submit(request(rng, 20)) for _ in range(3)]
        assert (engine.stats().prefilling, engine.stats().queued) == (1, 2)
        with pytest.raises(QueueFull, match="2 requests are waiting already; try again in") as refused:
            engine.submit(request(rng, 20))
        assert refused.value.retry_after_s >= 1
        streams[1].cancel()
        streams.append(engine.submit(request(rng, 20)))
        gate.open.set()
        assert [len(collect(stream)) for stream in streams] == [8, 0, 8, 8]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([3, 512], r"prompt\[1\] = 512: must be a token id from 0 to 511"),
        ([-1], r"prompt\[0\] = -1"),
        ([5, 2**40], r"prompt\[1\] = 1099511627776"),
        ([3] * 300, "prompt of 300 tokens: at most 299 fit"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_any_work(engines, prompt, message):
    engine = engines(context=300)
    with pytest.raises(PromptError, match=message):
        engine.submit(Request(prompt_ids=prompt, params=GREEDY))
    assert engine.stats().ended == {}


def test_other_refusals(engines, rng):
    engine = engines(kv_tokens=256, context=2048)
    with pytest.raises(SamplingError, match="token id in stop_token_ids = 512"):
        engine.submit(Request(prompt_ids=[5], params=SamplingParams(stop_token_ids=(512,))))
    with pytest.raises(TooLong, match="400 prompt tokens and max_tokens 8 need 7 pages; there are 4"):
        engine.submit(request(rng, 400))
    with nothing_left(engine):
        assert len(collect(engine.submit(request(rng, 200)))) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 9}, "stages = 9: must be 1 to 8"),
        ({"chunk_rows": 0}, "chunk_rows = 0: must be 1 to"),
        ({"running": 65}, "running = 65: must be 1 to 64"),
        ({"stages": 2, "devices": 3}, "devices = 3: must be 1 to 2"),
        ({"arena_gib": 0.0}, "arena_gib = 0.0"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        Options(**change)


# Ends


def test_stop_length_and_context_end_an_answer(engines, micro, rng):
    ask = make_ask(micro, prompt_ids(rng, 30), max_tokens=6)
    engine = engines(context=64)
    with nothing_left(engine):
        ids = collect(engine.submit(ask.request))
        stop = ids[3]
        stopping = replace(ask.request, params=replace(ask.request.params, stop_token_ids=(stop,)))
        stream = engine.submit(stopping)
        assert collect(stream) == ids[: ids.index(stop) + 1]
        assert stream.summary.finish_reason == "stop"
        long = engine.submit(request(rng, 60, max_tokens=50))
        assert len(collect(long)) == 4
        assert (long.summary.finish_reason, long.summary.output_tokens) == ("length", 4)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILL, Phase.DECODE])
def test_cancelling_ends_a_request_once_in_any_phase(engines, micro, rng, phase):
    """Cases B06 and B07: the abort reaches every stage, the place is free at once, a neighbour notices nothing."""
    ask = make_ask(micro, prompt_ids(rng, 40))
    engine = engines(running=2, chunk_rows=16)
    with nothing_left(engine):
        others = [engine.submit(request(rng, 30, max_tokens=200)) for _ in range(2 if phase is Phase.QUEUED else 0)]
        stream = engine.submit(request(rng, 600, max_tokens=100))
        neighbour = None if others else engine.submit(ask.request)
        until(lambda: stream.progress.phase is phase)
        stream.cancel()
        stream.cancel()
        got = collect(stream)
        assert stream.summary.finish_reason == "abort"
        assert len(got) == stream.summary.output_tokens < 100
        for other in others:
            other.cancel()
        check(neighbour or engine.submit(ask.request), ask)
    assert engine.stats().ended["abort"] == 1 + len(others)


def test_a_cancelled_prefill_stops_within_a_chunk(engines, rng):
    """Case B04: of 50 chunks those in flight are dropped at the next stage, the others never start."""
    engine = engines(stages=2, chunk_rows=16, inflight_chunks=4)
    gates = [Gate(engine, 0), Gate(engine, 1)]
    with nothing_left(engine):
        stream = engine.submit(request(rng, 800))
        until(lambda: gates[0].n_runs == 1)
        stream.cancel()
        for gate in gates:
            gate.open.set()
    assert gates[0].n_runs + gates[1].n_runs == 1


def test_drain_finishes_and_admits_nothing(engines, micro, rng):
    ask = make_ask(micro, prompt_ids(rng, 40))
    engine = engines()
    stream = engine.submit(ask.request)
    assert not engine.drain(0.0)
    with pytest.raises(NotReady, match="the engine is draining"):
        engine.submit(ask.request)
    check(stream, ask)
    assert engine.drain(WAIT_S)


def test_close_ends_what_runs(engines, rng):
    engine = engines()
    stream = engine.submit(request(rng, 500, max_tokens=500))
    engine.close()
    engine.close()
    collect(stream)
    assert stream.summary.finish_reason == "abort"
    with pytest.raises(NotReady, match="the engine is closed"):
        engine.submit(request(rng, 5))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stage") and thread.is_alive()]


# Errors


def test_a_row_that_is_not_finite_ends_its_request_alone(micro, rng):
    """The error names position and stage; a request in the same steps gives its answer."""
    ask = make_ask(micro, prompt_ids(rng, 60, vocab_size=400), logit_bias={450: -100.0})  # it must not say 450 itself
    embed_bf16 = micro.weights.embed_bf16.clone()
    embed_bf16[450] = float("nan")
    weights = replace(micro.weights, embed_bf16=embed_bf16)
    engine = Engine(micro.config, weights, Options(stages=3, chunk_rows=16, kv_tokens=4096), page_positions=64)
    with nothing_left(engine):
        good = engine.submit(ask.request)
        bad = engine.submit(Request(prompt_ids=[*prompt_ids(rng, 37, 400), 450, 11, 12], params=GREEDY))
        with pytest.raises(RequestFailed, match="residual streams of position 37 are not finite after stage 0"):
            collect(bad)
        check(good, ask)
    assert engine.stats().ended == {"failed": 1, "length": 1}
    engine.close()


def test_logits_that_are_not_finite_end_their_request(micro, rng):
    head_bf16 = micro.weights.head_bf16.clone()
    head_bf16[7] = float("inf")
    weights = replace(micro.weights, head_bf16=head_bf16)
    engine = Engine(micro.config, weights, Options(stages=2, kv_tokens=4096), page_positions=64)
    with nothing_left(engine), pytest.raises(RequestFailed, match="logits of position 29 are not finite"):
        collect(engine.submit(request(rng, 30)))
    engine.close()


def test_a_chunk_too_large_for_the_arena_ends_its_request_alone(micro, rng):
    ask = make_ask(micro, prompt_ids(rng, 20))
    options = Options(stages=2, chunk_rows=2000, kv_tokens=8192, arena_gib=0.002)
    engine = Engine(micro.config, micro.weights, options, page_positions=64)
    with nothing_left(engine):
        with pytest.raises(RequestFailed, match=r"arena of stage 0: no room for .* lower --chunk-rows"):
            collect(engine.submit(request(rng, 2000)))
        check(engine.submit(ask.request), ask)
    engine.close()


def test_a_failed_stage_fails_everything_in_flight_and_nothing_hangs(engines, rng, caplog):
    reasons = []
    engine = engines(stages=3)
    engine._on_failure = reasons.append
    stage = engine._workers[1].stage
    stage.run = lambda *args, **kwargs: 1 // 0  # type: ignore[method-assign]
    streams = [engine.submit(request(rng, 50)) for _ in range(4)]
    for stream in streams:
        with pytest.raises(RequestFailed, match="stage 1 failed: ZeroDivisionError"):
            collect(stream)
    until(lambda: reasons)
    assert len(reasons) == 1
    assert (engine.stats().state, engine.stats().ended) == (State.FAILED, {"failed": 4})
    with pytest.raises(NotReady, match="the engine is failed: stage 1 failed"):
        engine.submit(request(rng, 5))
    assert engine.drain(1.0)


def test_a_step_that_hangs_is_noticed(micro, rng):
    reasons = []
    engine = Engine(
        micro.config, micro.weights, Options(stages=2, kv_tokens=4096), on_failure=reasons.append, hang_floor_s=0.3
    )
    gate = Gate(engine, 1)
    stream = engine.submit(request(rng, 30))
    with pytest.raises(RequestFailed, match=r"stage 1 hangs: prefill job 1 .* limit 0"):
        collect(stream)
    gate.open.set()
    until(lambda: reasons)
    assert len(reasons) == 1
    engine.close()


# Streams


def test_progress_goes_up_and_one_reader_may_be_late(engines, micro, rng):
    ask = make_ask(micro, prompt_ids(rng, 100))
    engine = engines(chunk_rows=10)
    with nothing_left(engine):
        seen = [update.progress for update in engine.submit(ask.request)]
        rows = [progress.rows_done for progress in seen if progress.phase is Phase.PREFILL]
        assert rows == sorted(rows)
        assert seen[-1].phase is Phase.ENDED
        late = engine.submit(ask.request)
        until(lambda: late.ended)
        (update,) = late
        assert len(update.ids) == 6


def test_many_streams_in_one_event_loop(engines, micro, rng):
    asks = [make_ask(micro, prompt_ids(rng, 20 + n), seed=n, temperature=1.0) for n in range(6)]
    engine = engines(running=4)

    async def read(ask) -> None:
        stream = engine.submit(ask.request)
        n_ids = 0
        async for update in stream:
            n_ids += len(update.ids)
        assert n_ids == 6
        assert stream.summary.output_ids_sha256 == ask.ids_sha256

    async def read_all() -> None:
        await asyncio.wait_for(asyncio.gather(*map(read, asks)), WAIT_S)

    with nothing_left(engine):
        asyncio.run(read_all())


def test_an_error_reaches_an_asynchronous_reader(engines, rng):
    engine = engines()
    engine._workers[0].stage.run = lambda *args, **kwargs: 1 // 0  # type: ignore[method-assign]

    async def read() -> None:
        async for _ in engine.submit(request(rng, 20)):
            pass

    with pytest.raises(RequestFailed, match="stage 0 failed"):
        asyncio.run(read())


def test_seeds_are_drawn_and_told(engines, rng):
    engine = engines()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = prompt_ids(rng, 20)
    with nothing_left(engine):
        stream = engine.submit(Request(prompt_ids=prompt, params=params))
        ids = collect(stream)
        again = engine.submit(Request(prompt_ids=prompt, params=replace(params, seed=stream.summary.seed)))
        assert collect(again) == ids
        assert stream.seed == stream.summary.seed


# Log-probabilities


@pytest.mark.parametrize("chunk_rows", [7, 64])
def test_logprobs_of_prompt_and_output(engines, micro, rng, chunk_rows):
    prompt = prompt_ids(rng, 90)
    handle = micro.open()
    parts = micro.prefill(handle, prompt, mode="full", all_logits=True)
    want_f32 = torch.stack([logprobs_ref(row) for part in parts for row in part.logits_f32])
    micro.close(handle)
    engine = engines(chunk_rows=chunk_rows)
    with nothing_left(engine):
        stream = engine.submit(request_of(prompt, n_logprobs=3, prompt_logprobs=True))
        updates = list(stream)
    own = np.concatenate([u.prompt_logprobs.own_f32 for u in updates if u.prompt_logprobs])
    np.testing.assert_array_equal(own, want_f32[torch.arange(89), prompt[1:]].numpy())
    first = next(u for u in updates if u.ids)
    best = want_f32[-1].sort(descending=True, stable=True)
    assert first.ids[0] == int(best.indices[0])  # greedy
    assert first.logprobs.top(0) == list(zip(best.indices[:3].tolist(), best.values[:3].tolist(), strict=True))
    assert first.logprobs.own_f32[0] == first.logprobs.top_f32[0]


def request_of(prompt: list[int], **fields: object) -> Request:
    return Request(prompt_ids=prompt, params=GREEDY, **fields)  # type: ignore[arg-type]


def test_logprobs_that_make_no_sense():
    with pytest.raises(ValueError, match="n_logprobs = 21: must be 0 to 20"):
        request_of([3], n_logprobs=21)
    with pytest.raises(ValueError, match="prompt_logprobs without n_logprobs"):
        request_of([3], prompt_logprobs=True)
