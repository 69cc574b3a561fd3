"""The demo checkpoint's tokenizer: the committed file is what the generator makes, and it loses no text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rocline.tools import demo_tokenizer
from rocline.tools.demo_tokenizer import ADDED_SPECIAL, ADDED_VISIBLE, BEGIN, END, PAD, VOCAB_SIZE

MARKERS = (BEGIN, END, PAD, *ADDED_SPECIAL, *ADDED_VISIBLE)
FIRST_ADDED = VOCAB_SIZE - len(ADDED_SPECIAL) - len(ADDED_VISIBLE)
TOKENIZER = demo_tokenizer.load()


def plain_tokenizer() -> Tokenizer:
    """The committed tokenizer that knows no marker: how text from a user is encoded."""
    form = json.loads(demo_tokenizer.tokenizer_json())
    return Tokenizer.from_str(json.dumps(form | {"added_tokens": []}))


PLAIN = plain_tokenizer()
# Any text, with whole markers and halves of them in between.
TEXTS = st.lists(st.text() | st.sampled_from(MARKERS) | st.sampled_from([m[:-1] for m in MARKERS])).map("".join)


@given(TEXTS)
def test_decoding_gives_the_text_back(text):
    for tokenizer in (TOKENIZER, PLAIN):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.binary())
def test_every_byte_has_a_token(data):
    text = data.decode("utf-8", errors="ignore") + data.decode("latin-1")
    assert PLAIN.decode(PLAIN.encode(text).ids, skip_special_tokens=False) == text


@given(TEXTS)
def test_plain_encoding_never_makes_a_marker(text):
    assert all(3 <= token < FIRST_ADDED for token in PLAIN.encode(text).ids)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_is_one_token(marker):
    ids = TOKENIZER.encode(f"a{marker}b").ids
    assert ids == [TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id(marker), TOKENIZER.token_to_id("b")]


@pytest.mark.parametrize("marker", [BEGIN, END, PAD, *ADDED_SPECIAL])
def test_a_special_marker_can_be_encoded_as_text(marker):
    tokenizer = demo_tokenizer.load()
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode(marker).ids == PLAIN.encode(marker).ids


def test_ids_are_in_the_releases_order():
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert [TOKENIZER.token_to_id(marker) for marker in MARKERS] == [0, 1, 2, *range(FIRST_ADDED, VOCAB_SIZE)]
    added = TOKENIZER.get_added_tokens_decoder()
    assert {added[token].content for token in added if not added[token].special} == set(ADDED_VISIBLE)


def test_nothing_is_added_to_a_text():
    assert TOKENIZER.encode("").ids == []
    assert len(TOKENIZER.encode("the").ids) == 1


def test_digits_come_in_groups_of_at_most_three():
    assert max(len(token) for token in TOKENIZER.get_vocab() if token.isdigit()) == 3


def test_training_depends_on_the_text_alone(rng):
    words = ["".join(chr(c) for c in rng.integers(97, 105, rng.integers(1, 6))) for _ in range(2000)]
    texts = [" ".join(words[:1000]), "\n".join(words[1000:])]
    first, second = (demo_tokenizer.train(texts, 500).to_str() for _ in range(2))
    assert first == second
    assert Tokenizer.from_str(first).get_vocab_size() == 500


def test_the_committed_file_has_the_generators_form():
    """What training does not learn is equal; a marker's place follows from the number of merges."""
    made = json.loads(demo_tokenizer.train(["a small text"]).to_str())
    kept = json.loads(demo_tokenizer.tokenizer_json())
    for form in (made, kept):
        del form["model"]["vocab"], form["model"]["merges"]
        for token in form["added_tokens"]:
            del token["id"]
    assert made == kept


def test_retraining_gives_the_committed_file():
    texts = demo_tokenizer.corpus()
    if demo_tokenizer.corpus_sha256(texts) != demo_tokenizer.CORPUS_SHA256:
        pytest.skip(f"demo tokenizer: trained on the library of Python {demo_tokenizer.CORPUS_PYTHON}, not this one")
    assert demo_tokenizer.train(texts).to_str().encode() == demo_tokenizer.tokenizer_json()
