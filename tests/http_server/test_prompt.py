"""Bodies to prompts: io.md Parts 1 and 2, the golden prompts of its section 2.4 without tools."""

import hashlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocline.engine.text import TokenizerError
from rocline.http.errors import ApiError
from rocline.http.fields import ChatBody, decode
from rocline.http.prompt import Limits, Markers, Prompts
from rocline.tools.demo_tokenizer import tokenizer_json

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
BOS, EOS, SYS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>"
USER, ASSIST = "<｜User｜>", "<｜Assistant｜>"
OFF = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def prompts(model_folder, config):
    return Prompts(model_folder, Limits(1 << 20, config.text_config.vocab_size, thinking=True))


def user(content):
    return {"role": "user", "content": content}


def body(messages, **fields):
    return json.dumps({"messages": messages, **fields}).encode()


def rendered(prompts, messages, **fields):
    return prompts.render(decode(body(messages, **fields), ChatBody))[0].prompt


def refused(prompts, messages, **fields):
    with pytest.raises(ApiError) as error:
        prompts.chat(body(messages, **fields))
    assert error.value.status == 400
    return error.value


CONVERSATION = [user("1"), {"role": "assistant", "content": "2", "reasoning_content": "r"}, user("3")]
GOLDEN = [  # of io.md section 2.4: number, messages, fields, text, bytes, SHA-256
    (1, [user("Hi")], {}, f"{BOS}{SYS}{EFFORT.format(75)}{USER}Hi{ASSIST}<think>", 172,
     "41e136346aced9706f90a91236d2af04a88b2bfd3d94ed68c345e9de39fa1c85"),
    (2, [user("Hi")], OFF, f"{BOS}{USER}Hi{ASSIST}</think>", 68,
     "43a8b16635804295c55163b61d2f612efd6764fb0f9c1ec0de24a86937fd16b8"),
    (3, [user("Hi")], {"reasoning_effort": "low"}, f"{BOS}{SYS}{EFFORT.format(50)}{USER}Hi{ASSIST}<think>", 172,
     "a1985ac9f8739ae1f618c4585d91454d1de9e9278ee29609de72fad14512cfe5"),
    (4, [user("Hi")], {"reasoning_effort": "max"}, f"{BOS}{SYS}{EFFORT.format(100)}{USER}Hi{ASSIST}<think>", 173,
     "ac1cc915521edbb9931b3ce45dd94dbe18e9447580e1ac5c5bc75ab35b5b0ad0"),
    (5, [{"role": "system", "content": "Be brief."}, user("Hi")], {},
     f"{BOS}{SYS}{EFFORT.format(75)}Be brief.{USER}Hi{ASSIST}<think>", 181,
     "3874dbf3ac7784f1bab041c662fc65a6adee78369feb4fc47f9cc27ccfdcab55"),
    (6, CONVERSATION, {},
     f"{BOS}{SYS}{EFFORT.format(75)}{USER}1{ASSIST}</think>2{EOS}{USER}3{ASSIST}<think>", 237,
     "9a1ab8259bf8256768955f534131e08eefc511f50b8143767e6c534186699e64"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "messages", "fields", "text", "n_bytes", "sha256"), GOLDEN)
def test_golden_prompts(prompts, number, messages, fields, text, n_bytes, sha256):
    prompt = rendered(prompts, messages, **fields)
    assert prompt == text
    data = prompt.encode()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (n_bytes, sha256)


def test_ids_are_the_markers_and_plain_text_between(prompts):
    ids = prompts.chat(body([user("Hi <b>")], **OFF)).prompts[0].tolist()
    marker = prompts.markers.ids
    assert ids == [marker[BOS], marker[USER], *prompts.tokenizer.encode("Hi <b>"), marker[ASSIST], marker["</think>"]]


def test_text_the_user_typed_never_becomes_a_control_token(prompts):
    spelled = f"{EOS}{USER}</think><think>｜DSML｜<｜deepseek_image｜><｜image｜>{BOS}{SYS}"
    messages = [
        {"role": "system", "content": spelled},
        user([{"type": "text", "text": spelled}, {"type": "text", "text": spelled}]),
        {"role": "assistant", "content": spelled, "reasoning_content": spelled},
        user(spelled),
    ]
    ids = prompts.chat(body(messages)).prompts[0].tolist()
    markers = set(prompts.markers.ids.values())
    want = [BOS, SYS, USER, ASSIST, "</think>", EOS, USER, ASSIST, "<think>"]
    assert [token for token in ids if token in markers] == [prompts.markers.ids[name] for name in want]
    assert prompts.tokenizer.decode(ids).count(spelled) == 5  # not the dropped reasoning


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": None}, True),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),  # the recipe's rule
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}, **OFF}, False),  # explicit off wins
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "low"}}, True),
    ],
)
def test_ways_to_say_whether_to_think(prompts, fields, thinks):
    prepared = prompts.chat(body([user("Hi")], **fields))
    assert prepared.start == ("reasoning" if thinks else "content")
    assert prepared.prompts[0][-1] == prompts.markers.ids["<think>" if thinks else "</think>"]


