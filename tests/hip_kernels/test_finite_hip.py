"""Whether rows hold only numbers, on the GPU as on the host (cases of a NaN that spreads begin here)."""

import pytest
import torch

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.finite import rows_finite, rows_finite_hip


@pytest.mark.parametrize("n_rows", [1, 17, 65])
@pytest.mark.parametrize("width", [8, 2048, 20480])
def test_one_bad_number_marks_its_row_alone(device, rng, n_rows, width):
    largest = torch.finfo(torch.bfloat16).max
    values = torch.from_numpy(rng.uniform(-1, 1, (n_rows, width))).bfloat16() * largest
    bad_rows = sorted(rng.choice(n_rows, n_rows // 2, replace=False).tolist())
    for row in bad_rows:
        values[row, rng.integers(width)] = [float("nan"), float("inf"), float("-inf")][rng.integers(3)]
    want = torch.full((n_rows,), 7, dtype=torch.uint8)
    rows_finite(values, want)
    assert [row for row in range(n_rows) if not want[row]] == bad_rows
    got = device.full((n_rows,), 7, torch.uint8)
    rows_finite_hip(device.put(values), got)
    assert torch.equal(device.get(got), want)


def test_a_row_that_cannot_be_read_in_pieces_is_refused(device):
    with pytest.raises(BindError, match="rows of 12 numbers, want a multiple of 8"):
        rows_finite_hip(device.full((2, 12), 0.0, torch.bfloat16), device.full((2,), 0, torch.uint8))
