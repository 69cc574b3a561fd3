"""index_score against scalar arithmetic in integers and FP32, page walks included (cases B16, B18, B36)."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_score import index_score
from rocline.hip_kernels.pages import row_slots


def bf16(x):
    return torch.tensor(float(x), dtype=torch.float32).bfloat16().float().item()


def scalar_score(q_codes, q_scales, k_codes, k_scales, weights):
    """One row against one position: relu and weight per head, one sum over heads, three BF16 roundings."""
    total = np.float32(0)
    for head in range(len(q_codes)):
        dot = np.float32(0)
        for g in range(q_codes.shape[1]):
            whole = int((q_codes[head, g] * 2).astype(int) @ (k_codes[g] * 2).astype(int))
            dot = np.float32(dot + np.float32(whole / 4 * float(q_scales[head, g]) * float(k_scales[g])))
        total = np.float32(total + np.float32(bf16(max(bf16(dot), 0.0) * np.float32(weights[head]))))
    return bf16(total)


@pytest.mark.parametrize("n_positions", [1, 7, 8, 9, 23])
@pytest.mark.parametrize("n_heads", [1, 3])
def test_scores_equal_scalar_arithmetic_through_pages(rng, n_heads, n_positions):
    row_format, n_rows, per_page = RowFormat("index_key", 64), 5, 8
    spread = np.exp2(rng.integers(-6, 7, (4, per_page, 2, 1))) * rng.standard_normal((4, per_page, 2, 32))
    keys = row_format.pack(torch.from_numpy(spread.reshape(4, per_page, 64)).bfloat16())
    q = row_format.pack(torch.from_numpy(rng.standard_normal((n_rows, n_heads, 64))).bfloat16())
    weights = torch.from_numpy(rng.standard_normal((n_rows, n_heads))).bfloat16()
    table = torch.tensor([2, 0, 3], dtype=torch.int32)
    visible = torch.from_numpy(rng.integers(0, n_positions + 1, n_rows)).int()
    visible[0] = 0
    scores = torch.full((n_rows, n_positions), float("nan"))
    index_score(q, weights, keys, table, visible, scores)
    q_codes, q_scales = (x.numpy() for x in row_format.split(q))
    for row in range(n_rows):
        for position in range(n_positions):
            if position >= visible[row]:
                assert scores[row, position] == float("-inf")
                continue
            key = keys[int(table[position // per_page]), position % per_page]
            k_codes, k_scales = (x.numpy() for x in row_format.split(key))
            want = scalar_score(q_codes[row], q_scales[row], k_codes, k_scales, weights[row].float().numpy())
            assert scores[row, position].item() == want


@pytest.mark.parametrize("table", ["index_score", "index_score_4g"])
def test_reference_tables(data_folder, table):
    ops = load_file(data_folder / "ops.safetensors")
    q, k, raw, want = (ops[f"{table}.{name}"] for name in ("q", "k", "w_raw", "score"))
    row_format = RowFormat("index_key", k.shape[1])
    weights = (raw.float() * (q.shape[1] ** -0.5 * q.shape[2] ** -0.5)).bfloat16()
    scores = torch.empty(len(q), len(k))
    visible = torch.full((len(q),), len(k), dtype=torch.int32)
    page = torch.tensor([0], dtype=torch.int32)
    index_score(row_format.pack(q), weights, row_format.pack(k)[None], page, visible, scores)
    assert torch.equal(scores.bfloat16(), want)
    if table == "index_score_4g":  # the recorded packed form says the same, whatever scales it chose
        rows = torch.cat((ops[f"{table}.k_packed"].view(torch.uint8), ops[f"{table}.k_scale"]), dim=1)
        index_score(row_format.pack(q), weights, rows[None], page, visible, scores)
        assert torch.equal(scores.bfloat16(), want)


def test_b16_one_list_per_query_not_one_per_head():
    """Two heads want different positions; the sum of relu(dot) * weight decides once."""
    row_format = RowFormat("index_key", 32)
    axes = torch.eye(32)[:3].bfloat16()
    q = row_format.pack(torch.stack((axes[0], axes[1]))[None])
    keys = row_format.pack(torch.stack((axes[0] * 4, axes[1] * 2, axes[2], -axes[0]))[None])
    weights = torch.tensor([[1.0, 3.0]]).bfloat16()
    scores = torch.empty(1, 4)
    index_score(q, weights, keys, torch.tensor([0], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), scores)
    assert scores.tolist() == [[4.0, 6.0, 0.0, 0.0]]  # a negative dot counts nothing


def test_b36_row_addresses_are_64_bit():
    """8,388,608 rows of 288 bytes pass 2^31; an int32 product of page and rows would wrap."""
    table = torch.tensor([0, 4_000_000], dtype=torch.int32)
    slots = row_slots(torch.tensor([2047, 2048, 4095], dtype=torch.int32), table, 2048)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [2047, 4_000_000 * 2048, 4_000_000 * 2048 + 2047]