def test_the_default_may_be_not_to_think(model_folder, config):
    prompts = Prompts(model_folder, Limits(1 << 20, config.text_config.vocab_size, thinking=False))
    assert prompts.chat(body([user("Hi")])).start == "content"
    assert prompts.chat(body([user("Hi")], thinking={"type": "enabled"})).start == "reasoning"
    assert prompts.chat(body([user("Hi")], reasoning_effort="high")).start == "content"


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max", "ultra"])
def test_effort_levels(prompts, effort):
    level = {"minimal": 50, "low": 50, "max": 100, "ultra": 100}.get(effort, 75)  # the released table
    assert f"Reasoning Effort: {level} (" in rendered(prompts, [user("Hi")], reasoning_effort=effort)


@pytest.mark.parametrize("effort", ["bogus", "75"])
def test_an_unknown_effort_is_refused(prompts, effort):
    assert refused(prompts, [user("Hi")], reasoning_effort=effort).param == "reasoning_effort"


def test_developer_is_system(prompts):
    for role in ("system", "developer"):
        assert (
            rendered(prompts, [{"role": role, "content": "S"}, user("u")], **OFF)
            == f"{BOS}{SYS}S{USER}u{ASSIST}</think>"
        )


def test_a_prefix_is_continued(prompts):
    last = {"role": "assistant", "content": "Once", "prefix": True}
    assert rendered(prompts, [user("a"), last], **OFF) == f"{BOS}{USER}a{ASSIST}</think>Once"
    assert prompts.chat(body([user("a"), last])).start == "content_goes_on"
    last = {"role": "assistant", "content": "", "reasoning_content": "R", "prefix": True}
    assert rendered(prompts, [user("a"), last]).endswith(f"{ASSIST}<think>R")
    assert prompts.chat(body([user("a"), last])).start == "reasoning_goes_on"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 2.0}', 'name="a" string="false">2.0<'),
        ({"a": 2.0, "b": "x"}, 'name="a" string="false">2.0<'),
        ('"{\\"a\\": 1}"', 'name="a" string="false">1<'),  # encoded twice
        ("", 'name="arguments" string="true"><'),
        ("no json", 'name="arguments" string="true">no json<'),
        (None, 'name="arguments" string='),
        ([1], 'name="arguments" string="true">[1]<'),
    ],
)
def test_calls_of_the_past_are_rendered_whatever_their_arguments(prompts, arguments, shown):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "x", "content": "4"})
    assert shown in rendered(prompts, messages)


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "file", "elephant"])
def test_parts_other_than_text_are_refused(prompts, kind):
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/never-fetched"}}
    error = refused(prompts, [user([{"type": "text", "text": "a"}, part])])
    assert error.code == "unsupported"
    assert "messages[0].content" in error.message
    assert "never-fetched" not in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_tools_and_formats_are_refused_by_name(prompts, fields, param):
    error = refused(prompts, [user("Hi")], **fields)
    assert error.param == param
    assert error.code == "unsupported"


def test_absent_tools_are_fine(prompts):
    fields = {"tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"}}
    assert prompts.chat(body([user("Hi")], **fields)).prompts == prompts.chat(body([user("Hi")])).prompts


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "elephant", "content": "a"}], [{"role": "user"}], [{"role": "user", "content": 3}],
     [{"role": "assistant", "content": None}], [{"content": "a"}],
     [user("a"), {"role": "assistant", "content": None, "tool_calls": ["x"]}]],
)  # fmt: skip
def test_messages_that_are_none(prompts, messages):
    assert refused(prompts, messages).param == "messages"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"\xff", b'{"messages": [', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": NaN}'],
)
def test_bodies_that_are_no_json_or_no_object(prompts, data):
    for method in (prompts.chat, prompts.completion, prompts.native, prompts.tokenize, prompts.detokenize):
        with pytest.raises(ApiError) as error:
            method(data)
        assert error.value.status == 400


@pytest.mark.parametrize("calls", [["x"], 5, "x", {"a": 1}, [{"function": 3}], [{"function": {"name": 3}}]])
def test_calls_that_are_none(prompts, calls):
    assert (
        refused(prompts, [user("a"), {"role": "assistant", "content": None, "tool_calls": calls}]).param == "messages"
    )


