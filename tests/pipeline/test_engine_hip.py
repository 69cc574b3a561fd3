"""The engine on GPUs: one answer over cuts, cards and company; nothing allocated while it serves.

On the CPU double; --hip cuda or rocm runs it on the cards there are, several stages on each.
"""

import gc
import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import Ask, check, collect, make_ask, nothing_left, prompt_ids
from hip_cases import OPTIONS, write_fitting_model

from rocline.engine.model import Model
from rocline.engine.pages import PagePlanes
from rocline.engine.sampling import SamplingParams
from rocline.engine.synthetic import SyntheticWeights
from rocline.hip_kernels import tactics
from rocline.hip_kernels.compile import Compiler
from rocline.hip_kernels.dispatch import DispatchError
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.graph import Graph
from rocline.hip_kernels.kernel import Kernel, compiler
from rocline.hip_kernels.linear_hip import Launched, use_forms
from rocline.hip_kernels.runtime import hip
from rocline.hip_kernels.tactics import Tactics
from rocline.pipeline import warm_up
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.placement import PlacementError
from rocline.pipeline.request import Request, RequestFailed
from rocline.pipeline.timeline import Kind
from rocline.pipeline.warm_up import choose_forms, prepare_kernels

PAGE = OPTIONS["page_positions"]
SERVED = {
    "device": "hip",
    "context": 2048,
    "kv_tokens": 4096,
    "chunk_rows": 32,
    "mixed_chunk_rows": 16,
    "arena_gib": 0.06,
}


@pytest.fixture(scope="module")
def folder(hip_device, data_folder, tmp_path_factory):
    return write_fitting_model(data_folder / "micro" / "model", tmp_path_factory.mktemp("fitting") / "model")


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return Model.load(folder, device="hip", **OPTIONS)


@pytest.fixture(scope="module")
def asks(model, hip_device, request) -> list[Ask]:
    """A greedy and a sampled request, past the candidates on a card."""
    rng = np.random.default_rng(request.config.option.seed)
    n_rows = 45 if hip_device == "cpu" else 700
    sampled = {"temperature": 1.0, "top_p": 0.95, "seed": 20_261_129, "repetition_penalty": 1.1}
    return [
        make_ask(model, prompt_ids(rng, n_rows), max_tokens=3),
        make_ask(model, prompt_ids(rng, n_rows - 12), max_tokens=3, **sampled),
    ]


@pytest.fixture
def engines(model):
    """engines(**options): an engine over the model's weights, with its steps captured; closed at the end."""
    opened = []

    def open_engine(source=model.weights, warms_up=False, **options) -> Engine:
        gc.collect()  # engines of earlier tests hold memory of the card that the plan counts on
        engine = Engine(
            model.config, source, Options(**SERVED | options), page_positions=PAGE, poison=True, warms_up=warms_up
        )
        opened.append(engine)
        if not warms_up:
            engine._assembly.capture_steps(engine.options.running, engine.context)
            engine.headroom.sample()  # that took memory
        return engine

    yield open_engine
    for engine in opened:
        engine.close()


WAYS = [
    {"stages": 3, "devices": 2, "groups": 2},
    {"stages": 5, "devices": 1, "chunk_rows": 7, "prefill": "full"},
    {"stages": 2, "devices": 2, "placement": "contiguous", "chunk_rows": 500, "inflight_chunks": 1},
]


@pytest.fixture
def launched(monkeypatch):
    """The threads that have launched captured steps."""
    threads, launch = [], Graph.launch

    def noted(graph):
        threads.append(threading.current_thread().name)
        launch(graph)

    monkeypatch.setattr(Graph, "launch", noted)
    return threads


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_options_change_nothing(engines, asks, launched, way):
    if way["devices"] > len(devices()):
        pytest.skip(f"a cut over cards: {len(devices())} GPU, want {way['devices']}")
    engine = engines(**way)
    with nothing_left(engine):
        streams = [engine.submit(ask.request) for ask in asks]
        for stream, ask in zip(streams, asks, strict=True):
            check(stream, ask, way)
    assert set(launched) == {f"stage {number}" for number in range(way["stages"])}
    kinds = set(engine.timeline()["kind"].tolist())
    assert {Kind.PREFILL, Kind.DECODE, Kind.COPY} <= kinds
    end_s = time.monotonic() + 60
    while any(stage.busy for stage in engine.stats().stages):  # a thread tells of its last task before it rests
        assert time.monotonic() < end_s
    assert all(stage.busy_s > 0 for stage in engine.stats().stages)


