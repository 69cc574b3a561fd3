"""How long some kernels take at least: work counted from the checkpoint's tensors, over rates of the card measured in
the same call. Of kernels whose work is known: experts, other products from FP8, attention of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch

from rocline.engine.config import ModelConfig
from rocline.engine.handoff import PrefillMode, reach_for
from rocline.engine.layout import TensorSpec, expected_tensors
from rocline.hip_kernels.driver import Device
from rocline.hip_kernels.experts_hip import takes_two_launches
from rocline.pipeline.costs import rows_in
from rocline.tools.bench_index import timed_ms

COPY_BYTES = 1 << 30
MATRIX = 8192  # rows and columns
REPEATS = 9
# What kernels' names begin with.
FAMILIES = {
    "experts": ("routed_", "shared_up_", "mixture_"),
    "products from FP8": ("e4m3_", "engram_few", "latents_few", "project_enter_few"),
    "attention": ("attention",),
}
ONCE_A_LAYER = "mixture_down"  # of a decode step


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_s: read and written a second by a copy of 1 GiB; bf16_flops_s: of a product of 8,192 x 8,192."""

    copy_bytes_s: float
    bf16_flops_s: float

    @classmethod
    def measured(cls, device: Device) -> Ceilings:
        """Torch's, on a card that it sees."""
        place = device.torch_device
        with device.stream():
            source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=place) for _ in range(2))
            copy_ms = timed_ms([partial(target.copy_, source)], REPEATS)
            a, b, out = (torch.randn((MATRIX, MATRIX), device=place).bfloat16() for _ in range(3))
            product_ms = timed_ms([partial(torch.mm, a, b, out=out)], REPEATS)
        return cls(2e3 * COPY_BYTES / copy_ms, 2e3 * MATRIX**3 / product_ms)

    def seconds(self, flops: float, n_bytes: float) -> tuple[float, float]:
        return flops / self.bf16_flops_s, n_bytes / self.copy_bytes_s


class Bounds:
    """Least times of families of kernels, added up over steps and layers."""

    def __init__(self, config: ModelConfig, ceilings: Ceilings) -> None:
        self._text, self._ceilings = config.text_config, ceilings
        n_layers = self._text.num_hidden_layers
        self._parts = [dict[str, tuple[float, int]]() for _ in range(n_layers)]  # (FLOPs of a row, bytes) of weights
        for name, spec in expected_tensors(config).items():
            if spec.layer is not None and (part := _part_of(name, spec)):
                flops, n_bytes = self._parts[spec.layer].get(part, (0.0, 0))
                self._parts[spec.layer][part] = flops + _row_flops(name, spec), n_bytes + spec.n_bytes
        self._sums: dict[str, list[float]] = {}  # of a family: least seconds, those of products, those of reading

    def add_prefill(self, n_tokens: int, chunk_rows: int, mode: PrefillMode) -> None:
        """A cold prompt in chunks, each layer's attended rows."""
        text, reach = self._text, reach_for(self._text, mode, n_tokens)
        for start in range(0, n_tokens, chunk_rows):
            stop = min(start + chunk_rows, n_tokens)
            rows_of = rows_in(reach, start, stop)
            for layer in range(text.num_hidden_layers):
                if n_rows := rows_of(layer):
                    self._add_products(layer, n_rows)
                    lists = text.sliding_window, text.index_topk, text.layers[layer].ratio
                    slots = _slots(stop - n_rows, stop, *lists)
                    self._add("attention", 4.0 * slots * text.num_attention_heads * text.head_dim, 0)

    def add_decode(self, n_rows: int, n_steps: float) -> None:
        """So many steps of n_rows rows."""
        for layer in range(self._text.num_hidden_layers):
            self._add_products(layer, n_rows, n_steps)

    def of(self, kernel_ms: Mapping[str, float]) -> Iterable[dict[str, Any]]:
        """Fields of a line for each family of which kernels ran."""
        for family, (least_s, products_s, reading_s) in self._sums.items():
            names = [name for name in kernel_ms if name.startswith(FAMILIES[family])]
            if ms := sum(kernel_ms[name] for name in names):
                yield {
                    "what": f"{family}: {', '.join(sorted(names))}",
                    "ms": ms,
                    "bound_ms": 1e3 * least_s,
                    "bound_by": "products" if products_s > reading_s else "reading",
                    "of_bound": 1e3 * least_s / ms,
                }

    def _add_products(self, layer: int, n_rows: int, n_steps: float = 1.0) -> None:
        """Of a layer in steps of n_rows rows, which choose their experts independently of each other."""
        text, parts = self._text, self._parts[layer]
        share = text.num_experts_per_tok / text.n_routed_experts
        flops, n_bytes = parts["experts"]
        experts = [(share * flops, (1 - (1 - share) ** n_rows) * n_bytes), parts["shared up"]]
        fp8 = [parts["fp8"]]
        # The shared expert's second product is one from FP8, but where two launches have all experts.
        (experts if takes_two_launches(n_rows, text.num_experts_per_tok) else fp8).append(parts["shared down"])
        for family, pairs in (("experts", experts), ("products from FP8", fp8)):
            self._add(family, n_rows * sum(flops for flops, _ in pairs), sum(n for _, n in pairs), n_steps)

    def _add(self, family: str, flops: float, n_bytes: float, n_times: float = 1.0) -> None:
        products_s, reading_s = self._ceilings.seconds(flops, n_bytes)
        sums = self._sums.setdefault(family, [0.0, 0.0, 0.0])
        for at, seconds in enumerate((max(products_s, reading_s), products_s, reading_s)):
            sums[at] += n_times * seconds


def _part_of(name: str, spec: TensorSpec) -> str | None:
    """What of a layer's products reads it; None for what other kernels read."""
    if spec.component == "experts":
        return "experts"
    if spec.component == "shared":
        return "shared down" if ".w2." in name else "shared up"
    is_fp8 = spec.dtype in ("F8_E4M3", "F8_E8M0") and ".embed." not in name
    return "fp8" if is_fp8 and spec.component in ("attention", "indexer", "engram") else None


def _row_flops(name: str, spec: TensorSpec) -> float:
    """Of all experts together where it is an expert's."""
    return 0.0 if name.endswith(".scale") else 2.0 * prod(spec.shape) * (2 if spec.dtype == "I8" else 1)


@cache
def _slots(start: int, stop: int, window: int, topk: int, ratio: int) -> int:
    """Attended by the rows at positions start .. stop - 1: the local window, and compressed rows where there are."""
    return sum(min(window, p + 1) + (min(topk, (p + 1) // ratio) if ratio else 0) for p in range(start, stop))
