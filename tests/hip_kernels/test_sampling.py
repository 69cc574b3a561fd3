"""The sampler against a scalar oracle in plain Python (FP64 weights and noise), its edges, and row isolation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocline.hip_kernels import sampling
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.philox import PURPOSE_TOKEN, gumbel_of_words, gumbel_ref, philox4x32_10
from rocline.hip_kernels.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    SampleRows,
    kept_ref,
    logprobs,
    prefix_ref,
    sample,
    sum_ref,
    top_p_ref,
)

F32 = np.float32
BLOCK = 64  # terms of a sum; part of the answer, so not the product's own constant
NEUTRAL = {
    "seed": 1,
    "position": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "seen": {},  # id: occurrences in the output
    "bias": {},  # id: bias
    "banned": (),
}


def pack(rows):
    """SampleRows of dictionaries that name what differs from NEUTRAL."""
    rows = [NEUTRAL | row for row in rows]

    def column(name, dtype):
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    def table(lists, dtype):
        width = max(len(items) for items in lists)
        return torch.tensor([[*items, *[-1] * (width - len(items))] for items in lists], dtype=dtype)

    return SampleRows(
        *(column(name, torch.int64) for name in ("seed", "position")),
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        *(column(name, torch.float32) for name in ("top_p", "min_p", "repetition", "presence", "frequency")),
        table([list(row["seen"].keys()) for row in rows], torch.int32),
        table([list(row["seen"].values()) for row in rows], torch.int32),
        table([list(row["bias"].keys()) for row in rows], torch.int32),
        table([list(row["bias"].values()) for row in rows], torch.float32),
        table([list(row["banned"]) for row in rows], torch.int32),
    )


def draw(logits, rows):
    ids = torch.full((len(rows),), -99, dtype=torch.int32)  # unwritten shows
    sample(torch.as_tensor(logits, dtype=torch.float32), pack(rows), ids)
    return ids.tolist()


def kept(scores, **row):
    mask = kept_ref(torch.tensor(scores, dtype=torch.float32), pack([row]).row(0))
    return mask.nonzero()[:, 0].tolist()


# The oracle: one row, one token at a time.


def oracle_scores(logits, row):
    """FP32 scores after penalties, bias, bans and temperature."""
    scores = [F32(x) for x in logits]
    for token, count in row["seen"].items():
        penalty = F32(row["repetition"])
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        if count:
            scores[token] = scores[token] - F32(row["presence"])
            scores[token] = scores[token] - F32(row["frequency"]) * F32(count)
    for token, bias in row["bias"].items():
        scores[token] = scores[token] + F32(bias)
    for token in row["banned"]:
        scores[token] = F32(-np.inf)
    return [x / F32(row["temperature"]) for x in scores] if row["temperature"] else scores


def oracle_kept(scores, row):
    """Ids that stay, best first, and the smallest distance of a decision from its limit."""
    order = sorted((token for token in range(len(scores)) if scores[token] > -np.inf), key=lambda t: (-scores[t], t))
    if row["top_k"]:
        order = order[: row["top_k"]]
    best = float(scores[order[0]])
    weights = {token: math.exp(float(scores[token]) - best) for token in order}
    total, distance = math.fsum(weights.values()), 1.0
    if F32(row["top_p"]) < 1:
        stay, before, limit = [], 0.0, float(F32(row["top_p"])) * total
        for token in order:
            if before:
                distance = min(distance, abs(before - limit) / total)
            if before >= limit:
                break
            stay.append(token)
            before += weights[token]
        order = stay
    min_p = float(F32(row["min_p"]))
    if min_p:
        distance = min([distance, *(abs(weights[token] - min_p) for token in order if weights[token] != min_p)])
    return [token for token in order if weights[token] >= min_p], distance


def oracle(logits, row):
    """The id, and the smallest margin of any of its decisions."""
    row = NEUTRAL | row
    scores = oracle_scores(logits, row)
    if row["temperature"] == 0:
        return max(range(len(scores)), key=lambda token: (scores[token], -token)), 1.0
    order, distance = oracle_kept(scores, row)
    words = gumbel_ref(row["seed"], row["position"], torch.arange((len(scores) + 3) // 4)).flatten().double()
    noisy = sorted(((float(scores[token]) + float(words[token]), token) for token in order), reverse=True)
    if len(noisy) > 1:
        distance = min(distance, noisy[0][0] - noisy[1][0])
    return noisy[0][1], distance


def random_row(rng, n_vocab):
    """Parameters with every stage on about half of the time."""
    row = {"seed": int(rng.integers(2**63)), "position": int(rng.integers(2**20))}
    tokens = rng.permutation(n_vocab).tolist()
    choices = {
        "temperature": [0.0, 0.01, 0.7, 1.3],
        "top_k": [1, 2, n_vocab // 2 + 1, n_vocab, n_vocab + 5],
        "top_p": [1e-6, 0.3, 0.9, 0.999],
        "min_p": [0.01, 0.2, 1.0],
        "repetition": [0.5, 1.2],
        "presence": [-1.0, 0.7],
        "frequency": [-0.3, 0.2],
        "seen": [{token: int(rng.integers(4)) for token in tokens[: n_vocab // 2]}],
        "bias": [{token: float(rng.normal()) for token in tokens[-3:]}],
        "banned": [tokens[: n_vocab // 3]],
    }
    for name, values in choices.items():
        if rng.random() < 0.5:
            row[name] = values[rng.integers(len(values))]
    return row


@pytest.mark.parametrize("n_vocab", [1, 2, 5, 64, 301])
def test_same_ids_as_oracle(rng, n_vocab):
    rows = [random_row(rng, n_vocab) for _ in range(100)]
    # Every other row has few distinct logits: ties at every cut.
    logits = rng.normal(size=(len(rows), n_vocab)) * 3
    logits[::2] = np.round(logits[::2] / 2) * 2
    logits = logits.astype(F32)
    n_sure = 0
    for got, row, row_logits in zip(draw(logits, rows), rows, logits, strict=True):
        want, margin = oracle(row_logits, row)
        if margin > 1e-5:  # FP32 sums of weights below 1, and the rounding of score + noise below 100
            n_sure += 1
            assert got == want, (row, row_logits)
    assert n_sure >= 90


@pytest.mark.parametrize(
    ("row", "temperature_of_answer"),
    [
        ({}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"temperature": 1.5, "top_k": 4}, 1.5),
        ({"top_p": 0.8}, 1.0),
        ({"min_p": 0.2}, 1.0),
    ],
)
def test_distribution_is_the_softmax_of_what_is_kept(row, temperature_of_answer):
    logits = np.log([0.28, 0.06, 0.15, 0.05, 0.2, 0.1, 0.16]).astype(F32)
    n_draws = 500  # a fixed case: its chi-square is one number
    ids = draw(np.tile(logits, (n_draws, 1)), [row | {"seed": 20260131, "position": p} for p in range(n_draws)])
    stay, _ = oracle_kept(oracle_scores(logits, NEUTRAL | row), NEUTRAL | row)
    weights = np.exp(logits[stay].astype(np.float64) / temperature_of_answer)
    assert_chi_square(np.bincount(ids, minlength=len(logits)), stay, n_draws * weights / weights.sum())


def test_noise_over_many_positions_gives_the_softmax():
    logits = torch.tensor(np.random.default_rng(5).normal(size=16) * 2, dtype=torch.float32)
    n_draws = 100_000
    counter = torch.arange(n_draws)[:, None], torch.arange(4), torch.tensor(PURPOSE_TOKEN), torch.tensor(0)
    noise = gumbel_of_words(torch.stack(philox4x32_10(counter, (99, 0)), 2)).flatten(1)
    assert torch.equal(noise[77], gumbel_ref(99, 77, torch.arange(4)).flatten())
    counts = np.bincount((logits + noise).argmax(1).numpy(), minlength=16)
    assert_chi_square(counts, list(range(16)), n_draws * torch.softmax(logits.double(), 0).numpy())


def assert_chi_square(counts, ids, expected):
    assert counts.sum() == counts[ids].sum()  # nothing dropped was drawn
    assert expected.min() > 5  # where chi-square's own approximation holds
    degrees = len(ids) - 1
    chi_square = ((counts[ids] - expected) ** 2 / expected).sum()
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_ties_go_to_the_lower_id():
    logits = [[0.0, 2.0, -1.0, 2.0], [-0.0, 0.0, -0.0, -3.0]]
    assert draw(logits, [{"temperature": 0}] * 2) == [1, 0]
    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2]
    assert kept([-0.0, 0.0, -1.0], top_k=1) == [0]
    assert kept([-0.0, 0.0, -1.0], top_p=0.3) == [0]


def test_top_k_edges():
    scores = [0.5, -1.0, 3.0, 2.0]
    assert kept(scores, top_k=1) == [2]
    assert kept(scores, top_k=4) == kept(scores, top_k=5) == kept(scores, top_k=2**31 - 1) == [0, 1, 2, 3]
    assert kept([1.0, -math.inf, 0.0], top_k=3) == [0, 2]
    assert set(draw([scores] * 50, [{"top_k": 1, "temperature": 9.0, "seed": s} for s in range(50)])) == {2}


def test_top_p_edges():
    equal = [0.0, 0.0, 0.0, 0.0]  # weights 1 1 1 1
    assert kept(equal, top_p=0.5) == [0, 1]  # the sum before id 2 is the limit, not below it
    assert kept(equal, top_p=float(np.nextafter(F32(0.5), F32(1)))) == [0, 1, 2]
    assert kept(equal, top_p=1e-45) == kept(equal, top_p=0.0) == [0]  # what rounds to 0 in FP32 keeps the best
    far = [-200.0, 1.0, 0.0]  # weight 0, and still a token
    assert kept(far, top_p=1.0) == [0, 1, 2]
    assert kept(far, top_p=0.99999994) == [1, 2]


def test_top_p_shares_out_what_top_k_left():
    scores = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(scores, top_p=0.65) == [0, 1]
    assert kept(scores, top_p=0.55, top_k=2) == [0]  # 0.4 of 0.7 is 0.57


def test_min_p_edges():
    scores = [0.0, math.log(0.25), math.log(0.24), 0.0]
    assert kept(scores, min_p=0.245) == [0, 1, 3]
    assert kept(scores, min_p=1.0) == [0, 3]
    assert kept([0.0, -1000.0], min_p=0.0) == [0, 1]
    assert kept([0.0, -1000.0], min_p=1e-30) == [0]
    assert kept(scores, min_p=0.1, top_p=0.3) == [0]  # of 2.49, 0.75 is reached by id 0 alone


@pytest.mark.parametrize("n_vocab", [1024, 1025, 5000])
@pytest.mark.parametrize("top_p", [0.001, 0.2, 0.5, 0.99, 0.9999999])
def test_ranks_looked_at_first_do_not_matter(rng, monkeypatch, n_vocab, top_p):
    scores = torch.tensor(np.round(rng.normal(size=n_vocab), 1), dtype=torch.float32)
    weights = torch.rand(n_vocab, generator=torch.Generator().manual_seed(int(rng.integers(2**31))))
    masks = []
    for n_ranks in (BLOCK, 1024, 65_536):
        monkeypatch.setattr(sampling, "_FIRST_RANKS", n_ranks)
        masks.append(top_p_ref(scores, weights, torch.tensor(top_p)))
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[2])
    order = sorted(range(n_vocab), key=lambda token: (-float(scores[token]), token))
    before = prefix_in_scalars([F32(weights[token]) for token in order])
    limit = F32(top_p) * F32(sum_in_scalars(weights.numpy()))
    want = [token for token, sum_before in zip(order, before, strict=True) if sum_before < limit]
    assert masks[2].nonzero()[:, 0].tolist() == sorted(want)


def sum_in_scalars(terms):
    while True:
        blocks = [terms[start : start + BLOCK] for start in range(0, len(terms), BLOCK)]
        sums = []
        for block in blocks:
            total = F32(0)
            for term in block:
                total = F32(total + term)
            sums.append(total)
        if len(sums) == 1:
            return sums[0]
        terms = sums


def prefix_in_scalars(terms):
    sums, whole_blocks, inside = [], F32(0), F32(0)
    for place, term in enumerate(terms):
        if place % BLOCK == 0:
            whole_blocks, inside = F32(whole_blocks + inside), F32(0)
        sums.append(F32(whole_blocks + inside))
        inside = F32(inside + term)
    return sums


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 4096, 4097, 5003])
def test_sums_have_the_stated_order(rng, n):
    terms = np.exp(rng.normal(size=n) * 5).astype(F32)
    assert sum_ref(torch.from_numpy(terms)).item() == sum_in_scalars(terms)
    prefix = prefix_ref(torch.from_numpy(terms)).numpy()
    assert prefix.tolist() == prefix_in_scalars(terms)
    assert (np.diff(prefix) >= 0).all()


def test_adjustments_by_hand():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 4.0, -0.5])
    row = {
        "seen": {0: 0, 1: 3, 2: 1, 5: 0},
        "repetition": 2.0,
        "presence": 0.5,
        "frequency": 0.25,
        "bias": {1: 10.0, 4: -1.0},
        "banned": [3],
    }
    adjusted = sampling.adjust_ref(logits, pack([row]).row(0))
    assert adjusted.tolist() == [1.0, -4 - 0.5 - 0.75 + 10, 0.5 - 0.5 - 0.25, -math.inf, 3.0, -1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5, 4.0, -0.5]


def test_rows_without_an_answer():
    good = [0.0, 3.0, 1.0]
    logits = [[math.nan, 0.0, 0.0], good, [0.0, math.inf, 0.0], [0.0, -math.inf, 0.0], good, good, [3e38, 0.0, 0.0]]
    rows = [{"temperature": 0.0}] * 4 + [{"banned": [2, 0, 1]}, {"banned": [2, 0, 1], "temperature": 0.0}]
    rows.append({"temperature": 0.01})  # the division overflows
    assert draw(logits, rows) == [NOT_FINITE, 1, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, NOTHING_LEFT, NOT_FINITE]


def test_seeds_and_positions_differ():
    flat = [[0.0] * 1000]
    cases = [(seed, position) for seed in (0, 1, 2**32, 2**63 - 1, -1) for position in (0, 1, 1_048_575, 2**32)]
    ids = draw(flat * len(cases), [{"seed": seed, "position": position} for seed, position in cases])
    assert len(set(ids)) > len(cases) - 3  # of 20 draws from 1,000, three equal by chance is rare; these are fixed
    assert ids == draw(flat * len(cases), [{"seed": seed, "position": position} for seed, position in cases])


POOL_VOCAB = 37


def make_pool():
    rng = np.random.default_rng(12)
    logits = (rng.normal(size=(24, POOL_VOCAB)) * 2).astype(F32)
    logits[3, 5], logits[9, 0] = np.nan, np.inf
    return logits, [random_row(rng, POOL_VOCAB) for _ in range(len(logits))]


POOL_LOGITS, POOL_ROWS = make_pool()
ALONE = [draw(POOL_LOGITS[i : i + 1], [POOL_ROWS[i]])[0] for i in range(len(POOL_ROWS))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(POOL_ROWS) - 1), min_size=1, max_size=70))
def test_a_row_does_not_know_its_batch(members):
    assert draw(POOL_LOGITS[members], [POOL_ROWS[i] for i in members]) == [ALONE[i] for i in members]


def test_release_vocabulary(rng):
    """129,280 tokens: the last id can be chosen, and so can one in each place of a quad."""
    logits = (rng.normal(size=(5, 129_280)) * 2).astype(F32)
    for row, token in enumerate((129_279, 129_278, 129_277, 129_276, 0)):
        logits[row, token] = 60.0
    rows = [{"top_p": 0.95}, {}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0.0}]
    assert draw(logits, rows) == [129_279, 129_278, 129_277, 129_276, 0]


def test_bind_errors():
    how, ids = pack([{}, {}]), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BindError, match=r"sample: seed_i64 is \[2\], want \[R=3\] from logits_f32"):
        sample(torch.zeros(3, 8), how, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(BindError, match="sample: ids_i32 has dtype"):
        sample(torch.zeros(2, 8), how, ids.long())


def logprobs_of(logits, chosen, n_top):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    outs = torch.zeros(len(logits)), torch.zeros(len(logits), n_top, dtype=torch.int32), torch.zeros(len(logits), n_top)
    logprobs(logits, torch.tensor(chosen, dtype=torch.int32), *outs)
    return outs


def test_logprobs_are_the_log_softmax(rng):
    logits = (rng.normal(size=(5, 777)) * 4).astype(F32)
    chosen = rng.integers(0, 777, 5)
    chosen_f32, top_ids, top_f32 = logprobs_of(logits, chosen, 20)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    want_ids = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    assert np.array_equal(top_ids.numpy(), want_ids)
    # x - max and the result are below 64, each half an ulp of 2^-18; the sum's relative error stays below 2^-18.
    tolerance = {"rtol": 0, "atol": 2**-17}
    np.testing.assert_allclose(chosen_f32.numpy(), exact[np.arange(5), chosen], **tolerance)
    np.testing.assert_allclose(top_f32.numpy(), np.take_along_axis(exact, want_ids, 1), **tolerance)
    for row in range(5):  # the same bits alone
        alone = logprobs_of(logits[row : row + 1], chosen[row : row + 1], 20)
        assert torch.equal(alone[0], chosen_f32[row : row + 1])
        assert torch.equal(alone[2], top_f32[row : row + 1])


def test_logprobs_edges():
    chosen_f32, top_ids, top_f32 = logprobs_of([[1.0, 1.0], [math.nan, 0.0], [0.0, 300.0]], [1, 0, -1], 3)
    assert top_ids.tolist() == [[0, 1, -1], [-1, -1, -1], [1, 0, -1]]
    assert chosen_f32[0].item() == top_f32[0, 1].item() == pytest.approx(-math.log(2), rel=2**-22)
    assert top_f32[2, :2].tolist() == [0.0, -300.0]
    assert chosen_f32.isnan().tolist() == [False, True, True]
    assert top_f32.isnan().tolist() == [[False, False, True], [True, True, True], [False, False, True]]
    assert logprobs_of([[1.0, 1.0]], [1], 0)[1].shape == (1, 0)