def test_mirrored_rows_of_a_step_are_stored_by_its_graphs(engines, model, rng, monkeypatch):
    """Not one after the other by the host, which every card that reads them would wait for at every token."""
    if len(devices()) < 2:
        pytest.skip("rows that another card reads: 1 GPU, want 2")
    ends, write, n_rows = [], PagePlanes.write, 34

    def noted(planes, source, table_i32, first, rows_u8, keys_u8):
        ends.append((first + len(rows_u8)) * PAGE // planes.rows_u8[source].shape[1])
        write(planes, source, table_i32, first, rows_u8, keys_u8)

    monkeypatch.setattr(PagePlanes, "write", noted)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine = engines(stages=4, devices=2)
    assert len(collect(engine.submit(Request(prompt_ids=prompt_ids(rng, n_rows), params=params)))) == 6
    assert max(ends) == n_rows  # of the prompt's rows


def test_noise_is_the_same_model_on_any_number_of_cards(engines, model, rng):
    text, ids = model.config.text_config, prompt_ids(rng, 40)
    n_stores = text.num_hidden_layers // 2
    outcomes = set()
    for cards in range(1, min(3, len(devices())) + 1):
        source = SyntheticWeights(model.config, 1, n_stores, torch.device(devices()[0].torch_device.type))
        engine = engines(source, stages=3, devices=cards)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        stream = engine.submit(Request(prompt_ids=ids, params=params, logits_digest=True))
        assert len(collect(stream)) == 4
        outcomes.add((stream.summary.output_ids_sha256, stream.summary.logits_sha256))
    assert len(outcomes) == 1


def test_company_changes_nothing(engines, asks, launched, rng):
    """Several stages on a card, and others who come and leave in the middle: their pages go to the next."""
    engine = engines(stages=3, devices=1, running=3)
    with nothing_left(engine):
        others = []
        for n in range(4):
            params = SamplingParams(max_tokens=2, seed=n)
            others.append(engine.submit(Request(prompt_ids=prompt_ids(rng, int(rng.integers(1, 60))), params=params)))
        streams = [engine.submit(ask.request) for ask in asks]
        for other in others[::2]:
            other.cancel()
        for stream, ask in zip(streams, asks, strict=True):
            check(stream, ask)
        for other in others:
            collect(other)
    assert len(set(launched)) == 3


def test_an_idle_engine_is_observed(engines, asks):
    """By another thread than its stages', whose steps are captured; and it serves on."""
    engine, layers = engines(stages=3, devices=min(2, len(devices()))), set()
    with nothing_left(engine):
        engine.observe(asks[0].request.prompt_ids[:30], lambda layer, field, value: layers.add(layer))
        check(engine.submit(asks[1].request), asks[1])
    assert set(range(engine.config.text_config.num_hidden_layers)) <= layers


def test_nothing_is_allocated_while_it_serves(engines, asks):
    engine = engines(stages=2, devices=1)
    check(engine.submit(asks[0].request), asks[0])

    def counts():
        return [(reading.n_slabs_ever, reading.slab_bytes) for reading in (device.memory() for device in devices())]

    before = counts()
    check(engine.submit(asks[1].request), asks[1])
    assert counts() == before


def test_headroom_is_the_cards_own(engines, asks):
    """And nothing that is served takes of it."""
    way = {"stages": 3, "devices": min(2, len(devices()))}
    gc.collect()  # or engines of earlier tests would give memory back meanwhile
    before = [device.memory().free_bytes for device in devices()]
    engine = engines(**way)
    opened = engine.stats().memory
    check(engine.submit(asks[0].request), asks[0])
    began_s = time.monotonic()
    engine.headroom.sample()
    for number, reading in enumerate(engine.stats().memory):
        memory = devices()[number].memory()
        assert (reading.device, reading.total_bytes, reading.error) == (number, memory.total_bytes, "")
        assert reading.free_bytes == memory.free_bytes == opened[number].free_bytes < before[number]
    assert engine.headroom.minimum_since(began_s) == min(reading.free_bytes for reading in opened)


def test_chunks_may_be_longer_than_the_model_takes(model, caplog):
    """Kernels are compiled for what can come; --chunk-rows is a bound, not a promise."""
    longest = model.config.text_config.max_position_embeddings
    with caplog.at_level(logging.INFO, "rocline"):
        prepare_kernels(model.config, Options(**SERVED | {"chunk_rows": 2 * longest}))
    assert "kernels are there" in caplog.text


class OtherForms(dict):
    """Wherever a launch may have two forms, the one that is not the rule's."""

    def get(self, key, rule):
        return 3 - rule


def test_forms_of_products_change_no_bit(engines, asks):
    """Steps and chunks, captured and not."""
    use_forms(OtherForms())
    try:
        engine = engines(stages=2, devices=1, chunk_rows=20, warms_up=True)
        for ask in asks:
            check(engine.submit(ask.request), ask)
    finally:
        use_forms({})


def test_forms_are_measured_at_the_first_start_alone(hip_device, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tactics, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(warm_up, "compiler", lambda: Compiler(tmp_path))
    product, options = Launched("e4m3", ((1, 72, 2),)), Options(**SERVED | {"running": 3, "chunk_rows": 200})
    try:
        with caplog.at_level(logging.INFO, "rocline"):
            choose_forms([product], options)
            choose_forms([product], options)
    finally:
        use_forms({})
    n_rows = 1, 2, 4, 128, 256  # of steps, and of chunks
    assert f"{len(n_rows)} forms of products, {len(n_rows)} measured now" in caplog.text
    assert f"{len(n_rows)} forms of products, 0 measured now" in caplog.text
    assert Tactics.of(devices()[0], tmp_path).forms.keys() == {product.key(n) for n in n_rows}


def test_the_first_request_finds_everything_made(engines, asks, caplog, hip_device):
    """No kernel is compiled or loaded by it, and what warmed the engine up is in no figure. More may run than there are
    pages for, and nothing may wait.
    """
    n_tokens = 512 if hip_device == "cpu" else 1024
    for kernel in gc.get_objects():  # that earlier tests have loaded
        if type(kernel) is Kernel:
            kernel._functions.clear()
    with caplog.at_level(logging.INFO, "rocline"):
        few_pages = {"context": n_tokens, "kv_tokens": n_tokens, "running": n_tokens // PAGE + 2, "queue": 0}
        engine = engines(stages=2, devices=1, chunk_rows=66, warms_up=True, **few_pages)
    assert "warmed up" in caplog.text
    stats = engine.stats()
    assert (stats.ended, stats.prompt_rows, stats.output_tokens) == ({}, 0, 0)
    n_compiled, loaded = compiler().n_compiled, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hip(), "hipModuleLoadData", lambda code: loaded.append(code) or 1 // 0)
        for ask in asks:
            check(engine.submit(ask.request), ask)
    assert (compiler().n_compiled, loaded) == (n_compiled, [])


def test_weights_are_read_piece_by_piece(folder, asks):
    """From the checkpoint's files, each card its part; the last source's key/value side stands before its layer."""
    changes = {"stages": 5, "devices": min(2, len(devices())), "kv_tokens": None, "running": 1}
    options = Options(**SERVED | changes)
    read = []
    engine = Engine.open(folder, options, advance=read.append)
    check(engine.submit(asks[0].request), asks[0])
    engine.close()
    assert sum(read) > sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 0.5


def test_a_row_that_is_not_finite_ends_its_request_alone(model, engines, asks, rng):
    """The stage says so later than it queues the row, and still before the request's next token."""
    embed_bf16 = model.weights.embed_bf16.clone()
    embed_bf16[450] = float("nan")
    engine = engines(replace(model.weights, embed_bf16=embed_bf16), stages=3, devices=1)
    with nothing_left(engine):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        bad = engine.submit(Request(prompt_ids=[*prompt_ids(rng, 7, 400), 450, 11, 12], params=params))
        with pytest.raises(RequestFailed, match=r"residual streams of position 7 are not finite after stage \d"):
            collect(bad)
        good = Request(prompt_ids=prompt_ids(rng, 9, 400), params=params)
        assert len(collect(engine.submit(good))) == 2


def test_what_does_not_fit_is_refused_before_anything_is_taken(engines):
    before = [device.memory().n_slabs_ever for device in devices()]
    with pytest.raises(PlacementError, match=r"more than device \d has, .*(--kv-tokens \d+ fits|no one flag)"):
        engines(stages=2, kv_tokens=2**38, arena_gib=None)
    if len(devices()) < 5:
        with pytest.raises(PlacementError, match=r"--devices 5: HIP shows \d+; lower it"):
            engines(stages=5, devices=5)
    with pytest.raises(PlacementError, match=r"arenas of 320.00 GiB need \d.* more .* lower --arena-gib"):
        engines(stages=5, devices=1, arena_gib=64)  # 128 would fit some cards
    with pytest.raises(DispatchError, match="reference operator 'atention'; did you mean attention"):
        engines(stages=2, reference_op=("atention",))
    assert [device.memory().n_slabs_ever for device in devices()] == before
