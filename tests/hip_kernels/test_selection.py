"""Candidate blocks and top-k lists against a naive sort, at the release's sizes too (cases B16 to B20)."""

import numpy as np
import pytest
import torch

from rocline.hip_kernels.selection import candidate_blocks, mask_to_list, top_k_list, top_k_mask

NEG = float("-inf")


def naive_top(scores, k):
    """The k best indices: higher score first, then lower index; -0 equals +0."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def naive_blocks(scores, visible, size, n_keep):
    blocks = [max(scores[b : b + size]) for b in range(0, len(scores), size)]
    if visible:
        blocks[(visible - 1) // size] = float("inf")
    return sorted(b for b in naive_top(blocks, n_keep) if blocks[b] > NEG)


def naive_list(scores, visible, k, allowed=None, size=8):
    kept = [s if allowed is None or i // size in allowed else NEG for i, s in enumerate(scores)]
    return sorted(i for i in naive_top(kept, k) if i < visible)


def padded(ids, width):
    return ids + [-1] * (width - len(ids))


def tied_scores(rng, n_rows, n_positions, visible):
    """BF16-like scores with many exact ties and both zeros, masked past `visible`."""
    scores = torch.from_numpy(rng.integers(-3, 6, (n_rows, n_positions)) * 0.5).float()
    scores = torch.where((scores == 0) & (torch.from_numpy(rng.random(scores.shape)) < 0.5), -0.0, scores)
    return scores.masked_fill(torch.arange(n_positions) >= visible[:, None], NEG)


@pytest.mark.parametrize("n_positions", [1, 7, 8, 9, 15, 16, 17, 40, 63, 64, 65, 101])
def test_ties_boundaries_and_partial_blocks(rng, n_positions):
    n_rows, k, n_keep = 67, 9, 4
    visible = torch.from_numpy(rng.integers(0, n_positions + 1, n_rows)).int()
    scores = tied_scores(rng, n_rows, n_positions, visible)
    blocks = torch.full((n_rows, n_keep), 77, dtype=torch.int32)
    candidate_blocks(scores, visible, 8, blocks)
    free, bound = (torch.full((n_rows, k), 77, dtype=torch.int32) for _ in range(2))
    top_k_list(scores, visible, None, 8, free)
    top_k_list(scores, visible, blocks, 8, bound)
    for row in range(n_rows):
        seen, line = int(visible[row]), scores[row].tolist()
        kept = naive_blocks(line, seen, 8, n_keep)
        assert blocks[row].tolist() == padded(kept, n_keep)
        assert free[row].tolist() == padded(naive_list(line, seen, k), k)
        assert bound[row].tolist() == padded(naive_list(line, seen, k, set(kept)), k)


def test_b20_the_newest_partial_block_is_pinned_and_the_restriction_bites():
    """Block 8, 4 blocks, top-k 4, length 40: older blocks score higher, the newest stays all the same."""
    scores = torch.arange(40, 0, -1).float()[None]
    visible = torch.tensor([37], dtype=torch.int32)
    scores[0, 37:] = NEG
    blocks = torch.empty((1, 4), dtype=torch.int32)
    candidate_blocks(scores, visible, 8, blocks)
    assert blocks.tolist() == [[0, 1, 2, 4]]
    other = torch.zeros((1, 40))
    other[0, 24:28] = 9  # block 3, not a candidate
    other[0, 37:] = NEG
    free, bound = (torch.empty((1, 4), dtype=torch.int32) for _ in range(2))
    top_k_list(other, visible, None, 8, free)
    top_k_list(other, visible, blocks, 8, bound)
    assert free.tolist() == [[24, 25, 26, 27]]
    assert bound.tolist() == [[0, 1, 2, 3]]


def test_b17_while_everything_fits_everything_is_taken(rng):
    for n_positions in (1, 15, 16):
        scores = torch.from_numpy(rng.standard_normal((3, n_positions))).float()
        selected = torch.empty((3, 16), dtype=torch.int32)
        top_k_list(scores, torch.full((3,), n_positions, dtype=torch.int32), None, 8, selected)
        assert selected.tolist() == [padded(list(range(n_positions)), 16)] * 3


def test_release_sizes_at_20000_positions(rng):
    """2,048 candidate blocks of 8 and top-512 where the restriction is active, with ties at both cuts."""
    n_positions = 20_000
    visible = torch.tensor([19_999, 16_385, 16_384, 513], dtype=torch.int32)
    values = rng.standard_normal((4, n_positions)).astype(np.float32)
    scores = torch.from_numpy(values).bfloat16().float()
    scores[:, ::3] = 0.0  # ReLU zeros: exact ties by the thousand
    scores = scores.masked_fill(torch.arange(n_positions) >= visible[:, None], NEG)
    consumer = torch.from_numpy(rng.standard_normal((4, n_positions))).bfloat16().float()
    consumer = consumer.masked_fill(torch.arange(n_positions) >= visible[:, None], NEG)
    blocks = torch.empty((4, 2048), dtype=torch.int32)
    candidate_blocks(scores, visible, 8, blocks)
    free, bound = (torch.empty((4, 512), dtype=torch.int32) for _ in range(2))
    top_k_list(consumer, visible, None, 8, free)
    top_k_list(consumer, visible, blocks, 8, bound)
    for row in range(4):
        kept = naive_blocks(scores[row].tolist(), int(visible[row]), 8, 2048)
        assert blocks[row].tolist() == padded(kept, 2048)
        line = consumer[row].tolist()
        assert bound[row].tolist() == padded(naive_list(line, int(visible[row]), 512, set(kept)), 512)
        assert free[row].tolist() == padded(naive_list(line, int(visible[row]), 512), 512)
    assert not torch.equal(free[0], bound[0])  # past 16,384 the restriction changes the choice
    assert torch.equal(free[2:], bound[2:])  # up to there it is the identity


def test_a_nan_is_never_chosen():
    scores = torch.tensor([[1.0, float("nan"), 2.0, NEG, 3.0]])
    assert top_k_mask(scores, 2).tolist() == [[False, False, True, False, True]]
    assert not top_k_mask(scores, 9)[0, 1]


def test_mask_to_list_fills_with_minus_one():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert mask_to_list(mask, 3).tolist() == [[0, 2, -1], [-1, -1, -1], [0, 1, 2]]
