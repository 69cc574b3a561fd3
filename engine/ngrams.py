"""Engram's integer tables: bucket primes, column offsets and hash multipliers (backbone.md section 11.2).

All of it is Python and NumPy integers: multipliers pass 2^53, so no float and no JSON double may touch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # Miller-Rabin, exact below 3.3e24


def is_prime(n: int) -> bool:
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for a in _WITNESSES:
        x = pow(a, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


@dataclass(frozen=True)
class NgramTable:
    """One Engram layer's hash: column order is n-gram size major, head minor.

    primes, offsets  one per column; a column's rows are offset .. offset + prime - 1
    multipliers      one per lookback 0 .. max_ngram - 1
    """

    layer: int
    max_ngram: int
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    multipliers: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return sum(self.primes)


def ngram_tables(
    layers: Sequence[int], max_ngram: int, n_heads: int, bucket_size: int, n_compressed_ids: int
) -> tuple[NgramTable, ...]:
    """The tables of all Engram layers, in the given order, which matters: a prime is handed out once."""
    taken: set[int] = set()
    tables = []
    for layer in layers:
        primes: list[int] = []
        for _ in range(2, max_ngram + 1):
            candidate = bucket_size - 1
            for _ in range(n_heads):
                candidate += 1
                while candidate in taken or not is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                primes.append(candidate)
        offsets = tuple(sum(primes[:column]) for column in range(len(primes)))
        bound = (2**63 - 1) // n_compressed_ids // 2
        draws = np.random.Generator(np.random.PCG64(10007 * layer)).integers(0, bound, size=max_ngram)
        multipliers = tuple(2 * int(draw) + 1 for draw in draws)
        tables.append(NgramTable(layer, max_ngram, tuple(primes), offsets, multipliers))
    return tuple(tables)
