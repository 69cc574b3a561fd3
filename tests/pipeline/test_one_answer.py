"""One request, one answer (design.md section 4): one pair of hashes, ids and logits, over every way of serving it."""

import random
import time

import numpy as np
import pytest
from engine_cases import PAGE, Ask, check, collect, make_ask, nothing_left, prompt_ids
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.pipeline.request import Request
from rocline.tools.demo_checkpoint import write_demo_checkpoint

N_PROMPT = 90  # past the candidates of `micro`, over two pages, odd chunks at the end


@pytest.fixture(scope="module")
def asks(micro, request) -> list[Ask]:
    """A greedy and a sampled request."""
    rng = np.random.default_rng(request.config.option.seed)
    sampled = {"temperature": 1.0, "top_p": 0.95, "seed": 20_261_129}
    return [
        make_ask(micro, prompt_ids(rng, N_PROMPT)),
        make_ask(micro, prompt_ids(rng, N_PROMPT - 1), repetition_penalty=1.1, **sampled),
    ]


WAYS = {
    **{f"chunk {n}": {"chunk_rows": n} for n in (1, 7, 64, 500, N_PROMPT)},
    **{f"{n} in flight": {"inflight_chunks": n, "chunk_rows": 7} for n in (1, 2, 8, 32)},
    **{f"{n} stages": {"stages": n} for n in (1, 2, 3, 5)},
    **{f"{n} stages, contiguous": {"stages": n, "placement": "contiguous"} for n in (2, 3, 5)},
    **{f"{n} stages on {m}": {"stages": n, "devices": m} for n, m in ((2, 1), (5, 1), (5, 2), (3, 2))},
    "full": {"prefill": "full"},
    "full, contiguous": {"prefill": "full", "placement": "contiguous", "chunk_rows": 33},
    **{f"{n} groups": {"groups": n} for n in (1, 2, 3, 4)},
}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_options_change_nothing(engines, asks, way):
    engine = engines(**WAYS[way])
    with nothing_left(engine):
        streams = [engine.submit(ask.request) for ask in asks]
        for stream, ask in zip(streams, asks, strict=True):
            check(stream, ask, way)


@pytest.mark.parametrize("n_others", [1, 3, 7])
def test_company_changes_nothing(engines, asks, rng, n_others):
    """Others join and leave at random times, some cancelled in the middle."""
    engine = engines(chunk_rows=32, mixed_chunk_rows=16, groups=int(rng.integers(1, 5)))
    with nothing_left(engine):
        others = []
        for n in range(n_others):
            prompt = prompt_ids(rng, int(rng.integers(1, 120)))
            params = SamplingParams(max_tokens=int(rng.integers(1, 20)), seed=n)
            others.append(engine.submit(Request(prompt_ids=prompt, params=params)))
            time.sleep(float(rng.random()) * 0.03)
            if n == n_others // 2:
                streams = [engine.submit(ask.request) for ask in asks]
        for other in others[::2]:
            other.cancel()
        for stream, ask in zip(streams, asks, strict=True):
            check(stream, ask, n_others)
        for other in others:
            collect(other)


def test_decode_beside_a_prefill(engines, asks, rng):
    engine = engines(chunk_rows=64, mixed_chunk_rows=8)
    with nothing_left(engine):
        first = engine.submit(asks[1].request)
        update = next(iter(first))
        while not update.ids:
            update = next(iter(first))
        long = engine.submit(Request(prompt_ids=prompt_ids(rng, 700), params=SamplingParams(max_tokens=1)))
        second = engine.submit(asks[0].request)
        list(first)
        assert first.summary.output_ids_sha256 == asks[1].ids_sha256
        assert first.summary.logits_sha256 == asks[1].logits_sha256
        check(second, asks[0])
        collect(long)


