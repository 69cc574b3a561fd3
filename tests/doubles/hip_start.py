"""Starts HIP in a test process."""

import os
from pathlib import Path
from typing import Literal

from hip_doubles import build_cpu_double, build_cuda_double

from rocline.hip_kernels import kernel
from rocline.hip_kernels.driver import devices


def start(kind: Literal["cpu", "cuda", "rocm"], cache: Path) -> None:
    """Load HIP into this process: a double, or the installed one. Compiled kernels are kept in `cache`."""
    if kind == "cpu":
        os.environ["ROCM_PATH"] = str(build_cpu_double(cache))
    elif kind == "cuda":
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        os.environ["ROCM_PATH"] = str(build_cuda_double(cache, cuda))
    kernel.use_cache(cache / "code")
    devices()
