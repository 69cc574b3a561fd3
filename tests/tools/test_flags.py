"""Numbers of flags: what is taken, and what is said of the rest."""

import argparse

import pytest

from rocline.tools.flags import above_0, at_least, positive_int, whole


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (positive_int, "1", 1),
        (whole(1, 65535), "65535", 65535),
        (at_least(0.1), "0.1", 0.1),
        (at_least(0), "0", 0.0),
        (above_0, "1e-9", 1e-9),
    ],
)
def test_what_is_allowed(kind, word, value):
    assert kind(word) == value


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (positive_int, ("0", "-1", "1.5", "many", ""), "must be a whole number of at least 1"),
        (whole(1, 65535), ("0", "65536", "x"), "must be a whole number from 1 to 65535"),
        (at_least(0.1), ("0.09", "inf", "nan", "x"), "must be a number of at least 0.1"),
        (above_0, ("0", "-1", "inf", "nan", "x"), "must be a number above 0"),
    ],
)
def test_what_is_not(kind, words, said):
    for word in words:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            kind(word)
        assert str(refused.value) == f"{word}: {said}"
