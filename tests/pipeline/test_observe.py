"""What an idle engine's layers make of a prompt, and that nothing stays behind."""

import pytest
import torch
from engine_cases import PAGE, check, make_ask, nothing_left, prompt_ids

from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.request import NotReady, Request

FIELD = "router.ids"


@pytest.fixture(scope="module")
def model(data_folder):
    return Model.load(data_folder / "micro" / "model", kv_tokens=4096, page_positions=PAGE)


@pytest.fixture
def engine(model):
    options = Options(stages=3, context=512, kv_tokens=4096, chunk_rows=64)
    engine = Engine(model.config, model.weights, options, page_positions=PAGE, poison=True)
    yield engine
    engine.close()


def test_it_is_what_the_model_makes_of_it(model, engine, rng):
    ids, want, got = prompt_ids(rng, 60), {}, {}

    def record(layer, field, value):
        want[layer, field] = value.clone()

    handle = model.open()
    model.prefill(handle, ids, mode="full", record=record)
    model.close(handle)
    with nothing_left(engine):
        engine.observe(ids, lambda layer, field, value: got.update({(layer, field): value}))
    assert {layer for layer, field in got if field == FIELD} == set(range(model.config.text_config.num_hidden_layers))
    for layer, field in got:
        assert torch.equal(got[layer, field], want[layer, field]), (layer, field)


def test_requests_go_on_as_if_nothing_had_been(model, engine, rng):
    ask = make_ask(model, prompt_ids(rng, 40), max_tokens=3)
    with nothing_left(engine):
        engine.observe(prompt_ids(rng, 33), lambda layer, field, value: None)
        check(engine.submit(ask.request), ask)
        with pytest.raises(RuntimeError, match="of who looks on"):
            engine.observe(prompt_ids(rng, 9), lambda layer, field, value: _fail())
        check(engine.submit(ask.request), ask)


def _fail():
    raise RuntimeError("of who looks on")


def test_not_while_something_runs(engine, rng):
    stream = engine.submit(Request(prompt_ids=prompt_ids(rng, 20), params=SamplingParams(max_tokens=400)))
    with pytest.raises(NotReady, match="not idle"):
        engine.observe([20, 21], lambda layer, field, value: None)
    stream.cancel()