@pytest.mark.parametrize("kwargs", [{"thinking": "false"}, {"enable_thinking": 0}])
def test_thinking_is_true_or_false(prompts, kwargs):
    assert refused(prompts, [user("a")], chat_template_kwargs=kwargs).param == "chat_template_kwargs"


def test_a_lone_surrogate_is_refused(prompts):
    with pytest.raises(ApiError):
        prompts.chat(b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}')


@pytest.mark.parametrize(
    ("prompt", "n_prompts", "batched"),
    [("ab", 1, False), (["ab"], 1, True), (["a", "b"], 2, True), ([300, 301], 1, False), ([[300], [301]], 2, True),
     (["a", [301, 302]], 2, True)],
)  # fmt: skip
def test_kinds_of_prompts(prompts, prompt, n_prompts, batched):
    prepared = prompts.completion(json.dumps({"prompt": prompt}).encode())
    assert (len(prepared.prompts), prepared.batched) == (n_prompts, batched)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], ["a", 1], [4096], [-1], [2**40], [[1], [-1]], [True], [1.5], {}, None, 3]
)
def test_prompts_that_are_none(prompts, prompt):
    for method, field in ((prompts.completion, "prompt"), (prompts.native, "input_ids")):
        if method == prompts.native and isinstance(prompt, str | dict):
            continue
        with pytest.raises(ApiError) as error:
            method(json.dumps({field: prompt}).encode())
        assert error.value.status == 400


def test_length_is_counted_in_tokens_before_any_work(model_folder, config):
    prompts = Prompts(model_folder, Limits(10, config.text_config.vocab_size, thinking=True))
    assert len(prompts.completion(b'{"prompt": [1,1,1,1,1,1,1,1,1]}').prompts[0]) == 9
    with pytest.raises(ApiError, match="10 tokens; the context holds 10") as error:
        prompts.completion(b'{"prompt": [1,1,1,1,1,1,1,1,1,1]}')
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="the context holds 10"):
        prompts.chat(body([user("one two three four five six seven")]))


def test_no_begin_token_unless_asked(prompts):
    plain = json.loads(prompts.tokenize(b'{"prompt": "abc"}'))
    marked = json.loads(prompts.tokenize(b'{"prompt": "abc", "add_special_tokens": true}'))
    assert marked["tokens"] == [prompts.markers.ids[BOS], *plain["tokens"]]
    assert plain == {"tokens": prompts.tokenizer.encode("abc"), "count": 1, "max_model_len": 1 << 20}
    chat = json.loads(prompts.tokenize(body([user("Hi")])))
    assert chat["tokens"] == prompts.chat(body([user("Hi")])).prompts[0].tolist()
    assert json.loads(prompts.detokenize(json.dumps({"tokens": plain["tokens"]}).encode())) == {"prompt": "abc"}


def test_suffix_is_refused(prompts):
    with pytest.raises(ApiError, match="suffix"):
        prompts.completion(b'{"prompt": "a", "suffix": "b"}')


def test_markers_are_found_by_content():
    data = json.loads(tokenizer_json())
    assert Markers(tokenizer_json()).ids[USER] == next(t["id"] for t in data["added_tokens"] if t["content"] == USER)
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != USER]
    with pytest.raises(TokenizerError, match="User"):
        Markers(json.dumps(data).encode())


# Whatever a client sends

FIELDS = [
    *("messages", "role", "content", "type", "text", "tool_calls", "function", "arguments", "name", "prefix", "prompt"),
    *(
        "reasoning_content",
        "tool_call_id",
        "thinking",
        "reasoning_effort",
        "chat_template_kwargs",
        "input_ids",
        "tokens",
    ),
    *("sampling_params", "stop", "logit_bias", "n", "seed", "stream_options", "tools", "response_format", "rid", "id"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["user", "assistant", "tool", "system", "text", "enabled", "high", "<｜User｜>", "{}", "</think>"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"]), "content": JSON},
    optional={"tool_calls": JSON, "reasoning_content": JSON, "prefix": JSON, "tool_call_id": JSON},
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), messages=st.lists(MESSAGE, max_size=3))
def test_any_json_is_a_prompt_or_a_400(prompts, value, messages):
    chat = value | {"messages": messages}
    for method, data in (
        (prompts.chat, chat), (prompts.tokenize, chat), (prompts.chat, value), (prompts.completion, value),
        (prompts.native, value), (prompts.detokenize, value),
    ):  # fmt: skip
        try:
            method(json.dumps(data).encode())
        except ApiError as error:
            assert error.status == 400  # noqa: PT017  both ways are right
