"""Philox4x32-10 against Random123's known answers and plain integers; the noise against FP64 for every uniform."""

import hashlib

import numpy as np
import pytest
import torch

from rocline.hip_kernels.explog import EXP_FLOOR, exp_f32, log_f32
from rocline.hip_kernels.philox import PURPOSE_TOKEN, gumbel_of_words, gumbel_ref, philox4x32_10

ULP = 2.0**-23  # of an FP32 in [1, 2)


def philox_in_integers(counter, key):
    c, k = list(counter), list(key)
    for step in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        key0 = (k[0] + step * 0x9E3779B9) % 2**32
        key1 = (k[1] + step * 0xBB67AE85) % 2**32
        c = [high1 ^ c[1] ^ key0, low1, high0 ^ c[3] ^ key1, low0]
    return c


def philox(counter, key):
    return [int(word) for word in philox4x32_10(tuple(torch.tensor(word) for word in counter), key)]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, answer):
    assert [f"{word:08x}" for word in philox(counter, key)] == answer.split()
    assert philox_in_integers(counter, key) == philox(counter, key)


def test_any_counter_and_broadcasting(rng):
    counters = torch.from_numpy(rng.integers(0, 2**32, (50, 4)))
    key = tuple(int(word) for word in rng.integers(0, 2**32, 2))
    together = torch.stack(philox4x32_10(tuple(counters.T), key), 1)
    assert together.tolist() == [philox_in_integers(counter, key) for counter in counters.tolist()]


def test_every_uniform_has_finite_noise_close_to_fp64():
    chunk = 2**20
    for start in range(0, 2**24, chunk):
        high_bits = np.arange(start, start + chunk)
        u = (high_bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-24)
        exact = -np.log(-np.log(np.minimum(u, np.float32(1 - 2**-24)).astype(np.float64)))
        noise = gumbel_of_words(torch.from_numpy(high_bits << 8 | 0xFF)).numpy()  # the low 8 bits do not count
        assert np.isfinite(noise).all()
        # log_f32 twice: a relative error inside is an absolute one outside.
        assert np.max(np.abs(noise - exact) / np.maximum(np.abs(exact), 1)) < 3 * ULP


def test_noise_counter_key_and_lane(rng):
    seed, position = int(rng.integers(-(2**63), 2**63 - 1)), int(rng.integers(0, 2**40))
    quads = torch.tensor([0, 7, 32_319])
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = [
        philox_in_integers((position % 2**32, quad, PURPOSE_TOKEN, position // 2**32), key) for quad in quads.tolist()
    ]
    assert torch.equal(gumbel_ref(seed, position, quads), gumbel_of_words(torch.tensor(words)))


def test_bits_are_pinned():
    """Every device and build has these bits: a new value here is a new answer to every seeded request."""
    weights = exp_f32(torch.arange(-86 * 1024, 1) / 1024)
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    assert digest == "904980a915cc668a88bdb80d3cfb20360cb3c01273c309084b2ef3f0787f767f"
    noise = gumbel_ref(0x0123456789ABCDEF, 1_048_575, torch.arange(32_320))
    assert noise.shape == (32_320, 4)
    digest = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
    assert digest == "0d3b6f4a7d61857eb6ef28335cdae05a37802c4e98e9928e10dd8e6813888a02"


def test_noise_differs_by_seed_position_and_id():
    quads = torch.arange(64)
    base = gumbel_ref(1, 5, quads)
    assert base.unique().numel() == base.numel()
    for seed, position in ((2, 5), (1 + 2**32, 5), (1 + 2**62, 5), (1, 6), (1, 5 + 2**32)):
        assert (gumbel_ref(seed, position, quads) != base).all()


def test_log_and_exp_are_within_three_ulps_of_fp64(rng):
    x = np.exp(rng.uniform(-87, 88, 100_000)).astype(np.float32)
    x = np.concatenate([x, rng.uniform(0.5, 2, 100_000).astype(np.float32)])
    exact = np.log(x.astype(np.float64))
    assert (
        np.max(np.abs(log_f32(torch.from_numpy(x)).numpy() - exact) / np.spacing(np.abs(exact.astype(np.float32)))) < 3
    )
    x = rng.uniform(EXP_FLOOR, 0, 200_000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(exp_f32(torch.from_numpy(x)).numpy() - exact) / np.spacing(exact.astype(np.float32))) < 3


def test_log_and_exp_at_their_edges():
    assert log_f32(torch.tensor([1.0])).item() == 0.0
    below = np.nextafter(np.float32(EXP_FLOOR), np.float32(-np.inf))
    edges = exp_f32(torch.tensor([0.0, -0.0, EXP_FLOOR, below, -1e30, -np.inf]))
    assert edges.tolist() == [1.0, 1.0, edges[2].item(), 0.0, 0.0, 0.0]
    assert edges[2] >= torch.finfo(torch.float32).tiny
