"""POST /v1/chat/completions: through the openai client, and byte for byte (io.md sections 5.1 and 5.2)."""

import json

import httpx
import openai
import pytest
from running_server import wait_until
from wire import events, frames, http_bytes, read_response, without_chance

from rocline.http.asks import choice_seed
from rocline.pipeline.request import MAX_LOGPROBS

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
OFF = {"thinking": {"type": "disabled"}}
EOS = "<｜end▁of▁sentence｜>"
MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none needed", max_retries=0, timeout=30) as client:
        yield client


def slow(server):
    """One token an update, so that a stream's deltas can be told in advance."""
    server.engine.step_s = 0.02


def chunk(choices, more=""):
    head = f'data: {{"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"{MODEL}"'
    return f'{head},"choices":[{choices}]{more}}}'


def delta(inner, finish="null", index=0):
    return f'{{"index":{index},"delta":{{{inner}}},"logprobs":null,"finish_reason":{finish}}}'


def stream(server, **fields):
    response = httpx.post(server.url + PATH, json={"messages": HI, "stream": True} | fields, timeout=30)
    assert response.status_code == 200, response.text
    return response


# Byte for byte


def test_frames_of_a_thinking_answer(server, speaker):
    slow(server)
    speaker.says(server.engine, f"hm</think> the{EOS}")
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    with server.connect() as connection:
        connection.sendall(http_bytes(PATH, body))
        status, headers, data = read_response(connection)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    n_prompt = 39
    reasoning = [f'"reasoning_content":"{part}"' for part in ("h", "m")]
    null = ',"usage":null'
    usage = (
        f'"usage":{{"prompt_tokens":{n_prompt},"completion_tokens":5,"total_tokens":{n_prompt + 5},'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":2}}'
    )
    assert [without_chance(frame) for frame in frames(data)] == [
        chunk(delta('"role":"assistant","content":null,"reasoning_content":""'), null),
        *(chunk(delta(text), null) for text in reasoning),
        chunk(delta('"content":" the"'), null),
        chunk(delta("", '"stop"'), null),
        chunk("", "," + usage),
        "data: [DONE]",
    ]
    assert len({frame.split(',"object"')[0] for frame in frames(data)[:-1]}) == 1  # one id


