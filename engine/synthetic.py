"""A model's weights at its own sizes without its checkpoint: noise made where it will lie, in a few stores of experts.

For measuring what takes as long whatever the numbers are. Layer L has the experts of store L mod n_stores, so a card
that could not hold them all runs all layers, with the bytes, the routing and the rows an expert of the real ones.
Deviations are such that activations neither vanish nor saturate. What the model says means nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.engram import EngramTable
from rocline.engine.layout import TensorSpec, expected_tensors
from rocline.engine.weights import NOT_LOADED, LayerWeights, SideWeights, layer_weights, side_weights, stack_of

WINDOW_BYTES = 4096 + 32  # from one expert's codes to the next one's among the same noise: all differ
TABLE_ROWS = 1 << 16  # of an Engram table, which every row of the real one falls into
ONE = 127  # the E8M0 code of 1
E2M1_DEVIATION = 2.926  # of all sixteen codes alike
E4M3_CODES = range(0x30, 0x48)  # 0.5 to 3.75, either sign; their deviation:
E4M3_DEVIATION = 1.98

# Deviation of a matrix's output for an input of deviation 1; of all others 1.
GAINS = {
    "head.weight": 3.0,
    "attn.wo_b.weight": 0.2,
    "ffn.gate.weight": 2.0,
    "ffn.experts.*.w1.weight": 2.0,
    "ffn.experts.*.w3.weight": 2.0,
    "ffn.experts.*.w2.weight": 0.03,
    "ffn.shared_experts.w1.weight": 2.0,
    "ffn.shared_experts.w3.weight": 2.0,
    "ffn.shared_experts.w2.weight": 0.02,
    "engram.wkv.weight": 0.6,
    "hc_attn_fn": 0.5,
    "hc_ffn_fn": 0.5,
}
# Mean and deviation of an element.
ELEMENTS = {
    "embed.weight": (0.0, 1.2),
    "attn.attn_sink": (2.5, 1.0),
    "ffn.gate.bias": (0.0, 0.02),  # wider, and a layer's busiest expert has over three times its share
    "hc_attn_scale": (0.85, 0.15),
    "hc_ffn_scale": (0.85, 0.15),
}


SKEWED_BIAS = 0.5  # deviation of what is added to a score before the best are chosen
N_STORES = 12  # where nobody says how many: of the release they fit one card of 140 GB
_PREFIX = "synthetic:"


def seed_of(model: str) -> int | None:
    """SEED of `synthetic:SEED`; None for what names no synthetic weights. Raises ConfigError for another SEED."""
    if not model.startswith(_PREFIX):
        return None
    word = model.removeprefix(_PREFIX)
    if not (word.isascii() and word.isdigit()):
        raise ConfigError(f"{model}: write {_PREFIX} and a seed, a number from 0, as in {_PREFIX}1")
    return int(word)


@dataclass(frozen=True)
class _SmallTable(EngramTable):
    """Rows of the real table, of which this has the first few."""

    def copy_rows(self, rows_i64: Tensor, codes_e4m3: Tensor, scales_e8m0: Tensor) -> None:
        super().copy_rows(rows_i64 % len(self.codes_e4m3), codes_e4m3, scales_e8m0)


class SyntheticWeights:
    """A WeightSource of noise, the same for the same seed, sizes and kind of device.

    n_stores   of routed experts; None: every layer has its own
    device     where tensors are made: without an index, the one that is current when they are asked for. Engram's
               tables stay on the host
    is_skewed  some experts are chosen far more often than others
    """

    def __init__(
        self, config: ModelConfig, seed: int, n_stores: int | None, device: torch.device, is_skewed: bool = False
    ) -> None:
        self.config, self.seed, self.device, self.is_skewed = config.text_config, seed, device, is_skewed
        self.n_stores = min(n_stores or self.config.num_hidden_layers, self.config.num_hidden_layers)
        self._specs: dict[str, TensorSpec] = {}
        for name, spec in expected_tensors(config).items():
            if spec.component not in NOT_LOADED:
                self._specs.setdefault(stack_of(name)[0] if ".ffn.experts." in name else name, spec)

    def __str__(self) -> str:
        return f"synthetic:{self.seed}, stores={self.n_stores}{', skewed' * self.is_skewed}"

    @property
    def embed_bf16(self) -> Tensor:
        return self._tensor("embed.weight")

    @property
    def norm_bf16(self) -> Tensor:
        return self._tensor("norm.weight")

    @property
    def head_bf16(self) -> Tensor:
        return self._tensor("head.weight")

    def expert_store(self, layer: int) -> int:
        return layer % self.n_stores

    def layer(self, layer: int) -> LayerWeights:
        vocab, compressed = self.config.vocab_size, self.config.engram_compressed_vocab_size
        id_map = (np.arange(vocab) % compressed).astype(np.int32)
        weights = layer_weights(_Made(self), self.config, layer, id_map)
        if weights.engram is None:
            return weights
        return replace(weights, engram=replace(weights.engram, table=_SmallTable(**vars(weights.engram.table))))

    def side(self, layer: int) -> SideWeights:
        return side_weights(_Made(self), self.config, layer)

    def _tensor(self, name: str) -> Tensor:
        """By name; those of routed experts are stacks of a store."""
        spec, kind = self._specs[name], name.split(".", 2)[2] if name.startswith("layers.") else name
        if name.endswith(".scale"):
            return self._scales(kind, spec, self._specs[name.removesuffix("scale") + "weight"])
        if spec.dtype == "I8":
            assert spec.layer is not None
            return self._windows(f"store {self.expert_store(spec.layer)} {kind}", spec)
        if kind.startswith("ffn.shared_experts."):  # of the store too: which layer of it is placed first may differ
            assert spec.layer is not None
            name = f"layers.{self.expert_store(spec.layer)}.{kind}"
        noise = _Noise(self.seed, name, torch.device("cpu") if ".embed." in name else self.device)
        if spec.dtype == "F8_E4M3":
            shape = (TABLE_ROWS, spec.shape[1]) if ".embed." in name else spec.shape
            codes = noise.integers(E4M3_CODES.start, E4M3_CODES.stop, shape)
            return codes | (noise.integers(0, 2, shape) << 7)
        values_f32 = self._values(kind, spec, noise)
        return values_f32.bfloat16() if spec.dtype == "BF16" else values_f32

    def _values(self, kind: str, spec: TensorSpec, noise: _Noise) -> Tensor:
        values_f32 = noise.normal(spec.shape)
        if kind in ELEMENTS:
            mean, deviation = ELEMENTS[kind]
            if self.is_skewed and kind == "ffn.gate.bias":
                deviation = SKEWED_BIAS
            return mean + deviation * values_f32
        if kind in ("hc_attn_base", "hc_ffn_base"):
            n = self.config.hc_mult
            values_f32[2 * n :] = 0.6 * values_f32[2 * n :] + torch.eye(n, device=self.device).flatten()
            return values_f32
        if len(spec.shape) == 1 or "engram." in kind:
            return 1.0 + 0.15 * values_f32
        return values_f32 * (GAINS.get(kind, 1.0) / spec.shape[-1] ** 0.5)

    def _scales(self, kind: str, spec: TensorSpec, weight: TensorSpec) -> Tensor:
        """One power of two for all of a tensor, with which its codes have the deviation wanted."""
        if ".embed." in f".{kind}":
            return torch.full((TABLE_ROWS, spec.shape[1]), ONE - 1, dtype=torch.uint8)
        is_fp4 = weight.dtype == "I8"
        n_in = weight.shape[1] * (2 if is_fp4 else 1)
        gain = GAINS.get(kind.removesuffix("scale") + "weight", 1.0)
        wanted = gain / n_in**0.5 / (E2M1_DEVIATION if is_fp4 else E4M3_DEVIATION)
        code = torch.tensor(ONE + round(float(np.log2(wanted))), dtype=torch.uint8, device=self.device)
        return code.expand(self.config.n_routed_experts, *spec.shape) if is_fp4 else code.repeat(*spec.shape)

    def _windows(self, name: str, spec: TensorSpec) -> Tensor:
        """[E, N, K/2] codes of all experts, each a window of the same noise."""
        n_experts, n_bytes = self.config.n_routed_experts, spec.shape[0] * spec.shape[1]
        noise = _Noise(self.seed, name, self.device).integers(0, 256, (n_bytes + n_experts * WINDOW_BYTES,))
        return noise.as_strided((n_experts, *spec.shape), (WINDOW_BYTES, spec.shape[1], 1))


class _Made(dict[str, Tensor]):
    """The tensors of a layer, each made when it is asked for: all of them at once are much."""

    def __init__(self, source: SyntheticWeights) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Tensor:
        return self._source._tensor(name)


class _Noise:
    """Random numbers of a tensor, named by the seed and the tensor."""

    def __init__(self, seed: int, name: str, device: torch.device) -> None:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        self._generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        self._device = device

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self._device, dtype=torch.uint8)
