"""A place on paper: what kernels would be asked for, and what they would be lent, where there is no device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rocline.hip_kernels.binding import use_kernels
from rocline.hip_kernels.device_memory import COUNTERS, Lend, use_memory
from rocline.hip_kernels.dispatch import Choice


class PaperPlace(Choice):
    """To be used within binding.shapes_only, where nothing is launched or copied. Weights are shapes alone."""

    torch_device = torch.device("meta")

    @contextmanager
    def work(self, lend: Lend) -> Iterator[None]:
        """As Place.work."""
        with use_kernels(self.kernels), use_memory(lend, _PaperStaging(), torch.zeros(COUNTERS, dtype=torch.int32)):
            yield

    def record_completion(self, stream: Hashable) -> Callable[[], bool]:
        return lambda: True


class _PaperStaging:
    def put(self, source: Tensor, target: Tensor) -> None:
        pass
