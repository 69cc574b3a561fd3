"""Weights of the layers a stage runs, read from a checkpoint into their places (backbone.md section 12)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rocline.engine.checkpoint import TORCH_DTYPE, Checkpoint, StoredStack
from rocline.engine.config import TextConfig
from rocline.engine.engram import EngramTable, table_room
from rocline.engine.layers.attention import AttentionWeights
from rocline.engine.layers.compressor import CompressorWeights
from rocline.engine.layers.experts import ExpertWeights
from rocline.engine.layers.indexer import IndexerWeights
from rocline.engine.layers.streams import EngramWeights, MhcWeights
from rocline.engine.layout import Component
from rocline.engine.weight_checks import check_finite, check_quantised, scales_suit_every_code
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight

EngramHome = Literal["ram", "mmap"]
WHOLE_BYTES = 64 << 20  # from here on a tensor is read to where it is to be, not by way of a buffer
NOT_LOADED: tuple[Component, ...] = (
    "gate_vl",
    "vision",
    "draft",
    "unused",
)  # images and drafts are not served


@dataclass(frozen=True)
class SideWeights:
    """What the key/value side of a layer reads. compressor only at key/value sources."""

    attn_norm_bf16: Tensor
    compressor: CompressorWeights | None


@dataclass(frozen=True)
class LayerWeights(SideWeights):
    """One layer. indexer only at index sources, engram at its layers."""

    ffn_norm_bf16: Tensor
    hc_attn: MhcWeights
    hc_ffn: MhcWeights
    attention: AttentionWeights
    experts: ExpertWeights
    indexer: IndexerWeights | None
    engram: EngramWeights | None


class WeightSource(Protocol):
    """Where a model's weights come from, by piece: embed_bf16, head_bf16 [V, D], norm_bf16 [D], layers.

    expert_store  layers of which this is the same have the same routed and shared experts: they need them once
    """

    @property
    def embed_bf16(self) -> Tensor: ...
    @property
    def norm_bf16(self) -> Tensor: ...
    @property
    def head_bf16(self) -> Tensor: ...
    def layer(self, layer: int) -> LayerWeights: ...
    def side(self, layer: int) -> SideWeights: ...
    def expert_store(self, layer: int) -> int: ...


@dataclass(frozen=True)
class ModelWeights:
    """embed_bf16, head_bf16 [V, D], norm_bf16 [D], and the layers by id; of a part of a model, empty ends and the
    sides alone of layers that run elsewhere."""

    embed_bf16: Tensor
    norm_bf16: Tensor
    head_bf16: Tensor
    layers: Mapping[int, SideWeights]

    def layer(self, layer: int) -> LayerWeights:
        weights = self.layers[layer]
        assert isinstance(weights, LayerWeights)
        return weights

    def side(self, layer: int) -> SideWeights:
        return self.layers[layer]

    def expert_store(self, layer: int) -> int:
        return layer

    @property
    def engram_tables(self) -> dict[int, EngramTable]:
        """By layer."""
        return {n: w.engram.table for n, w in self.layers.items() if isinstance(w, LayerWeights) and w.engram}


class StoredWeights:
    """Weights that are read from a checkpoint, and checked, when they are asked for: a GPU's are never all on the host.

    id_map   compressed id of every token (engram.compressed_id_map)
    engram   "ram" reads the tables, "mmap" leaves them in the file
    advance  called with bytes read, by any thread, one at a time

    Every attribute reads anew and raises CheckpointError naming a tensor with values that no exact product can come
    from. finish() raises it for one left unread.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: TextConfig,
        id_map: np.ndarray,
        engram: EngramHome = "ram",
        advance: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        self._checkpoint, self._config, self._id_map = checkpoint, config, id_map
        self._callers_advance, self._lock, self._is_given_up = advance, threading.Lock(), False
        components = {name: stored.spec.component for name, stored in checkpoint.tensors.items()}
        self._served = {name: part for name, part in components.items() if part not in NOT_LOADED}
        self._mapped = {name for name, part in self._served.items() if engram == "mmap" and _is_table(name, part)}

    @property
    def embed_bf16(self) -> Tensor:
        return self.read(["embed.weight"])["embed.weight"]

    @property
    def norm_bf16(self) -> Tensor:
        return self.read(["norm.weight"])["norm.weight"]

    @property
    def head_bf16(self) -> Tensor:
        return self.read(["head.weight"])["head.weight"]

    def layer(self, layer: int) -> LayerWeights:
        return layer_weights(self.read(self._names_of(layer)), self._config, layer, self._id_map)

    def layers_ahead(self, layers: Sequence[int]) -> Generator[tuple[int, LayerWeights], None, None]:
        """Each layer with its weights, while those of the next are being read; close it.

        Codes of routed experts, nearly all of a layer, stay in the files as Stored. Once it has ended by an error, or
        before its end, nothing can be read any more.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="layer-ahead") as ahead:
            try:
                coming = [ahead.submit(self._layer_ahead, layer) for layer in layers[:1]]
                for layer, after in zip(layers, [*layers[1:], None], strict=True):
                    weights = coming.pop().result()
                    if after is not None:
                        coming.append(ahead.submit(self._layer_ahead, after))
                    yield layer, weights
            except BaseException:  # the reader has to hear of it: an Engram table takes minutes
                self._is_given_up = True
                raise

    def _layer_ahead(self, layer: int) -> LayerWeights:
        names = self._names_of(layer)
        stacks: dict[str, list[str]] = {}
        for name in names:
            if ".ffn.experts." in name and name.endswith(".weight"):
                stacks.setdefault(stack_of(name)[0], []).append(name)
        left = {name for of_stack in stacks.values() for name in of_stack}
        loaded: dict[str, Any] = self.read([name for name in names if name not in left])
        for stack, of_stack in stacks.items():
            of_stack.sort(key=lambda name: stack_of(name)[1])
            loaded[stack] = StoredStack(self._checkpoint, of_stack, self._advance)
            _check_stored(of_stack, loaded[stack], loaded[stack.removesuffix(".weight") + ".scale"])
        return layer_weights(loaded, self._config, layer, self._id_map)

    def _names_of(self, layer: int) -> list[str]:
        prefix = f"layers.{layer}."
        return [name for name in self._served if name.startswith(prefix)]

    def _advance(self, n_bytes: int) -> None:
        if self._is_given_up:
            raise RuntimeError("nobody waits for these weights any more")
        with self._lock:
            self._callers_advance(n_bytes)

    def side(self, layer: int) -> SideWeights:
        prefix = f"layers.{layer}.attn"
        parts = prefix + "_norm.", prefix + ".compressor.", prefix + ".indexer.wk.", prefix + ".indexer.k_norm."
        return side_weights(self.read([name for name in self._served if name.startswith(parts)]), self._config, layer)

    def expert_store(self, layer: int) -> int:
        return layer

    def all(self) -> ModelWeights:
        return model_weights(self.read(self._served), self._config, self._id_map)

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors by name; those of routed experts are stacks too, named as `stack_of` says."""
        loaded = _read(self._checkpoint, self._config, [n for n in names if n not in self._mapped], self._advance)
        mapped = self._mapped.intersection(names)
        for name in mapped:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                loaded[name] = torch.from_numpy(self._checkpoint.map_plane(name))  # only ever gathered from
        _check_values(loaded, skip=mapped)
        return loaded

    def finish(self) -> None:
        """Everything has been asked for: nothing is left unread but the components not served."""
        self._checkpoint.finish(NOT_LOADED)


