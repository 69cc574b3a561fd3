"""Ids to text: split characters (B09), stop strings (B11), reasoning apart from content (io.md Part 4)."""

from array import array

import pytest

from rocline.engine.text import TextTokenizer
from rocline.http.output import OutputText, Piece, ReasoningSplit, StopMatcher
from rocline.http.prompt import Markers
from rocline.tools.demo_tokenizer import VOCAB_SIZE, tokenizer_json

EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(tokenizer_json(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def markers():
    return Markers(tokenizer_json())


@pytest.fixture
def make(tokenizer, markers):
    def make(*, stops=(), include=False, start=None, stop_ids=(EOS,), skip_special=True):
        return OutputText(
            tokenizer,
            markers,
            stop_ids=frozenset(stop_ids),
            stops=StopMatcher(stops, include),
            start=start,
            skip_special=skip_special,
        )

    return make


def everything(output, ids):
    """All pieces of one token at a time, as {kind: text}."""
    texts = {"reasoning_content": "", "content": ""}
    for token in ids:
        for piece in output.push(array("i", [token]))[0]:
            texts[piece.kind] += piece.text
    for piece in output.finish():
        texts[piece.kind] += piece.text
    return texts


def by_bytes(tokenizer, data):
    """The ids of single bytes: every character of several is split over tokens."""
    of_byte = {tokenizer.token_bytes(token): token for token in range(VOCAB_SIZE)}
    return [of_byte[bytes([byte])] for byte in data]


# Stop strings


def earliest(text, stops):
    """(text before the stop string that ends first, the longest of those, which one), by looking everywhere."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_b11_stop_strings_whatever_the_pieces(rng):
    for _ in range(400):
        stops = ["".join(rng.choice(list("ab"), rng.integers(1, 5))) for _ in range(rng.integers(1, 4))]
        text = "".join(rng.choice(list("abc"), rng.integers(0, 30)))
        want, stop = earliest(text, stops)
        for include in (False, True):
            matcher, got, rest = StopMatcher(stops, include), "", text
            while rest:
                n = int(rng.integers(1, 6))
                got += matcher.push(rest[:n])
                rest = rest[n:]
            got += matcher.finish()
            assert matcher.matched == stop
            assert got == want + (stop or "" if include else "")


def test_b11_no_more_is_held_than_may_still_become_a_stop_string(rng):
    for _ in range(200):
        stops = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(2)]
        matcher, seen, got = StopMatcher(stops), "", ""
        for char in rng.choice(list("ab"), 20):
            seen += char
            got += matcher.push(char)
            if matcher.matched:
                break
            longest = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
            assert seen == got + seen[len(seen) - longest :]


def test_b11_a_long_stop_string_holds_nothing_it_does_not_begin(make, tokenizer):
    output = make(stops=["<|im_end|>" * 50])
    for word in ("step", " by", " step"):
        for token in tokenizer.encode(word):
            assert "".join(p.text for p in output.push(array("i", [token]))[0])


def test_b11_what_was_held_goes_through_the_parser_at_the_end(make, tokenizer, markers):
    think_end = markers.ids["</think>"]
    ids = [*tokenizer.encode("why</think\n"), think_end, *tokenizer.encode("\n\nanswer ST")]
    assert everything(make(stops=["STOP"], start="reasoning"), ids) == {
        "reasoning_content": "why</think",
        "content": "answer ST",
    }


def test_stop_strings_do_not_count_in_reasoning(make, tokenizer, markers):
    ids = [*tokenizer.encode("a STOP b"), markers.ids["</think>"], *tokenizer.encode("c STOP d")]
    output = make(stops=["STOP"], start="reasoning")
    assert everything(output, ids) == {"reasoning_content": "a STOP b", "content": "c "}
    assert output.matched == "STOP"


def test_ids_after_a_stop_string_are_not_used(make, tokenizer):
    ids = array("i", [t for word in ("one", " two", " three", " four") for t in tokenizer.encode(word)])
    output = make(stops=["wo th"])
    pieces, n_used = output.push(ids)
    assert "".join(p.text for p in pieces) == "one t"
    assert "wo th" in tokenizer.decode(ids[:n_used])
    assert "wo th" not in tokenizer.decode(ids[: n_used - 1])
    assert output.push(array("i", [500])) == ([], 1)  # nothing more, whatever comes
    assert output.finish() == []


# Characters


@pytest.mark.parametrize("text", ["漢字かな", "👩‍👩‍👧 x", "e\u0301a", "naïve ✓"])
def test_b09_a_character_over_several_tokens_comes_whole(make, tokenizer, text):
    pieces = []
    output = make()
    for token in by_bytes(tokenizer, text.encode()):
        pieces += [p.text for p in output.push(array("i", [token]))[0]]
    assert pieces == list(text)
    assert output.finish() == []


@pytest.mark.parametrize("data", [b"a\xffb", b"a\xe6\xbcb", b"\xf0\x9f\x98", b"\xe6\xbc \xe6\xbc\xa2", b"a\x80\x80b"])
@pytest.mark.parametrize("start", [None, "content", "reasoning"])
def test_b09_invalid_bytes_are_shown_and_hold_nothing_up(make, tokenizer, data, start):
    texts = everything(make(start=start), by_bytes(tokenizer, data))
    assert "".join(texts.values()) == data.decode("utf-8", "replace")


def test_b09_half_a_character_before_a_marker(make, tokenizer, markers):
    ids = [*by_bytes(tokenizer, "漢".encode()[:2]), markers.ids["</think>"], *tokenizer.encode("b"), EOS]
    assert everything(make(start="reasoning"), ids) == {"reasoning_content": "\ufffd", "content": "b"}


# Reasoning and markers


def test_only_the_marker_itself_ends_reasoning(make, tokenizer, markers):
    ids = [*tokenizer.encode("say </think> to end"), markers.ids["</think>"], *tokenizer.encode("a </think> b")]
    assert everything(make(start="reasoning"), ids) == {
        "reasoning_content": "say </think> to end",
        "content": "a </think> b",
    }


def test_newlines_around_the_marker_are_not_text(make, tokenizer, markers):
    ids = [*tokenizer.encode("\n\nhm\n\nso\n\n"), markers.ids["</think>"], *tokenizer.encode("\n\nyes\n\nno\n")]
    assert everything(make(start="reasoning"), ids) == {"reasoning_content": "hm\n\nso", "content": "yes\n\nno\n"}


def test_a_prefix_keeps_its_newlines(make, tokenizer, markers):
    ids = [*tokenizer.encode("\n\nmore"), markers.ids["</think>"], *tokenizer.encode("yes")]
    assert everything(make(start="reasoning_goes_on"), ids) == {"reasoning_content": "\n\nmore", "content": "yes"}
    assert everything(make(start="content_goes_on"), tokenizer.encode("\n\nmore"))["content"] == "\n\nmore"


def test_reasoning_without_an_end(make, tokenizer):
    assert everything(make(start="reasoning"), tokenizer.encode("on and on\n")) == {
        "reasoning_content": "on and on\n",
        "content": "",
    }


def test_a_stray_marker_in_content_is_swallowed(make, tokenizer, markers):
    ids = [*tokenizer.encode("a"), markers.ids["</think>"], *tokenizer.encode("b")]
    assert everything(make(start="content"), ids)["content"] == "ab"


def test_newlines_alone_are_held_not_the_text_before_them():
    split = ReasoningSplit("reasoning")
    assert split.push("so\n\n") == [Piece("reasoning_content", "so")]
    assert split.push("x") == [Piece("reasoning_content", "\n\n"), Piece("reasoning_content", "x")]


def test_reasoning_tokens_are_counted_by_id(make, tokenizer, markers):
    reasoning = tokenizer.encode("let me think")
    output = make(start="reasoning")
    everything(output, [*reasoning, markers.ids["</think>"], *tokenizer.encode("yes"), EOS])
    assert output.n_reasoning == len(reasoning)


def test_special_tokens_are_skipped_unless_wanted_and_visible_ones_never(make, tokenizer, markers):
    ids = [*tokenizer.encode("a"), markers.ids["<｜User｜>"], markers.ids["<｜ref｜>"], *tokenizer.encode("b"), EOS]
    assert everything(make(), ids)["content"] == "a<｜ref｜>b"
    assert everything(make(skip_special=False), ids)["content"] == "a<｜User｜><｜ref｜>b"
    ignoring_eos = make(skip_special=False, stop_ids=())
    assert everything(ignoring_eos, ids)["content"] == "a<｜User｜><｜ref｜>b<｜end▁of▁sentence｜>"


def test_a_stop_token_writes_nothing(make, tokenizer):
    (word,) = tokenizer.encode(" the")
    assert everything(make(stop_ids=(EOS, word)), [*tokenizer.encode("a"), word])["content"] == "a"
