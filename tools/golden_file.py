"""Reading a file of golden data."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor


def read_golden(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, by name; it holds no F8_E8M0. Raises OSError, or SafetensorError.

    The library's load_file goes through torch.asarray, which calls Python and makes a ValueError of whatever that
    raises: Ctrl-C at such a moment was no interruption but data that cannot be read.
    """
    data = path.read_bytes()
    try:
        return load(data)
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from error