def test_frames_of_a_plain_answer_b12_no_usage_unless_asked(server, speaker):
    slow(server)
    speaker.says(server.engine, " the")
    want = [
        chunk(delta('"role":"assistant","content":""')),
        chunk(delta('"content":" the"')),
        chunk(delta("", '"length"')),
        "data: [DONE]",
    ]
    for options in ({}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        data = stream(server, **OFF, **options).content
        assert [without_chance(frame) for frame in frames(data)] == want


def test_b13_the_usage_chunk_has_exactly_no_choices(server):
    *rest, last = events(stream(server, max_tokens=3, stream_options={"include_usage": True}).content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in rest)


def test_whole_answer(server, speaker):
    text = f"hm</think>\n\nthe answer{EOS}"
    n_output = len(speaker.ids(text))
    speaker.says(server.engine, text)
    response = server.post(PATH, {"messages": HI})
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert without_chance(response.text) == (
        f'{{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"{MODEL}","choices":[{{"index":0,'
        '"message":{"role":"assistant","content":"the answer","reasoning_content":"hm"},"logprobs":null,'
        f'"finish_reason":"stop"}}],"usage":{{"prompt_tokens":39,"completion_tokens":{n_output},'
        f'"total_tokens":{39 + n_output},'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":2}}}'
    )


# Through the client


def test_streamed_and_whole_answers_are_the_same_text(server, speaker, client):
    text = "why? 漢字 👩‍👩‍👧\n\nbecause</think>\n\nthe **answer**\n- é\n"
    speaker.says(server.engine, text + EOS)
    whole = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
    assert whole.reasoning_content == "why? 漢字 👩‍👩‍👧\n\nbecause"
    assert whole.content == "the **answer**\n- é\n"
    for step_s in (0, 0.001):
        server.engine.step_s = step_s
        deltas = [c.choices[0].delta for c in client.chat.completions.create(model=MODEL, messages=HI, stream=True)]
        assert deltas[0].role == "assistant"
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == whole.reasoning_content
        assert "".join(d.content or "" for d in deltas) == whole.content


@pytest.mark.parametrize("streamed", [False, True])
def test_b11_stop_strings_end_the_answer_and_the_engines_work(server, speaker, client, streamed):
    server.engine.step_s = 0.001
    speaker.says(server.engine, "not the STOP yet</think>step by ste STOP" + " more" * 500)
    answer = client.chat.completions.create(model=MODEL, messages=HI, stop=["ste STOP", "zzz"], stream=streamed)
    if streamed:
        choices = [c.choices[0] for c in answer]
        text, reason = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < 50
    assert (text, reason) == ("step by ", "stop")
    assert len(server.engine.cancels) == 1


def test_stop_string_may_be_part_of_the_text(server, speaker):
    speaker.says(server.engine, "one two three")
    answer = server.post(PATH, {"messages": HI, **OFF, "stop": "two", "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["message"]["content"] == "one two"


def test_n_choices_of_one_prompt(server, speaker, client):
    speaker.says(server.engine, f"a</think>one{EOS}", f"b</think>two{EOS}", f"c</think>three{EOS}")
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [c.message.content for c in answer.choices] == ["one", "two", "three"]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 39  # once
    assert answer.usage.completion_tokens == sum(
        len(speaker.ids(t + EOS)) for t in ("a</think>one", "b</think>two", "c</think>three")
    )

    speaker.says(server.engine, f"a</think>one{EOS}", f"b</think>two{EOS}", f"c</think>three{EOS}")
    texts, roles, ends = ["", "", ""], [0] * 3, [0] * 3
    for event in client.chat.completions.create(model=MODEL, messages=HI, n=3, stream=True):
        (choice,) = event.choices
        assert not ends[choice.index]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
    assert (texts, roles, ends) == (["one", "two", "three"], [1] * 3, [1] * 3)


def test_seeds_are_the_requests_own_derived_or_told(server):
    seen = []
    server.engine.answer = lambda request: seen.append(request.params.seed) or [500]
    response = server.post(PATH, {"messages": HI, "seed": 7, "n": 3, "max_tokens": 1})
    assert seen == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len(set(seen)) == 3
    assert response.headers["x-rocline-seed"] == ",".join(map(str, seen))
    assert choice_seed(7, 1) == 6040159952689979998  # by sha256sum
    response = server.post(PATH, {"messages": HI, "n": 2, "max_tokens": 1})
    assert seen[3:] == [None, None]
    assert len(set(response.headers["x-rocline-seed"].split(","))) == 2


def test_sampling_fields_reach_the_engine(server):
    seen = []
    server.engine.answer = lambda request: seen.append(request.params) or [500]
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": 0.3,
        "repetition_penalty": 1.1, "logit_bias": {"12": -5}, "seed": 3, "ignore_eos": True, "min_tokens": 2,
        "stop_token_ids": [9],
    }  # fmt: skip
    assert server.post(PATH, {"messages": HI, "max_tokens": 5} | fields).status_code == 200
    (params,) = seen
    assert params.logit_bias == {12: -5}
    assert params.stop_token_ids == (9,)
    for name in fields.keys() - {"logit_bias", "stop_token_ids"}:
        assert getattr(params, name) == fields[name]


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 65_536),
        (OFF, 8_192),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None, "max_completion_tokens": None}, 65_536),
    ],
)
def test_max_tokens_in_both_spellings_and_its_default(server, fields, max_tokens):
    seen = []
    server.engine.answer = lambda request: seen.append(request.params.max_tokens) or [500]
    assert server.post(PATH, {"messages": HI} | fields).status_code == 200
    assert seen == [max_tokens]


def test_unknown_fields_and_null_are_ignored(server):
    fields = {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "elephant": [1]}
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "seed", "logprobs", "stream", "tools", "logit_bias"))
    assert server.post(PATH, {"messages": HI, "max_tokens": 1} | fields | nulls).status_code == 200


