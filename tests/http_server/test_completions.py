"""POST /v1/completions (io.md section 5.3)."""

import openai
import pytest
from wire import events, frames, without_chance

PATH = "/v1/completions"
EOS = "<｜end▁of▁sentence｜>"
MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none needed", max_retries=0, timeout=30) as client:
        yield client


def test_frames(server, speaker):
    server.engine.step_s = 0.02
    speaker.says(server.engine, f" blue{EOS}")
    n_output = len(speaker.ids(" blue")) + 1
    body = {"prompt": [300, 301], "stream": True, "stream_options": {"include_usage": True}}
    head = f'data: {{"id":"cmpl-ID","object":"text_completion","created":0,"model":"{MODEL}","choices":['
    texts = [server.pool.tokenizer.decode([token]) for token in speaker.ids(" blue")]
    assert [without_chance(frame) for frame in frames(server.post(PATH, body).content)] == [
        *(f'{head}{{"index":0,"text":"{t}","logprobs":null,"finish_reason":null}}],"usage":null}}' for t in texts),
        f'{head}{{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}}],"usage":null}}',
        f'{head}],"usage":{{"prompt_tokens":2,"completion_tokens":{n_output},"total_tokens":{2 + n_output},'
        '"prompt_tokens_details":{"cached_tokens":0}}}',
        "data: [DONE]",
    ]


def test_text_is_not_parsed_and_not_stripped(server, speaker, client):
    speaker.says(server.engine, f"\n\na</think>\n\nb{EOS}")
    assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "\n\na\n\nb"
    answer = client.completions.create(model=MODEL, prompt="x", extra_body={"skip_special_tokens": False})
    assert answer.choices[0].text == "\n\na</think>\n\nb"


def test_the_prompt_is_the_text_and_nothing_else(server):
    seen = []
    server.engine.answer = lambda request: seen.append(list(request.prompt_ids)) or [500]
    text = "a <｜User｜> b"
    server.post(PATH, {"prompt": text, "max_tokens": 1})
    server.post(PATH, {"prompt": [300, 301], "max_tokens": 1})
    assert seen == [server.pool.tokenizer.encode(text), [300, 301]]


@pytest.mark.parametrize("streamed", [False, True])
def test_choice_index_is_prompt_times_n_and_choice(server, client, streamed):
    server.engine.answer = lambda request: [500 + request.prompt_ids[0]]
    answer = client.completions.create(model=MODEL, prompt=[[10], [20], [30]], n=2, max_tokens=1, stream=streamed)
    texts = dict.fromkeys(range(6), "")
    for part in answer if streamed else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    decode = server.pool.tokenizer.decode
    assert texts == {index: decode([500 + 10 * (index // 2 + 1)]) for index in range(6)}
    if not streamed:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_and_logprobs(server, speaker, client, streamed):
    server.engine.step_s = 0.01 if streamed else 0
    prompt, output = "ab 漢", " the é"
    prompt_ids, output_ids = speaker.ids(prompt), speaker.ids(output)
    speaker.says(server.engine, output)
    how = {"model": MODEL, "prompt": prompt, "stream": streamed, "max_tokens": len(output_ids)}
    for echo in (False, True):
        for n_logprobs in (None, 2):
            answer = client.completions.create(**how, echo=echo, logprobs=n_logprobs)
            text, columns = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for part in answer if streamed else [answer]:
                text += part.choices[0].text
                if part.choices[0].logprobs:
                    for name, column in columns.items():
                        column += getattr(part.choices[0].logprobs, name)
            assert text == (prompt if echo else "") + output
            if n_logprobs is None:
                assert columns["tokens"] == []
                continue
            ids = (prompt_ids if echo else []) + output_ids
            assert len({len(column) for column in columns.values()} | {len(ids)}) == 1
            if echo:  # the first token has none
                assert (columns["token_logprobs"][0], columns["top_logprobs"][0]) == (None, None)
            n_none = int(echo)
            own = [-token / 100 for token in ids[n_none:]]
            assert columns["token_logprobs"][n_none:] == pytest.approx(own, rel=1e-6)  # one FP32
            assert {len(top) for top in columns["top_logprobs"][n_none:]} == {2}
            assert columns["text_offset"][0] == 0
            assert columns["text_offset"] == sorted(columns["text_offset"])
            if echo:
                assert columns["text_offset"][len(prompt_ids)] >= len(prompt)


def test_echo_is_before_the_first_token(server, speaker):
    speaker.says(server.engine, "b")
    first, *_ = events(server.post(PATH, {"prompt": "a", "echo": True, "stream": True, "max_tokens": 1}).content)
    assert first["choices"][0]["text"] == "a"


def test_log_probabilities_of_a_long_prompt_are_refused(server):
    response = server.post(PATH, {"prompt": [300] * 16_385, "echo": True, "logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")


def test_best_of_returns_the_n_likeliest(server, client):
    answers = [[900, 901], [400, 401], [600, 601]]  # the fake's log-probability falls with the id
    server.engine.answer = lambda request: answers.pop(0)
    answer = client.completions.create(model=MODEL, prompt="x", n=2, best_of=3, max_tokens=2)
    decode = server.pool.tokenizer.decode
    assert [(c.index, c.text) for c in answer.choices] == [(0, decode([400, 401])), (1, decode([600, 601]))]
    assert all(c.logprobs is None for c in answer.choices)
    assert answer.usage.completion_tokens == 6  # all that were made


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a"] * 73}, "n"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_refusals(server, fields, param):
    response = server.post(PATH, {"prompt": "a"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_default_of_max_tokens(server):
    seen = []
    server.engine.answer = lambda request: seen.append(request.params.max_tokens) or [500]
    server.post(PATH, {"prompt": "a"})
    assert seen == [8192]
