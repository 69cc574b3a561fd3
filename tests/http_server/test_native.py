"""POST /generate and the routes beside it (io.md section 5.5), with the published batch-1 protocol."""

import json
import threading
from itertools import pairwise

import httpx
import pytest
from running_server import wait_until
from wire import events, frames

from rocline.pipeline.options import Options

PATH = "/generate"
EOS = "<｜end▁of▁sentence｜>"


def generate(server, **fields):
    return server.post(PATH, fields)


def test_the_published_batch_1_protocol(server):
    """Freeze, flush, one warm-up and six runs of 4,096 ids in and 1,024 out; then flush again."""
    server.engine.answer = lambda request: [300 + n % 2000 for n in range(1024)]
    assert httpx.post(server.url + "/freeze_gc").status_code == 200
    for run in range(7):
        assert httpx.post(server.url + "/flush_cache").status_code == 200
        sampling = {"max_new_tokens": 1024, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [300 + run] * 4096, "sampling_params": sampling, "stream": True}
        told = events(generate(server, **body).content)
        assert told[0]["meta_info"]["completion_tokens"] >= 1
        assert told[0]["output_ids"]
        counts = [event["meta_info"]["completion_tokens"] for event in told]
        assert counts == sorted(counts)
        assert {event["meta_info"]["prompt_tokens"] for event in told} == {4096}
        last = told[-1]
        assert last["meta_info"]["completion_tokens"] == 1024
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 1024}
        assert len(last["output_ids"]) == 1024
        assert last["meta_info"]["e2e_latency"] > 0
    assert httpx.get(server.url + "/flush_cache").status_code == 200


def test_text_and_ids_are_cumulative(server, speaker):
    server.engine.step_s = 0.01
    speaker.says(server.engine, f"one two 漢{EOS}")
    told = events(generate(server, text="abc", stream=True).content)
    assert told[-1] == {**told[-1], **{"text": "one two 漢", "output_ids": speaker.ids(f"one two 漢{EOS}")}}
    for before, after in pairwise(told):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all(event["meta_info"]["finish_reason"] is None for event in told[:-1])
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    whole = generate(server, text="abc").json()
    for answer in (whole, told[-1]):
        for name in ("id", "e2e_latency", "seed"):
            del answer["meta_info"][name]
    assert whole == told[-1]


def test_stop_strings_tell_which_matched(server, speaker):
    speaker.says(server.engine, "one two three")
    answer = generate(server, text="x", sampling_params={"stop": ["zz", "tw"]}).json()
    assert answer["text"] == "one "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "tw"}


def test_defaults_and_sampling(server):
    seen = []
    server.engine.answer = lambda request: seen.append(request.params) or [500] * request.params.max_tokens
    assert generate(server, text="x").json()["meta_info"]["completion_tokens"] == 128
    sampling = {"max_new_tokens": 4, "min_new_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 5}
    assert generate(server, input_ids=[300], sampling_params=sampling).json()["meta_info"]["seed"] == 5
    assert (seen[1].max_tokens, seen[1].min_tokens, seen[1].temperature, seen[1].top_k) == (4, 2, 0.5, 3)


@pytest.mark.parametrize("streamed", [False, True])
def test_batches(server, streamed):
    server.engine.answer = lambda request: [500 + request.prompt_ids[0]] * request.params.max_tokens
    fields = {
        "input_ids": [[10], [20]],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "rid": ["left", "right"],
        "stream": streamed,
    }
    response = generate(server, **fields)
    if streamed:
        last = {event["index"]: event for event in events(response.content)}
        answers = [last[0], last[1]]
    else:
        answers = response.json()
    assert [a["output_ids"] for a in answers] == [[510], [520, 520]]
    assert [a["meta_info"]["id"] for a in answers] == ["left", "right"]


def test_n_choices_come_as_a_list(server):
    server.engine.answer = lambda request: [500]
    answers = generate(server, text="a", sampling_params={"n": 3, "max_new_tokens": 1}).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2]


