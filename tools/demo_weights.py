"""The demo checkpoint's weights: random, but shaped so that 40 untrained layers behave like a model.

Each tensor has its own random stream, named by the seed and the tensor, and is built without a matrix product
or a LAPACK call: the bytes do not depend on threads, tile sizes or the order of writing.

What is shaped, and why:
- Keys, compressed rows and low-rank queries of all layers are noisy copies of one projection, and the query
  heads of the layers that share a selection are noisy copies of the same maps, so a dot product means
  something: attention is decisive, and a selection is worth sharing.
- Index queries copy those heads and index keys copy the compressed rows: index scores rank as attention does.
- CONSTANT_CHANNEL carries the same number for every token. The index head weights read it, hence are mostly
  positive; the projections above, the router and the head do not: it would favour the same key, expert or
  token everywhere.
- Sublayer outputs are small beside the embedding, so 80 of them neither drown it nor grow.
- Markers have zero head rows, so the model goes on until its limit: it would end, or leave its reasoning, at
  random places.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rocline.engine.config import GROUP, TextConfig
from rocline.engine.layout import TensorSpec
from rocline.hip_kernels.formats import (
    E4M3_MAX,
    act_quant4_e8m0,
    act_quant8,
    e4m3_encode,
    e8m0_decode,
    pack_e2m1,
    pow2ceil_e8m0,
)

CONSTANT_CHANNEL = 0
CONSTANT_VALUE = 4.0  # beside embeddings of deviation 1.2
KEY_NOISE = 0.25  # of a layer's own part, beside the shared projection's 1
HEAD_NOISE = 0.2
HEAD_GAIN = 1.5  # deviation of attention scores, before RoPE
SAME_TOKEN_GAIN = 1.0  # head 0 looks for its own token, whose score is sqrt(head_dim) times this

# Deviation of a matrix's output for an input of deviation 1, whatever its width.
MATRIX_GAINS = {
    "head.weight": 3.0,
    "attn.wo_a.weight": 1.0,
    "attn.wo_b.weight": 0.2,
    "attn.compressor.wgate.weight": 1.5,
    "ffn.gate.weight": 2.0,
    "ffn.experts.w1.weight": 2.0,
    "ffn.experts.w3.weight": 2.0,
    "ffn.experts.w2.weight": 0.03,
    "ffn.shared_experts.w1.weight": 2.0,
    "ffn.shared_experts.w3.weight": 2.0,
    "ffn.shared_experts.w2.weight": 0.02,
    "engram.wkv.weight": 0.6,
    "hc_attn_fn": 0.5,
    "hc_ffn_fn": 0.5,
}
NORM = (1.0, 0.15)
# Mean and deviation of an element.
ELEMENTS = {
    "norm.weight": NORM,
    "attn_norm.weight": NORM,
    "ffn_norm.weight": NORM,
    "attn.q_norm.weight": NORM,
    "attn.kv_norm.weight": NORM,
    "attn.compressor.norm.weight": NORM,
    "attn.indexer.k_norm.weight": NORM,
    "attn.attn_sink": (2.5, 1.0),
    "ffn.gate.bias": (0.0, 0.1),
    "ffn.gate.bias_vl": (0.0, 0.1),
    "hc_attn_scale": (0.85, 0.15),
    "hc_ffn_scale": (0.85, 0.15),
    "engram.embed.weight": (0.0, 1.0),
    "engram.q_weight": (1.0, 0.3),
    "engram.k_weight": (1.0, 0.3),
}
IGNORE_CONSTANT = {
    "attn.wq_a.weight",
    "attn.wkv.weight",
    "attn.compressor.wkv.weight",
    "attn.compressor.wgate.weight",
    "ffn.gate.weight",
    "head.weight",
}


class DemoWeights:
    """Makes any tensor of a demo checkpoint, from its name and spec alone.

    text        needs q_lora_rank = head_dim = index_head_dim, so that a low-rank query, a key and an index
                key can live in one space
    silent_ids  tokens that the model practically never chooses
    """

    def __init__(self, text: TextConfig, seed: int, silent_ids: Sequence[int]) -> None:
        self.text, self.seed, self.silent_ids = text, seed, list(silent_ids)

    def tensors(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """The tensors of `specs` as stored. A scale comes with its weight, so both must be among them."""
        out: dict[str, Tensor] = {}
        for name, spec in specs.items():
            if spec.dtype == "F8_E8M0":
                continue
            n_packed = 2 if spec.dtype == "I8" else 1
            values_f32 = self._values(name, (*spec.shape[:-1], spec.shape[-1] * n_packed), spec.layer)
            if spec.dtype == "F32":
                out[name] = values_f32
            elif spec.dtype == "BF16":
                out[name] = values_f32.bfloat16()
            else:
                out[name], scales_u8 = _quantise(values_f32, spec.dtype, by_row=".embed." in name)
                out[name.removesuffix("weight") + "scale"] = scales_u8.view(torch.float8_e8m0fnu)
        return out

    def _values(self, name: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        kind = re.sub(r"\b\d+\.", "", name.removeprefix("layers."))
        if kind in ELEMENTS:
            mean, deviation = ELEMENTS[kind]
            values = mean + deviation * self._normal(name, shape)
        elif kind in MATRIX_GAINS:
            values = self._normal(name, shape) * (MATRIX_GAINS[kind] / shape[-1] ** 0.5)
        else:
            values = self._shaped(kind, name, shape, layer)
        if kind in IGNORE_CONSTANT:
            values[:, CONSTANT_CHANNEL] = 0
        if kind == "head.weight":
            values[self.silent_ids] = 0
        return values

    def _shaped(self, kind: str, name: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        noise = self._normal(name, shape)
        if kind == "embed.weight":
            noise *= 1.2
            noise[:, CONSTANT_CHANNEL] = CONSTANT_VALUE
            return noise
        if kind in ("attn.wq_a.weight", "attn.wkv.weight", "attn.compressor.wkv.weight"):
            return (self._normal("key space", shape) + KEY_NOISE * noise) / shape[-1] ** 0.5
        if kind in ("attn.wq_b.weight", "attn.indexer.wq_b.weight"):
            assert layer is not None
            return self._heads(layer, shape) + HEAD_NOISE * noise / shape[-1] ** 0.5
        if kind == "attn.indexer.wk.weight":
            return torch.eye(*shape) + 0.1 * noise / shape[-1] ** 0.5
        if kind == "attn.indexer.weights_proj.weight":
            noise *= 0.8 / shape[-1] ** 0.5
            noise[:, CONSTANT_CHANNEL] = 1.0
            return noise
        if kind in ("hc_attn_base", "hc_ffn_base"):
            n = self.text.hc_mult
            noise[2 * n :] = 0.6 * noise[2 * n :] + torch.eye(n).flatten()  # a stream mostly stays itself
            return noise
        raise ValueError(f"demo weights: no rule for {name} (kind {kind!r}); add one to demo_weights.py")

    def _heads(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """[heads * dim, dim]: the query maps of the layers that share `layer`'s selection."""
        source, dim = self.text.layers[layer].index_source, shape[-1]
        group = f"layer {layer}" if source is None else f"index source {source}"
        maps = [SAME_TOKEN_GAIN * torch.eye(dim)]
        for head in range(1, shape[0] // dim):
            maps.append(self._normal(f"{group}, head {head}", (dim, dim)) * (HEAD_GAIN / dim**0.5))
        return torch.cat(maps)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16])))
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def _quantise(values_f32: Tensor, dtype: str, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes as stored and scale bytes; one scale per row and 32 channels, or per 32 x 32 tile."""
    if dtype == "I8":
        codes_e2m1, scales_u8 = act_quant4_e8m0(values_f32)
        return pack_e2m1(codes_e2m1).view(torch.int8), scales_u8
    if by_row:
        codes_e4m3, scales_u8 = act_quant8(values_f32)
    else:
        tiles = values_f32.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [N/32, 32, K/32, 32]
        scales_u8 = pow2ceil_e8m0(tiles.abs().amax((1, 3)) / E4M3_MAX)
        codes_e4m3 = e4m3_encode(tiles / e8m0_decode(scales_u8)[:, None, :, None]).view(values_f32.shape)
    return codes_e4m3.view(torch.float8_e4m3fn), scales_u8
