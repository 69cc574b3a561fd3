"""The server over the real engine and the demo checkpoint: the same answers as without a server, and B04, B06, B07."""

import httpx
import pytest
from running_server import RunningServer, wait_until
from wire import events, http_bytes

from rocline.engine.generation import Generation
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.http.settings import Settings
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.tools.demo_checkpoint import write_demo_checkpoint

PROMPT = list(range(300, 340))
N_OUTPUT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return Model.load(folder, kv_tokens=2048)


@pytest.fixture(scope="module")
def want(model):
    """Without a server."""
    params = SamplingParams(temperature=0, max_tokens=N_OUTPUT, ignore_eos=True)
    generation = Generation(model, PROMPT, params)
    return list(generation), generation.output_ids_sha256


@pytest.fixture(scope="module")
def real(folder, model):
    options = Options(stages=2, context=2048, kv_tokens=8192, chunk_rows=32, mixed_chunk_rows=16, arena_gib=0.25)
    engine = Engine(model.config, model.weights, options)
    server = RunningServer(folder, engine, Settings(port=0))
    server.start()
    yield server
    server.loop.call_soon_threadsafe(server.server.stop)
    assert server.join(60) == 0


def fields(**more):
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": N_OUTPUT}
    return {"input_ids": PROMPT, "sampling_params": sampling} | more


def test_the_answer_is_the_engines(real, want, server_log):
    ids, sha256 = want
    assert real.post("/generate", fields()).json()["output_ids"] == ids
    wait_until(lambda: not real.serving.jobs)
    assert f'"output_ids_sha256": "{sha256}"' in server_log.text()


def test_the_published_protocol_in_small(real, want):
    assert httpx.post(real.url + "/freeze_gc").status_code == 200
    for _ in range(2):
        assert httpx.post(real.url + "/flush_cache").status_code == 200
        first, *_, last = events(real.post("/generate", fields(stream=True)).content)
        assert first["output_ids"] == want[0][:1]
        assert (last["meta_info"]["prompt_tokens"], last["meta_info"]["completion_tokens"]) == (len(PROMPT), N_OUTPUT)
        assert last["output_ids"] == want[0]


def test_log_probabilities_of_prompt_and_output(real, want):
    body = {"prompt": PROMPT[:8], "max_tokens": 2, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 1}
    columns = real.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    own = columns["token_logprobs"]
    assert len(own) == 10
    assert own[0] is None
    assert all(value < 0 for value in own[1:])
    for value, top in zip(own[8:], columns["top_logprobs"][8:], strict=True):
        assert [value] == list(top.values())  # temperature 0 takes the likeliest


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
def test_b04_b06_b07_a_client_that_leaves_frees_every_stage(real, phase):
    engine = real.engine
    before = engine.stats()
    assert before.free_pages == before.n_pages
    connection = real.connect()
    body = fields(input_ids=list(range(300, 1000)) if phase == "prefilling" else PROMPT)
    body["sampling_params"] = {"max_new_tokens": 1000, "ignore_eos": True}
    connection.sendall(http_bytes("/generate", body))
    wait_until(lambda: getattr(engine.stats(), phase), 30)
    connection.close()
    wait_until(lambda: engine.stats().free_pages == before.n_pages, 30)
    wait_until(lambda: not any(stage.busy or stage.waiting for stage in engine.stats().stages), 30)
    after = engine.stats()
    assert after.ended["abort"] == before.ended.get("abort", 0) + 1
    assert after.output_tokens - before.output_tokens < 10
    wait_until(lambda: not real.serving.jobs)
    assert real.post("/generate", fields(sampling_params={"max_new_tokens": 1})).status_code == 200
