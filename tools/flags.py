"""Numbers of a command's flags: a type for argparse each, which says what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number of `least` to `most`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{word}: must be a whole number {limits}")
        return value

    return read


positive_int = whole(1)


def at_least(least: float) -> Callable[[str], float]:
    """A finite number of `least` or more."""

    def read(word: str) -> float:
        if not least <= (value := _number(word)) < math.inf:
            raise argparse.ArgumentTypeError(f"{word}: must be a number of at least {least:g}")
        return value

    return read


def above_0(word: str) -> float:
    """A finite number above 0."""
    if not 0 < (value := _number(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"{word}: must be a number above 0")
    return value


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
