"""Text to ids without control tokens, and ids to text piece by piece, whole characters at a time (case B09)."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rocline.engine.text import Detokenizer, TextTokenizer, TokenizerError

FILE = Path(__file__).parents[1] / "data" / "golden" / "micro" / "model" / "tokenizer.json"
VOCAB = 512
LIBRARY = Tokenizer.from_file(str(FILE))
TOKENIZER = TextTokenizer(FILE.read_bytes(), VOCAB)
MARKERS = {token.content: i for i, token in LIBRARY.get_added_tokens_decoder().items()}
# Base tokens of one byte each: any bytes at all can be written with them.
OF_BYTE = {TOKENIZER.token_bytes(i): i for i in range(VOCAB) if i not in MARKERS.values()}

marked_texts = st.lists(st.text() | st.sampled_from([*MARKERS, "🏳️‍🌈", "한국어", "\r\n", "  "])).map("".join)
# Random bytes are mostly wrong starts; these are mostly unfinished, overlong, surrogate and out of range ones.
awkward_bytes = st.lists(st.sampled_from(b"\xe2\x82\xac\xf0\x9f\x98\x80\xed\xa0\xc0\xff\xf4\x90\xe0\xc2A")).map(bytes)


def edited(**fields):
    return json.dumps(json.loads(FILE.read_bytes()) | fields).encode()


def unflagged():
    """The same tokenizer with markers that are added but not special, as some of the release's are."""
    markers = [token | {"special": False} for token in json.loads(FILE.read_bytes())["added_tokens"]]
    return TextTokenizer(edited(added_tokens=markers), VOCAB)


def pieces_of(ids):
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@settings(deadline=None)
@given(marked_texts)
def test_text_comes_back_and_holds_no_control_token(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not set(ids) & set(MARKERS.values())


@settings(deadline=None)
@given(marked_texts)
def test_text_without_markers_is_encoded_as_by_the_library(text):
    for marker in MARKERS:
        text = text.replace(marker, "")
    if not any(marker in text for marker in MARKERS):  # removing one can join the halves of another
        assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("make", [lambda: TOKENIZER, unflagged])
def test_a_spelled_marker_is_ordinary_text(marker, make):
    assert LIBRARY.encode(marker, add_special_tokens=False).ids == [MARKERS[marker]]
    tokenizer = make()
    ids = tokenizer.encode(f"a{marker}b")
    assert not set(ids) & set(MARKERS.values())
    assert tokenizer.decode(ids) == f"a{marker}b"


def test_nothing_is_added_or_cut():
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<｜begin▁of▁sentence｜>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<｜begin▁of▁sentence｜>": {
                "id": "<｜begin▁of▁sentence｜>",
                "ids": [0],
                "tokens": ["<｜begin▁of▁sentence｜>"],
            }
        },
    }
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = TextTokenizer(edited(post_processor=template, truncation=truncation), VOCAB)
    text = "one, two, three"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1)))
def test_pieces_make_the_text_that_the_library_decodes(ids):
    assert "".join(pieces_of(ids)) == TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)


def test_pieces_of_single_tokens():
    """Every token alone, so that none rests on the random lists above."""
    for token in range(VOCAB):
        assert "".join(pieces_of([token])) == LIBRARY.decode([token], skip_special_tokens=False)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_valid_text_of_single_bytes_comes_as_soon_as_it_can(text):
    """After every byte exactly the finished characters are out, never a U+FFFD of our own."""
    detokenizer, data, out = Detokenizer(TOKENIZER), text.encode(), ""
    for n_bytes in range(1, len(data) + 1):
        out += detokenizer.push(OF_BYTE[data[n_bytes - 1 : n_bytes]])
        assert out == data[:n_bytes].decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


@settings(deadline=None)
@given(awkward_bytes | st.binary())
def test_at_most_three_bytes_wait_whatever_they_are(data):
    detokenizer, out = Detokenizer(TOKENIZER), ""
    for n_bytes in range(1, len(data) + 1):
        out += detokenizer.push(OF_BYTE[data[n_bytes - 1 : n_bytes]])
        assert out in [data[: max(0, n_bytes - n_waiting)].decode("utf-8", "replace") for n_waiting in range(4)]
    assert out + detokenizer.finish() == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀", ""]),
        ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b", ""]),  # at once, and the text goes on
        ([b"\xf0", b"\x9f", b"\xff"], ["", "", "\ufffd\ufffd", ""]),
        ([b"\xed", b"\xa0", b"\x80", b"a"], ["", "", "\ufffd\ufffd\ufffd", "a", ""]),  # half of a UTF-16 pair
        ([b"\xf0", b"\x9f", b" "], ["", "", "\ufffd ", ""]),  # a space ends what it cannot continue
        ([b"\xe2", b"\x82"], ["", "", "\ufffd"]),  # cut off by the end of the output
        ([b"\xef", b"\xbf", b"\xbd"], ["", "", "\ufffd", ""]),  # a U+FFFD that the model wrote
    ],
)
def test_b09_split_and_invalid_characters(tokens, want):
    assert pieces_of([OF_BYTE[token] for token in tokens]) == want


def test_a_marker_after_an_unfinished_character():
    assert pieces_of([OF_BYTE[b"\xe2"], MARKERS["</think>"]]) == ["", "\ufffd</think>", ""]


def test_load(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(FILE.read_bytes())
    assert TextTokenizer.load(tmp_path, VOCAB).encode("x") == TOKENIZER.encode("x")


def holed():
    """Two tokens share an id, so another id has none."""
    model = json.loads(FILE.read_bytes())["model"]
    return edited(model=model | {"vocab": model["vocab"] | {"!": model["vocab"]["#"]}})


@pytest.mark.parametrize(
    ("data", "vocab_size", "message"),
    [
        (None, VOCAB, "No such file"),
        (b"{}", VOCAB, "not a tokenizer file"),
        (b"\xff", VOCAB, "not a tokenizer file"),
        (edited(decoder=None), VOCAB, "only ByteLevel is supported"),
        (FILE.read_bytes(), 600, "512 tokens: the model's vocab_size is 600"),
        (FILE.read_bytes(), 511, "512 tokens: the model's vocab_size is 511"),
        (holed(), VOCAB, "is None: not spelled in byte-level characters"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, data, vocab_size, message):
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: ") as refused:
        TextTokenizer.load(tmp_path, vocab_size)
    assert message in str(refused.value)