def test_logprobs_of_every_token(server, speaker, client):
    ids = speaker.ids(f"h</think>é{EOS}")
    speaker.says(server.engine, f"h</think>é{EOS}")
    for step_s in (0, 0.01):
        server.engine.step_s = step_s
        answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
        whole = [entry.model_dump() for entry in answer.choices[0].logprobs.content]
        streamed = []
        options = {"logprobs": True, "top_logprobs": 2, "stream": True}
        for event in client.chat.completions.create(model=MODEL, messages=HI, **options):
            if event.choices[0].logprobs:
                streamed += [entry.model_dump() for entry in event.choices[0].logprobs.content]
        assert streamed == whole
        assert [bytes(entry["bytes"]) for entry in whole] == [server.pool.tokenizer.token_bytes(t) for t in ids]
        assert [entry["logprob"] for entry in whole] == pytest.approx([-t / 100 for t in ids], rel=1e-6)  # one FP32
        for token, entry in zip(ids, whole, strict=True):
            assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [
                server.pool.tokenizer.token_bytes(t) for t in (token + 1, token + 2)
            ]


def test_a_model_by_alias_or_not_at_all(server, client):
    for name in (MODEL, "DeepSeek-V4.1-Flash"):
        assert client.chat.completions.create(model=name, messages=HI, max_tokens=1).model == MODEL
    assert server.post(PATH, {"messages": HI, "max_tokens": 1}).status_code == 200
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert error.value.body["code"] == "model_not_found"


# Refusals before the first byte


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 73}, "n"),  # 8 run, 64 wait
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": 3}, "stop"),
        ({"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"4096": 1}}, None),
        ({"stop_token_ids": [-1]}, None),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stream_options": 3}, "stream_options"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_refused_with_status_and_error_body(server, fields, param, streamed):
    response = server.post(PATH, {"messages": HI, "stream": streamed} | fields)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_openai_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=HI, max_tokens=0)
    assert error.value.param == "max_tokens"
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])


# Failures on the way


def test_a_failure_before_the_first_token(server, speaker, server_log):
    speaker.says(server.engine, "never said")
    for streamed in (False, True):
        server.engine.fail_next = "the logits of position 3 are not finite"
        response = server.post(PATH, {"messages": HI, "stream": streamed})
        if streamed:  # headers went out at submit
            *_, error, done = frames(response.content)
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: ")) == {
                "error": {"message": "the logits of position 3 are not finite", "type": "internal_error", "code": 500}
            }
        else:
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["message"] == "the logits of position 3 are not finite"
    wait_until(server.quiet)
    assert server_log.text().count('"reason": "failed"') == 2


def test_a_failure_in_the_middle_is_an_event_then_the_end(server, speaker, client):
    server.engine.step_s = 0.01
    speaker.says(server.engine, " one" * 100)
    texts = []
    with pytest.raises(openai.APIError, match="broken"):  # noqa: PT012  the answer begins well
        for event in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
            texts.append(event.choices[0].delta)
            if len(texts) == 5:
                server.engine.fail_next = "broken"
    assert len(texts) >= 5


# Progress, on request


def test_progress_events_on_request(server):
    server.engine.chunk_s = 0.15
    content = [{"role": "user", "content": "word " * 6000}]
    options = {"include_progress": True, "include_usage": True}
    told = events(stream(server, messages=content, max_tokens=1, stream_options=options).content)
    progress = [event["progress"] for event in told if "progress" in event]
    assert len(progress) >= 2
    assert all(event["choices"] == [] for event in told if "progress" in event)
    assert [p["rows_done"] for p in progress] == sorted(p["rows_done"] for p in progress)
    assert progress[-1]["phase"] == "prefill"
    assert 0 < progress[-1]["rows_done"] < progress[-1]["rows_total"]
    assert 0 < progress[-1]["eta_s"] < 10
    assert "progress" not in told[-1]
    silent = stream(server, messages=content, max_tokens=1).content
    assert b"progress" not in silent
