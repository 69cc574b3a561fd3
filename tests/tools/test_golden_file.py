"""Reading golden data: every tensor as the library reads it, and Ctrl-C at any moment is Ctrl-C."""

import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rocline.tools.golden_file import read_golden


@pytest.mark.parametrize("file", ["ops", "micro/trace", "micro/prefill", "micro/decode", "micro/long"])
def test_same_tensors_as_the_library(data_folder, file):
    path = data_folder / f"{file}.safetensors"
    got, want = read_golden(path), load_file(path)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_file_that_is_cut_or_missing(data_folder, tmp_path):
    (tmp_path / "cut").write_bytes((data_folder / "micro" / "long.safetensors").read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="cut: Error while deserializing"):
        read_golden(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        read_golden(tmp_path / "none")


def test_an_interrupt_is_one_whenever_it_comes(data_folder):
    """Raised at the n-th call of a Python function, for every n: there a signal's handler runs."""
    path, n_calls = data_folder / "micro" / "long.safetensors", 0
    while True:
        left = n_calls = n_calls + 1

        def interrupt(frame, event, argument):
            nonlocal left
            left -= event == "call"
            if left == 0:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            read_golden(path)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
    assert n_calls > 20  # a call a tensor at least
