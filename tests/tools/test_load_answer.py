"""What a client makes of a stream's events, and the arithmetic over their moments: known events, known figures."""

import hashlib

import pytest

from rocline.engine.digest import ids_sha256
from rocline.tools.load_answer import LoadError, Mark, NativeRecorder, OpenAiRecorder
from rocline.tools.load_figures import common_window, percentiles, spread
from rocline.tools.load_protocols import joined_sha256


def native(ids, n_so_far, text="", **meta):
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {"prompt_tokens": 5, "completion_tokens": n_so_far, "finish_reason": None, **meta},
    }


def taken(recorder, *events):
    """Events at the seconds 1, 2, 3 …"""
    for now_s, event in enumerate(events, 1):
        recorder.take(event, float(now_s))
    return recorder.answer(len(events) + 1.0)


def test_native_events_with_all_ids_so_far():
    answer = taken(
        NativeRecorder(0.5),
        native([7], 1),  # half a character: a token, and no text yet
        native([7, 8, 9], 3, "ab"),
        native([7, 8, 9], 3, "ab", finish_reason={"type": "length"}, spec_verify_ct=2),
    )
    assert (answer.output_sha256, answer.hash_of) == (ids_sha256([7, 8, 9]), "ids")
    assert answer.marks == [Mark(1.0, 1), Mark(2.0, 3)]
    assert answer.counts_told
    assert answer.first_has_token
    assert (answer.first_token_s, answer.ttft_s, answer.total_s) == (0.5, 1.5, 3.5)
    assert answer.decode_tokens_per_s == 2 / 2.0  # two tokens after the first event, two seconds to the last
    assert answer.gaps_s() == [0.5, 0.5]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.accept_length) == (5, 3, 1.5)


def test_native_events_with_new_ids_only():
    answer = taken(NativeRecorder(0.0), native([7], 1, "a"), native([8, 9], 3, "bc"), native([6], 4, "d"))
    assert (answer.output_sha256, answer.hash_of) == (ids_sha256([7, 8, 9, 6]), "ids")


@pytest.mark.parametrize("texts", [("a", "ab", "abc"), ("a", "b", "c")])  # so far, or new only
def test_native_events_without_ids_are_hashed_by_text(texts):
    answer = taken(NativeRecorder(0.0), *(native(None, n, text) for n, text in enumerate(texts, 1)))
    assert (answer.output_sha256, answer.hash_of) == (hashlib.sha256(b"abc").hexdigest(), "text")


def test_native_first_event_without_a_token():
    answer = taken(NativeRecorder(0.0), native([], 0), native([7], 1, "a"))
    assert not answer.first_has_token
    assert answer.first_token_s == 2.0


def chunk(content=None, reasoning=None, **more):
    delta = {"content": content, "reasoning_content": reasoning}
    return {"choices": [{"index": 0, "delta": delta}], **more}


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}


def test_chat_counts_from_the_first_reasoning():
    answer = taken(
        OpenAiRecorder(0.0),
        chunk("", role="assistant"),
        chunk(None, "hm"),
        chunk("yes"),
        chunk(None),
        {"choices": [], "usage": USAGE},
    )
    assert answer.ttft_s == 2.0
    assert not answer.first_has_token
    assert not answer.counts_told
    assert answer.marks == [Mark(2.0, 2.0), Mark(3.0, 4.0)]  # four tokens over two events with text
    assert (answer.output_sha256, answer.hash_of) == (hashlib.sha256(b"hmyes").hexdigest(), "text")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 4, 3)


def text(piece, n=None):
    usage = {"usage": {"prompt_tokens": 9, "completion_tokens": n}} if n is not None else {}
    return {"choices": [{"index": 0, "text": piece}], **usage}