def load_weights(
    checkpoint: Checkpoint,
    config: TextConfig,
    id_map: np.ndarray,
    engram: EngramHome = "ram",
    advance: Callable[[int], None] = lambda n_bytes: None,
) -> ModelWeights:
    """All of a checkpoint's weights, in host memory; arguments and errors as of StoredWeights."""
    stored = StoredWeights(checkpoint, config, id_map, engram, advance)
    weights = stored.all()
    stored.finish()
    return weights


def model_weights(loaded: Mapping[str, Tensor], config: TextConfig, id_map: np.ndarray) -> ModelWeights:
    """Put tensors in their places by name; those of routed experts are stacks named as `stack_of` says."""
    layers = {role.layer: layer_weights(loaded, config, role.layer, id_map) for role in config.layers}
    return ModelWeights(loaded["embed.weight"], loaded["norm.weight"], loaded["head.weight"], layers)


def _is_table(name: str, component: Component) -> bool:
    return component == "engram" and ".engram.embed." in name


def _read(
    checkpoint: Checkpoint, config: TextConfig, names: Iterable[str], advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """Every named tensor in its own place; an expert's is a slice of one tensor over all experts."""
    loaded: dict[str, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for name in names:
        spec = checkpoint.tensors[name].spec
        dtype = TORCH_DTYPE[spec.dtype]
        if ".ffn.experts." not in name:
            is_table = _is_table(name, spec.component)
            loaded[name] = table_room(*spec.shape) if is_table else torch.empty(spec.shape, dtype=dtype)
            continue
        stack, expert = stack_of(name)
        if stack not in stacks:
            stacks[stack] = torch.empty((config.n_routed_experts, *spec.shape), dtype=dtype)
        loaded[name] = stacks[stack][expert]

    def deliver(name: str, row_start: int, tensor: Tensor) -> None:
        loaded[name][row_start : row_start + len(tensor)] = tensor

    checkpoint.read((name for name in loaded if loaded[name].nbytes < WHOLE_BYTES), deliver, advance=advance)
    for name, tensor in loaded.items():
        if tensor.nbytes >= WHOLE_BYTES:
            checkpoint.read_whole(name, tensor, advance=advance)
    return loaded | stacks


def stack_of(name: str) -> tuple[str, int]:
    """Where an expert's tensor is stacked: layers.3.ffn.experts.7.w1.scale -> (layers.3.ffn.experts.*.w1.scale, 7)."""
    head, tail = name.split(".ffn.experts.")
    expert, rest = tail.split(".", 1)
    return f"{head}.ffn.experts.*.{rest}", int(expert)


def _check_values(loaded: dict[str, Tensor], skip: set[str]) -> None:
    for name, tensor in loaded.items():
        if name in skip or ".experts.*." in name or name.endswith(".scale"):
            continue
        if tensor.dtype != torch.uint8:
            check_finite(name, tensor)
        else:
            scale = name.removesuffix(".weight") + ".scale"
            check_quantised(name, "e2m1x2" if ".ffn.experts." in name else "e4m3", tensor, loaded[scale])


def _check_stored(names: Sequence[str], codes: StoredStack, scales_e8m0: Tensor) -> None:
    """As check_quantised of each, whose codes are read only where scales do not suit every code."""
    if not scales_suit_every_code("e2m1x2", scales_e8m0):
        for item, name in enumerate(names):
            if not scales_suit_every_code("e2m1x2", scales_e8m0[item]):
                check_quantised(name, "e2m1x2", codes[item : item + 1].load()[0], scales_e8m0[item])


def layer_weights(loaded: Mapping[str, Tensor], config: TextConfig, layer: int, id_map: np.ndarray) -> LayerWeights:
    """A layer's tensors in their places, by name as in model_weights."""
    role, prefix = config.layers[layer], f"layers.{layer}."

    def get(name: str) -> Tensor:
        return loaded[prefix + name]

    def fp8(name: str) -> Fp8Weight:
        return Fp8Weight(get(name + ".weight"), get(name + ".scale"))

    def fp4(name: str) -> Fp4Weight:
        return Fp4Weight(get(name + ".weight"), get(name + ".scale"))

    def mhc(name: str) -> MhcWeights:
        return MhcWeights(get(name + "_fn"), get(name + "_scale"), get(name + "_base"))

    indexer = engram = None
    if role.has_indexer:
        indexer = IndexerWeights(fp8("attn.indexer.wq_b"), get("attn.indexer.weights_proj.weight"))
    if role.engram is not None:
        table = EngramTable.build(
            config.engram_tables[role.engram],
            get("engram.embed.weight"),
            get("engram.embed.scale"),
            id_map,
            config.engram_pad_token_id,
        )
        engram = EngramWeights(fp8("engram.wkv"), get("engram.q_weight"), get("engram.k_weight"), table)
    side = side_weights(loaded, config, layer)
    return LayerWeights(
        side.attn_norm_bf16,
        side.compressor,
        get("ffn_norm.weight"),
        mhc("hc_attn"),
        mhc("hc_ffn"),
        AttentionWeights(
            fp8("attn.wq_a"),
            get("attn.q_norm.weight"),
            fp8("attn.wq_b"),
            fp8("attn.wkv"),
            get("attn.kv_norm.weight"),
            fp8("attn.wo_a"),
            fp8("attn.wo_b"),
            get("attn.attn_sink"),
        ),
        ExpertWeights(
            get("ffn.gate.weight"),
            get("ffn.gate.bias"),
            (fp4("ffn.experts.*.w1"), fp4("ffn.experts.*.w3"), fp4("ffn.experts.*.w2")),
            (fp8("ffn.shared_experts.w1"), fp8("ffn.shared_experts.w3"), fp8("ffn.shared_experts.w2")),
        ),
        indexer,
        engram,
    )


def side_weights(loaded: Mapping[str, Tensor], config: TextConfig, layer: int) -> SideWeights:
    """Those of a layer's key/value side."""
    role, prefix = config.layers[layer], f"layers.{layer}."

    def get(name: str) -> Tensor:
        return loaded[prefix + name]

    compressor = None
    if role.owns_rows:
        wkv_bf16 = get("attn.compressor.wkv.weight")
        if role.ratio == 2:  # one product makes both
            wkv_bf16 = torch.cat((wkv_bf16, get("attn.compressor.wgate.weight")))
        compressor = CompressorWeights(
            wkv_bf16,
            get("attn.compressor.norm.weight"),
            get("attn.indexer.wk.weight"),
            get("attn.indexer.k_norm.weight"),
        )
    return SideWeights(get("attn_norm.weight"), compressor)
