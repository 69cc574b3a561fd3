"""Where HIP kernels run in this test process: by default on the CPU, through a double of HIP built on demand."""

import os
import shutil
from pathlib import Path

import hip_doubles
import pytest
import torch
from torch import Tensor

from rocline.hip_kernels import kernel
from rocline.hip_kernels.driver import devices


class Place:
    """Puts tensors where kernels reach them. is_card: on a GPU, so full sizes make sense."""

    def __init__(self, is_card: bool) -> None:
        self.is_card = is_card
        self._torch_device = "cuda" if is_card else "cpu"

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._torch_device, copy=True)

    def full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self._torch_device)

    def get(self, tensor: Tensor) -> Tensor:
        devices()[0].synchronize()
        return tensor.cpu()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Place:
    """HIP, started: the double that --hip names, or the installed one."""
    kind = request.config.option.hip
    cache = request.config.cache.mkdir("hip-doubles")
    if kind != "rocm":
        if not shutil.which("g++"):
            pytest.skip("HIP double: needs g++")
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        double = hip_doubles.build_cpu_double(cache) if kind == "cpu" else hip_doubles.build_cuda_double(cache, cuda)
        os.environ["ROCM_PATH"] = str(double)
    kernel.use_cache(cache / "code")
    devices()
    return Place(is_card=kind != "cpu")


@pytest.fixture
def card(device: Place) -> Place:
    """As `device`, for tests that only a GPU can answer."""
    if not device.is_card:
        pytest.skip("needs a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    return device