def test_completions_with_usage_in_every_event():
    answer = taken(OpenAiRecorder(0.0), text("", 1), text("a", 3), text("b", 4), {"choices": [], "usage": USAGE})
    assert answer.counts_told
    assert answer.first_has_token  # though its text is empty
    assert answer.marks == [Mark(1.0, 1), Mark(2.0, 3), Mark(3.0, 4)]
    assert answer.ttft_s == 2.0


def test_a_null_usage_and_an_empty_list_of_choices_are_no_tokens():  # B12, B13
    end = {"choices": [], "usage": USAGE}
    answer = taken(OpenAiRecorder(0.0), text("a") | {"usage": None}, {"choices": []}, text("b") | {"usage": None}, end)
    assert answer.marks == [Mark(1.0, 2.0), Mark(3.0, 4.0)]
    assert answer.last_event_s == 4.0


@pytest.mark.parametrize(
    ("recorder", "events", "words"),
    [
        (OpenAiRecorder, [text("a")], "does not tell prompt_tokens and completion_tokens"),
        (OpenAiRecorder, [{"choices": [], "usage": USAGE}], "no token"),
        (OpenAiRecorder, [text("a"), {"error": {"message": "stage 3 hangs"}}], "the server failed: stage 3 hangs"),
        (OpenAiRecorder, [{"error": "out of memory"}], "the server failed: out of memory"),
        (NativeRecorder, [{"meta_info": {"finish_reason": {"type": "abort", "message": "by hand"}}}], "by hand"),
    ],
)
def test_answers_that_are_none(recorder, events, words):
    with pytest.raises(LoadError, match=words):
        taken(recorder(0.0), *events)


def test_an_answer_without_text_has_no_time_to_it():
    answer = taken(NativeRecorder(0.0), native([7], 1))
    with pytest.raises(LoadError, match="any text"):
        _ = answer.ttft_s
    assert answer.decode_tokens_per_s is None  # one event


# Windows and spreads


def marks(start_s, step_s, n_tokens, each=1):
    return [Mark(start_s + place * step_s, each * (place + 1)) for place in range(n_tokens // each)]


def test_one_streams_window_is_its_own_decode():
    window = common_window([marks(10.0, 0.5, 9)])
    assert (window.start_s, window.stop_s, window.n_tokens) == (10.0, 14.0, 8)
    assert window.tokens_per_s == 2.0


def test_the_window_leaves_out_who_decodes_alone():
    early = marks(0.0, 0.25, 41)  # until 10: a token each 0.25 s, alone before 4
    late = marks(4.0, 0.5, 33, each=3)  # until 9: three tokens each 0.5 s
    window = common_window([early, late])
    assert (window.start_s, window.stop_s) == (4.0, 9.0)
    assert window.n_tokens == 20 + 30  # none of either's at the moment it starts
    assert window.tokens_per_s == 10.0
    assert window.best_tokens_per_s == pytest.approx(10.0, rel=0.35)


def test_the_best_stretch_is_found_and_is_not_the_rate():
    at_s, stream = 0.0, [Mark(0.0, 1)]
    for n in range(2, 42):
        at_s += 0.1 if 20 <= n < 30 else 1.0
        stream.append(Mark(at_s, n))
    window = common_window([stream])
    assert window.best_tokens_per_s == pytest.approx(10.0)
    assert window.tokens_per_s == pytest.approx(40 / 31)


def test_streams_that_never_decode_together():
    with pytest.raises(LoadError, match="all streams"):
        common_window([marks(0.0, 0.1, 11), marks(1.0, 0.1, 11)])


def test_spreads():
    assert spread([1.0, 2.0, 6.0]) == {"mean": 3.0, "median": 2.0, "min": 1.0, "max": 6.0}
    assert percentiles([float(n) for n in range(101)]) == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([4.0]) == {"mean": 4.0, "p50": 4.0, "p90": 4.0, "p99": 4.0}


def test_the_hash_of_one_answer_is_its_own():
    assert joined_sha256(["ab"]) == "ab"
    assert joined_sha256(["ab", "cd"]) == hashlib.sha256(b"ab\ncd").hexdigest()
