"""A request's sampling parameters: what is refused and how, and the rows a request and its drafts pack into."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rocline.engine.sampling import INT32_MAX, SEED_MAX, SamplerState, SamplingError, SamplingParams, pack_rows
from rocline.hip_kernels.sampling import sample

EOS, VOCAB = 1, 50


def state(prompt_ids=(7, 8, 9), **params):
    return SamplerState(SamplingParams(**params), prompt_ids, [EOS], VOCAB)


def row_lists(how, row):
    """{seen id: count}, {bias id: bias}, set of banned ids of one packed row."""
    how = how.row(row)
    seen = dict(zip(how.seen_ids_i32.tolist(), how.seen_counts_i32.tolist(), strict=True))
    bias = dict(zip(how.bias_ids_i32.tolist(), how.bias_f32.tolist(), strict=True))
    return (
        {token: count for token, count in seen.items() if token >= 0},
        {token: value for token, value in bias.items() if token >= 0},
        set(how.banned_ids_i32.tolist()) - {-1},
    )


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", math.inf, "from 0 to 100"),
        ("top_k", -2, f"from -1 to {INT32_MAX}"),
        ("top_k", 2**31, f"from -1 to {INT32_MAX}"),
        ("top_p", 0.0, "above 0, and 1 at most"),
        ("top_p", 1.01, "above 0, and 1 at most"),
        ("top_p", math.nan, "above 0, and 1 at most"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("repetition_penalty", math.inf, "from 0.01 to 100"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("max_tokens", 0, f"from 1 to {INT32_MAX}"),
        ("min_tokens", -1, "from 0 to 8192"),
        ("min_tokens", 8193, "from 0 to 8192"),
        ("seed", -1, f"from 0 to {SEED_MAX}, or absent"),
        ("seed", 2**63, f"from 0 to {SEED_MAX}, or absent"),
    ],
)
def test_refusals_name_field_value_and_range(field, value, allowed):
    with pytest.raises(SamplingError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == f"{field} = {value}: must be {allowed}"


def test_refused_bias_and_token_ids():
    with pytest.raises(SamplingError, match=r"logit_bias\[3\] = 101: must be from -100 to 100"):
        SamplingParams(logit_bias={2: 100, 3: 101})
    for params in ({"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": (0, VOCAB)}):
        (field,) = params
        with pytest.raises(SamplingError, match=f"token id in {field} = {VOCAB}: must be from 0 to {VOCAB - 1}"):
            state(**params)
    with pytest.raises(SamplingError, match="token id in stop_token_ids = -1"):
        state(stop_token_ids=(-1,))


def test_ends_of_the_ranges_are_allowed_and_params_are_frozen():
    for params in (
        {"temperature": 0, "top_k": 0, "top_p": 5e-324, "min_p": 0, "repetition_penalty": 0.01, "max_tokens": 1},
        {"temperature": 100, "top_k": INT32_MAX, "top_p": 1, "min_p": 1, "repetition_penalty": 100, "seed": SEED_MAX},
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: -100, VOCAB - 1: 100}, "seed": 0},
        {"min_tokens": 5, "max_tokens": 5, "stop_token_ids": (0, VOCAB - 1)},
    ):
        pack_rows([(state(**params), ())])
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 3


def test_seed_is_the_clients_or_drawn_once_and_told():
    assert state(seed=0).seed == 0
    seeds = {state().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed <= SEED_MAX for seed in seeds)
    drawn = state()
    first = pack_rows([(drawn, ())]).seed_i64.tolist()
    drawn.commit([4])
    assert pack_rows([(drawn, ())]).seed_i64.tolist() == first == [drawn.seed]


def test_plain_values_reach_the_operator():
    requests = [
        state(seed=SEED_MAX, temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, presence_penalty=0.5),
        state([3], seed=1, temperature=0, top_k=5, repetition_penalty=1.5, frequency_penalty=-0.5),
        state([], seed=2, temperature=1e-50),
    ]
    how = pack_rows((request, ()) for request in requests)
    assert how.seed_i64.tolist() == [SEED_MAX, 1, 2]
    assert how.position_i64.tolist() == [3, 1, 0]
    assert how.temperature_f32.tolist() == np.float32([0.7, 0, 1e-5]).tolist()  # 1e-50 would round to arg-max
    assert how.top_k_i32.tolist() == [0, 5, 0]
    assert how.top_p_f32.tolist() == np.float32([0.9, 1, 1]).tolist()
    assert how.min_p_f32.tolist() == np.float32([0.1, 0, 0]).tolist()
    assert how.repetition_f32.tolist() == [1.0, 1.5, 1.0]
    assert how.presence_f32.tolist() == [0.5, 0.0, 0.0]
    assert how.frequency_f32.tolist() == [0.0, -0.5, 0.0]


def test_what_counts_for_penalties():
    prompt, output = (7, 8, 7), [8, 5, 5]
    cases = {
        "repetition_penalty": (1.1, {7: 0, 8: 1, 5: 2}),  # the prompt's tokens too
        "presence_penalty": (0.1, {8: 1, 5: 2}),
        "frequency_penalty": (0.1, {8: 1, 5: 2}),
        "temperature": (0.5, {}),  # without penalties nothing is kept
    }
    for field, (value, want) in cases.items():
        request = state(prompt, **{field: value})
        request.commit(output[:1])
        request.commit(output[1:])
        assert row_lists(pack_rows([(request, ())]), 0)[0] == want, field
        assert request.n_committed == 3


def test_stop_ids_are_banned_until_min_tokens():
    request = state(min_tokens=2, stop_token_ids=(20, EOS, 21))
    assert request.stop_ids == {EOS, 20, 21}
    how = pack_rows([(request, [3, 4])])  # choices 0, 1 and 2 of the output
    assert [row_lists(how, row)[2] for row in range(3)] == [{EOS, 20, 21}, {EOS, 20, 21}, set()]
    request.commit([3, 4])
    assert pack_rows([(request, ())]).banned_ids_i32.shape == (1, 0)


def test_ignored_end_token_is_a_token_like_any_other():
    request = state(min_tokens=2, stop_token_ids=(20,), ignore_eos=True)
    assert request.stop_ids == {20}
    assert row_lists(pack_rows([(request, ())]), 0)[2] == {20}
    assert state(ignore_eos=True, stop_token_ids=(EOS,)).stop_ids == {EOS}  # the client's own word


def test_rows_after_drafts_are_the_rows_after_committing_them():
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 6, "logit_bias": {4: 1.5}, "seed": 9}
    drafts = [7, 30, 30, EOS]
    drafted, committed = state(**params), state(**params)
    drafted.commit([11, 7])
    committed.commit([11, 7])
    together = pack_rows([(state(logit_bias={1: 2, 2: 3}, seed=1), ()), (drafted, drafts)])
    for n_drafts in range(len(drafts) + 1):
        committed_row = pack_rows([(committed, ())])
        assert row_lists(together, 1 + n_drafts) == row_lists(committed_row, 0)
        assert together.position_i64[1 + n_drafts] == committed_row.position_i64[0] == 3 + 2 + n_drafts
        committed.commit(drafts[n_drafts : n_drafts + 1])
    assert row_lists(together, 0) == ({}, {1: 2.0, 2: 3.0}, set())
    assert row_lists(pack_rows([(drafted, ())]), 0)[0] == {7: 1, 8: 0, 9: 0, 11: 1}  # drafts left no trace


def test_verifying_drafts_chooses_the_tokens_of_plain_decoding(rng):
    """Row by row the same ids whether tokens come alone or as drafts in a batch with another request."""
    params = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.1, "min_tokens": 3}
    seed = int(rng.integers(SEED_MAX))
    logits = torch.from_numpy(rng.normal(size=(6, VOCAB)).astype(np.float32) * 2)
    request, plain = state(seed=seed, **params), []
    for row in range(6):
        ids = torch.zeros(1, dtype=torch.int32)
        sample(logits[row : row + 1], pack_rows([(request, ())]), ids)
        plain.append(int(ids))
        request.commit(plain[-1:])
    how = pack_rows([(state(temperature=0, logit_bias={5: 9.0}), ()), (state(seed=seed, **params), plain[:5])])
    ids = torch.zeros(7, dtype=torch.int32)
    sample(torch.cat([torch.full((1, VOCAB), math.nan), logits]), how, ids)
    assert ids[1:].tolist() == plain
