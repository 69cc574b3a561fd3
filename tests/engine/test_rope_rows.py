"""Rotations of a chunk's rows: made once for all of its visits, with the bits of rows made on their own."""

import pytest
import torch

from rocline.engine.config import ModelConfig
from rocline.engine.rope_rows import RopeTables
from rocline.hip_kernels import binding


@pytest.fixture
def rope(micro_model):
    return RopeTables(ModelConfig.load(micro_model).text_config)


def same(got, want):
    return torch.equal(got.cos_f32, want.cos_f32) and torch.equal(got.sin_f32, want.sin_f32)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_ranges_are_the_positions_one_after_the_other(rope, rng, ratio):
    starts = rng.integers(0, 1 << 20, 3).tolist()
    ranges = [range(starts[0], starts[0] + 130), range(7, 7), range(starts[1], starts[1] + 9, 2), range(9, 0, 2)]
    ranges += [range(starts[2], starts[2] + 1)]
    positions_i32 = torch.tensor([position for of in ranges for position in of], dtype=torch.int32)
    for _ in range(2):
        assert same(rope.of_ranges(ranges, ratio), rope.on_host(positions_i32, ratio))
    assert rope.of_ranges([range(5, 0, 2)], ratio).cos_f32.shape == (0, len(rope.plain_f32))


def test_visits_of_a_chunk_share_them(rope, micro_model):
    config = ModelConfig.load(micro_model).text_config
    assert RopeTables.of(config) is RopeTables.of(ModelConfig.load(micro_model).text_config)
    chunk = [range(64, 128)]
    assert rope.of_ranges(chunk, 1) is rope.of_ranges(chunk, 2)
    assert rope.of_ranges(chunk, 0) is not rope.of_ranges(chunk, 1)


def test_what_is_tried_on_paper_is_not_kept(rope):
    with binding.shapes_only():
        rope.of_ranges([range(3, 70)], 1)
    assert same(rope.of_ranges([range(3, 70)], 1), rope.on_host(torch.arange(3, 70, dtype=torch.int32), 1))