def test_after_a_cancelled_neighbour(engines, asks, rng):
    """Its pages go to the next request, full of its rows."""
    engine = engines(kv_tokens=4 * PAGE, running=1)
    with nothing_left(engine):
        neighbour = engine.submit(Request(prompt_ids=prompt_ids(rng, 200), params=SamplingParams(max_tokens=5)))
        while not neighbour.progress.rows_done:
            time.sleep(0.001)
        neighbour.cancel()
        for ask in asks:
            check(engine.submit(ask.request), ask)
        assert collect(neighbour) == [] or neighbour.summary.finish_reason == "abort"


def test_after_pause_and_resume(engines, micro, rng):
    """Pages run out while several decode: the newest waits, runs again from its ids, and says the same."""
    asks = [make_ask(micro, prompt_ids(rng, 40), max_tokens=28, seed=n, temperature=0.7) for n in range(3)]
    engine = engines(kv_tokens=3 * 64, page_positions=32, reserve_tokens=8)
    with nothing_left(engine):
        streams = [engine.submit(ask.request) for ask in asks]
        for stream, ask in zip(streams, asks, strict=True):
            check(stream, ask)
        assert sum(stream.summary.pauses for stream in streams) > 0


@pytest.fixture(scope="module", params=["demo", "tiny"])
def deeper(request, golden_or_skip, tmp_path_factory) -> Model:
    """More layers and other roles; the demo's are the release's 40."""
    if request.param != "demo":
        return Model.load(golden_or_skip(request.param) / "model", kv_tokens=2048, page_positions=PAGE)
    folder = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(folder, seed=0)
    return Model.load(folder, kv_tokens=2048, page_positions=PAGE)


def test_eight_stages_of_deeper_models(engines, deeper, rng):
    """Folded and contiguous, a card each and several on one, `halo` and `full`, with a neighbour beside."""
    asks = [make_ask(deeper, prompt_ids(rng, 75), max_tokens=3, temperature=0.8, seed=n) for n in range(2)]
    ways = (
        {"chunk_rows": 40},
        {"chunk_rows": 75, "placement": "contiguous", "prefill": "full", "devices": int(rng.integers(1, 9))},
    )
    for way in ways:
        engine = engines(deeper, stages=8, **way)
        with nothing_left(engine):
            for stream, ask in [(engine.submit(ask.request), ask) for ask in asks]:
                check(stream, ask, way)
        engine.close()


OPTIONS = st.fixed_dictionaries(
    {
        "stages": st.sampled_from([1, 2, 3, 5]),
        "placement": st.sampled_from(["folded", "contiguous"]),
        "chunk_rows": st.integers(4, 60),
        "mixed_chunk_rows": st.integers(4, 40),
        "inflight_chunks": st.sampled_from([1, 2, 8, 32]),
        "prefill": st.sampled_from(["halo", "full"]),
        "groups": st.sampled_from([None, 1, 2, 3, 4]),
        "running": st.sampled_from([1, 2, 8, 64]),
    }
)


def test_random_configurations(engines, micro, rng, request):
    """20 drawn configurations, with up to 7 others that join, leave and are cancelled."""
    asks = [make_ask(micro, prompt_ids(rng, 50), max_tokens=4, temperature=n * 0.8, seed=n) for n in range(2)]

    @seed(request.config.option.seed)
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(OPTIONS, st.integers(0, 7), st.randoms(use_true_random=False))
    def try_one(options: dict, n_others: int, dice: random.Random) -> None:
        engine = engines(**options)
        with nothing_left(engine):
            running = [(engine.submit(ask.request), ask) for ask in asks]
            others = []
            for n in range(n_others):
                ids = prompt_ids(rng, dice.randrange(1, 30))
                params = SamplingParams(max_tokens=dice.randrange(1, 6), seed=n)
                others.append(engine.submit(Request(prompt_ids=ids, params=params)))
                if dice.random() < 0.3:
                    dice.choice(others).cancel()
            for stream, ask in running:
                check(stream, ask, options)
            for other in others:
                collect(other)
        engine.close()

    try_one()