def test_logprobs(server):
    server.engine.answer = lambda request: [500, 501]
    fields = {"input_ids": [10, 11, 12], "return_logprob": True, "top_logprobs_num": 1}
    fields["sampling_params"] = {"max_new_tokens": 2}
    meta = generate(server, **fields).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[pytest.approx(-5), 500, None], [pytest.approx(-5.01), 501, None]]
    assert meta["output_top_logprobs"][0] == [[pytest.approx(-6), 501, None]]
    assert "input_token_logprobs" not in meta
    meta = generate(server, **fields, logprob_start_len=0).json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [10, 11, 12]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_token_logprobs"][2][0] == pytest.approx(-0.12)
    meta = generate(server, **fields, logprob_start_len=2).json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [12]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "rid": ["x"]},
        {"text": ["a", "b"], "rid": ["x", "x"]},
        {"text": "a", "sampling_params": {"regex": "a*"}},
        {"text": "a", "sampling_params": {"json_schema": "{}"}},
        {"text": "a", "sampling_params": {"max_new_tokens": 0}},
        {"text": "a", "return_logprob": True, "top_logprobs_num": 21},
        {"input_ids": [300] * 16_385, "return_logprob": True, "logprob_start_len": 0},
    ],
)
def test_refusals(server, fields):
    response = generate(server, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert server.quiet()


def test_errors_are_events_once_it_streams(server):
    server.engine.fail_next = "broken"
    *_, error, done = frames(generate(server, text="a", stream=True).content)
    assert (json.loads(error.removeprefix("data: "))["error"]["message"], done) == ("broken", "data: [DONE]")


# Aborts


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("streamed", [False, True])
def test_abort_by_rid(server, phase, streamed):
    engine = server.engine
    engine.options = Options(running=1, queue=4, chunk_rows=64)
    engine.answer = lambda request: [500] * request.params.max_tokens
    long = {"input_ids": [300] * (256 if phase == "prefill" else 2), "stream": streamed}
    long["sampling_params"] = {"max_new_tokens": 10_000}
    engine.chunk_s = engine.step_s = 0.01
    answers = {}

    def ask(rid):
        answers[rid] = generate(server, **long, rid=rid)

    threads = [threading.Thread(target=ask, args=("first",))]
    threads[0].start()
    wait_until(lambda: "first" in server.serving.jobs)
    if phase == "queued":
        threads.append(threading.Thread(target=ask, args=("second",)))
        threads[1].start()
        wait_until(lambda: "second" in server.serving.jobs)
    elif phase == "decode":
        wait_until(lambda: engine.stats().decoding)
    rid = "second" if phase == "queued" else "first"
    for _ in range(2):  # a second time is as good
        assert server.post("/abort_request", {"rid": rid}).status_code == 200
    threads[-1].join(5)
    if streamed:
        reason = events(answers[rid].content)[-1]["meta_info"]["finish_reason"]
        assert reason == {"type": "abort", "message": "the request was aborted by /abort_request"}
    else:
        assert answers[rid].status_code == 400
        assert answers[rid].json()["error"]["code"] == "aborted"
    wait_until(lambda: rid not in server.serving.jobs)
    assert len(engine.cancels) == 1
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    for thread in threads:
        thread.join(5)
    wait_until(server.quiet)
    assert server.post("/abort_request", {"rid": "never seen"}).status_code == 200


def test_a_rid_that_runs_is_not_taken_twice(server):
    server.engine.gate.clear()
    thread = threading.Thread(target=generate, args=(server,), kwargs={"text": "a", "rid": "twin"})
    thread.start()
    wait_until(lambda: "twin" in server.serving.jobs)
    response = generate(server, text="b", rid="twin")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")
    assert server.engine.n_active == 1
    server.engine.gate.set()
    thread.join(5)


def test_flush_is_refused_while_anything_runs(server):
    server.engine.gate.clear()
    thread = threading.Thread(target=generate, args=(server,), kwargs={"text": "a"})
    thread.start()
    wait_until(lambda: server.serving.jobs)
    for method in ("GET", "POST"):
        response = httpx.request(method, server.url + "/flush_cache")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "busy")
    server.engine.gate.set()
    thread.join(5)
    wait_until(server.quiet)
    for method in ("GET", "POST"):
        assert httpx.request(method, server.url + "/flush_cache").status_code == 200


def test_health_generate_makes_a_real_token(server):
    steps = server.engine.steps
    assert httpx.get(server.url + "/health_generate").status_code == 200
    assert server.engine.steps > steps
    wait_until(server.quiet)
    server.engine.fail_next = "broken"
    response = httpx.get(server.url + "/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_healthy")


def test_tokenize_and_back(server):
    text = "a <｜User｜> 漢字"
    told = server.post("/tokenize", {"prompt": text}).json()
    assert told["count"] == len(told["tokens"])
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": [4096]}).status_code == 400


def test_progress_events(server):
    server.engine.chunk_s = 0.15
    fields = {"input_ids": [300] * 6000, "stream": True, "sampling_params": {"max_new_tokens": 1}}
    told = events(generate(server, **fields, stream_options={"include_progress": True}).content)
    assert [e["progress"]["phase"] for e in told if "progress" in e][-1] == "prefill"
    assert all("meta_info" in event for event in events(generate(server, **fields).content))
