"""Sampling from the kernels: the reference's ids and log-probabilities bit for bit, each row by itself."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.sampling import NOT_FINITE, NOTHING_LEFT, SampleRows, logprobs, sample
from rocline.hip_kernels.sampling_hip import logprobs_hip, sample_hip

VOCAB = 700  # not a multiple of a block, a quad or the workgroup


def f32(values):
    return torch.tensor(values, dtype=torch.float32)


def rows_of(rng, n_rows, n_vocab=VOCAB, lists=(0, 0, 0), **given):
    """SampleRows of n_rows; `given` sets fields for all rows, the rest is off."""
    n_seen, n_bias, n_banned = lists

    def distinct(n):
        ids = rng.permuted(np.tile(np.arange(n_vocab), (n_rows, 1)), axis=1)[:, :n]
        out = torch.from_numpy(ids).int()
        out[torch.from_numpy(rng.random((n_rows, n)) < 0.2)] = -1
        return out

    how = {
        "seed_i64": torch.from_numpy(rng.integers(-(2**63), 2**63, n_rows)),
        "position_i64": torch.from_numpy(rng.integers(0, 2**40, n_rows)),
        "temperature_f32": torch.ones(n_rows),
        "top_k_i32": torch.zeros(n_rows, dtype=torch.int32),
        "top_p_f32": torch.ones(n_rows),
        "min_p_f32": torch.zeros(n_rows),
        "repetition_f32": torch.ones(n_rows),
        "presence_f32": torch.zeros(n_rows),
        "frequency_f32": torch.zeros(n_rows),
        "seen_ids_i32": distinct(n_seen),
        "seen_counts_i32": torch.from_numpy(rng.integers(0, 4, (n_rows, n_seen))).int(),
        "bias_ids_i32": distinct(n_bias),
        "bias_f32": torch.from_numpy(rng.standard_normal((n_rows, n_bias)) * 5).float(),
        "banned_ids_i32": distinct(n_banned),
    }
    for name, value in given.items():
        how[name] = torch.as_tensor(value).expand(n_rows).to(how[name].dtype).contiguous()
    return SampleRows(**how)


def logits_of(rng, n_rows, spread=3.0, n_vocab=VOCAB):
    return torch.from_numpy(rng.standard_normal((n_rows, n_vocab)) * spread).float()


def part(how, rows):
    return SampleRows(*(getattr(how, field.name)[rows] for field in fields(how)))


def chosen(device, logits, how):
    put = device.put
    got = device.full((len(logits),), -9, torch.int32)
    on_device = SampleRows(*(put(getattr(how, field.name)) for field in fields(how)))
    sample_hip(put(logits), on_device, got, device.full(logits.shape, float("nan")))
    return device.get(got)


def wanted(logits, how):
    ids = torch.empty(len(logits), dtype=torch.int32)
    sample(logits, how, ids)
    return ids


CASES = {
    "greedy": {"temperature_f32": 0.0},
    "plain": {},
    "cold": {"temperature_f32": 1e-5},
    "hot": {"temperature_f32": 50.0},
    "top_k": {"top_k_i32": 7},
    "top_k of all": {"top_k_i32": 5000},
    "top_p": {"top_p_f32": 0.9, "temperature_f32": 0.8},
    "top_p of one": {"top_p_f32": 0.0},
    "top_p of nearly all": {"top_p_f32": 0.99999, "temperature_f32": 3.0},
    "min_p": {"min_p_f32": 0.05},
    "all": {"top_k_i32": 60, "top_p_f32": 0.85, "min_p_f32": 0.01, "temperature_f32": 1.3},
}


@pytest.mark.parametrize("name", CASES)
def test_same_ids(device, rng, name):
    logits, how = logits_of(rng, 12), rows_of(rng, 12, **CASES[name])
    assert torch.equal(chosen(device, logits, how), wanted(logits, how))


@pytest.mark.parametrize("name", CASES)
def test_same_ids_among_ties(device, rng, name):
    """Few distinct scores, so that every cut goes through ties; zeros of both signs are one score."""
    logits, how = (logits_of(rng, 8, 1.5)).round(), rows_of(rng, 8, **CASES[name])
    logits[:, ::5] *= -0.0
    assert torch.equal(chosen(device, logits, how), wanted(logits, how))


@pytest.mark.parametrize("n_vocab", [1, 3, 63, 64, 65, 4097, 5000])
def test_same_ids_of_any_vocabulary(device, rng, n_vocab):
    """Past 2,048 and 4,096 ranks top-p looks on; past 4,096 sums have another level."""
    logits = logits_of(rng, 3, 0.01, n_vocab)
    how = rows_of(rng, 3, n_vocab, top_p_f32=f32([0.999, 0.6, 0.3]), top_k_i32=torch.tensor([0, 0, n_vocab // 2 + 1]))
    assert torch.equal(chosen(device, logits, how), wanted(logits, how))


def test_the_release_vocabulary(card, rng):
    logits = torch.cat([logits_of(rng, 8, spread, 129_280) for spread in (0.001, 1.0, 3.0, 10.0)])
    how = rows_of(rng, 32, 129_280, lists=(3000, 20, 5), top_p_f32=torch.linspace(0.2, 1.0, 32), repetition_f32=1.1)
    assert torch.equal(chosen(card, logits, how), wanted(logits, how))
    how = rows_of(rng, 32, 129_280, top_k_i32=torch.arange(32) * 300, temperature_f32=0.7, min_p_f32=0.02)
    assert torch.equal(chosen(card, logits, how), wanted(logits, how))


def test_penalties_bias_and_bans_in_their_order(device, rng):
    logits = logits_of(rng, 9)
    how = rows_of(rng, 9, lists=(300, 200, 100), repetition_f32=1.7, presence_f32=0.3, frequency_f32=0.2, top_p_f32=0.7)
    assert torch.equal(chosen(device, logits, how), wanted(logits, how))
    greedy = rows_of(rng, 9, lists=(300, 0, 600), repetition_f32=0.6, temperature_f32=0.0)
    assert torch.equal(chosen(device, logits, greedy), wanted(logits, greedy))


def test_rows_without_a_token_say_so(device, rng):
    logits = logits_of(rng, 6)
    logits[0, 3], logits[1, 600], logits[2, 0] = float("nan"), float("inf"), -float("inf")
    logits[3, 5] = 3e38
    how = rows_of(rng, 6, lists=(0, 0, VOCAB), temperature_f32=f32([1, 1, 0, 0.5, 1, 1]))
    how.banned_ids_i32[:5] = -1
    how.banned_ids_i32[5] = torch.arange(VOCAB)
    got = chosen(device, logits, how)
    assert got[:4].tolist() == [NOT_FINITE] * 4  # the last: its quotient overflows
    assert got[5] == NOTHING_LEFT
    assert got[4] == wanted(logits[4:5], part(how, slice(4, 5)))[0]


@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16, 17, 33, 64, 65])
def test_rows_are_their_own(device, rng, n_rows):
    logits = logits_of(rng, 65, n_vocab=90)
    how = rows_of(rng, 65, 90, top_p_f32=torch.linspace(0.5, 1.0, 65), top_k_i32=torch.arange(65))
    logits[3, 0] = float("nan")
    rows = slice(65 - n_rows, 65)
    assert torch.equal(chosen(device, logits[rows], part(how, rows)), wanted(logits, how)[rows])


@pytest.mark.parametrize("n_top", [0, 1, 20])
@pytest.mark.parametrize("n_vocab", [5, 64, VOCAB, 4500])
def test_log_probabilities(device, rng, n_vocab, n_top):
    logits, ids = logits_of(rng, 7, 3.0, n_vocab), torch.from_numpy(rng.integers(0, n_vocab, 7)).int()
    logits[1] = logits[1].round()  # ties
    logits[2, 1], ids[3] = float("nan"), -1
    outs = [
        (torch.empty(7), torch.empty((7, n_top), dtype=torch.int32), torch.empty(7, n_top)),
        (device.full((7,), 7.0), device.full((7, n_top), 7, torch.int32), device.full((7, n_top), 7.0)),
    ]
    logprobs(logits, ids, *outs[0])
    logprobs_hip(device.put(logits), device.put(ids), *outs[1])
    for want, got in zip(*outs, strict=True):
        got = device.get(got)
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan], want[~nan])


def test_what_does_not_fit_is_named(rng):
    logits, how = logits_of(rng, 2), rows_of(rng, 2, lists=(3, 0, 0))
    with pytest.raises(BindError, match=r"adjusted_f32 is None, want FP32 \[2, 700\] since how has lists"):
        sample_hip(logits, how, torch.zeros(2, dtype=torch.int32))
    wide = torch.zeros(1, 131_073)
    with pytest.raises(BindError, match="131073 logits a row"):
        sample_hip(wide, rows_of(rng, 1), torch.zeros(1, dtype=torch.int32))
    ids, tops = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3000)
    with pytest.raises(BindError, match="the best 3000 of each row"):
        logprobs_hip(logits, ids, torch.zeros(2), tops.int(), tops)
