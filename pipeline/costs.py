"""What a layer's rows cost: products, bytes read and history scored, counted from the checkpoint's tensors.

Spec: backbone.md sections 5-12. A model of the work, not a measurement: it leaves out the residual streams'
traffic (below 2 % of a row's time), norms, rotations and the selection after the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from rocline.engine.config import GROUP, LayerRole, ModelConfig
from rocline.engine.handoff import PrefillMode, Reach, reach_for
from rocline.engine.layout import Component, TensorSpec, expected_tensors
from rocline.engine.stage import StageLayers

# Made by a source's key/value side, which may stand a stage before the layer.
_SIDE_PARTS = ("attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")
_ON_HOST = ".engram.embed."
SPAN_ROWS = 4096
_LEFT_OUT: tuple[Component, ...] = ("gate_vl", "vision", "unused")  # images are not served


@dataclass(frozen=True)
class Rates:
    """What one card reaches while it works. Of a W7900D all is assumed; shares of peaks, and the host's cost of a step,
    are those of an H200 (docs/results.md).

    flops_per_s      of matrix products, index scores included (integer and BF16 WMMA run alike on gfx1100)
    bytes_per_s      of device memory, 864 GB/s: experts of decode steps are read at 0.60 to 0.72 of a copy's rate
    hop_bytes_per_s  from card to card over PCIe
    step_s           fixed cost of one visit's step: launches, scheduling, the copy's latency. A token of one request
                     took 8.7 ms over 16 visits, of which the device was busy for 7.5
    """

    flops_per_s: float
    bytes_per_s: float = 0.6 * 864e9
    hop_bytes_per_s: float = 16e9
    step_s: float = 75e-6


@dataclass(frozen=True)
class LayerCost:
    """A layer without its index scores, the key/value side of one (which has no experts), or the draft stages.

    row_flops         a row's products, routed experts left out
    expert_row_flops  a row's products in its routed experts
    read_bytes        weights that any step reads, however few rows it has
    expert_bytes      weights of all routed experts, of which a row reads chosen_share
    """

    row_flops: float
    expert_row_flops: float
    read_bytes: int
    expert_bytes: int
    chosen_share: float

    @property
    def weight_bytes(self) -> int:
        """All of its weights on the card."""
        return self.read_bytes + self.expert_bytes

    def seconds(self, n_rows: int, rates: Rates) -> float:
        """The products of n_rows rows, or reading the weights where that takes longer; rows choose independently."""
        touched = 1 - (1 - self.chosen_share) ** n_rows
        plain_s = max(n_rows * self.row_flops / rates.flops_per_s, self.read_bytes / rates.bytes_per_s)
        expert_flops, expert_bytes = n_rows * self.expert_row_flops, touched * self.expert_bytes
        return plain_s + max(expert_flops / rates.flops_per_s, expert_bytes / rates.bytes_per_s)


class CostModel:
    """Costs of every layer of a configuration.

    candidates_only  index sources after the producer score the candidate positions alone, as this engine does;
                     False: their whole history, as the released reference does
    """

    def __init__(self, config: ModelConfig, candidates_only: bool = True) -> None:
        self.config = config
        self.text = config.text_config
        self.candidates_only = candidates_only
        text, parts = self.text, dict[object, dict[str, TensorSpec]]()
        for name, spec in expected_tensors(config).items():
            if spec.component not in _LEFT_OUT and _ON_HOST not in name:
                is_side = any(part in name for part in _SIDE_PARTS)
                # What has no layer: the embedding, the draft stages, and the head with the last norm.
                whole = "head" if spec.component == "norm" else spec.component
                part = whole if spec.layer is None else (spec.layer, is_side)
                parts.setdefault(part, {})[name] = spec
        share = text.num_experts_per_tok / text.n_routed_experts
        self.layers = [self._layer(role, _count(parts[role.layer, False], share)) for role in text.layers]
        self.sides = {source: _count(parts[source, True], share) for source in text.kv_source_layer_ids}
        self.embed_bytes = sum(spec.n_bytes for spec in parts["embed"].values())
        self.head = _count(parts["head"], share)
        draft_share = text.dspark_num_experts_per_tok / max(1, text.dspark_n_routed_experts)
        self.draft = _count(parts.get("draft", {}), draft_share)

    def _layer(self, role: LayerRole, counted: LayerCost) -> LayerCost:
        slots = self.text.sliding_window + (self.text.index_topk if role.ratio else 0)
        core_flops = 4 * slots * self.text.num_attention_heads * self.text.head_dim  # the two products of attention
        return replace(counted, row_flops=counted.row_flops + core_flops)

    @property
    def n_layers(self) -> int:
        return self.text.num_hidden_layers

    @property
    def n_encoder(self) -> int:
        """Layers before the last key/value source: those that every prompt row runs in `halo`."""
        return self.text.kv_source_layer_ids[-1]

    def scored(self, role: LayerRole, history: int) -> int:
        """Index keys that one row of a layer scores when `history` positions are before it."""
        if not role.has_indexer:
            return 0
        if role.reads_candidates and self.candidates_only:
            return min(history, self.text.candidate_topk_blocks * self.text.candidate_block_size)
        return history // role.ratio

    def score_flops(self, role: LayerRole, history: int) -> float:
        return 2.0 * self.text.index_n_heads * self.text.index_head_dim * self.scored(role, history)

    def row_flops(self, history: int) -> float:
        """All products of one row through all layers; a prompt's rows need no head."""
        parts = (*self.layers, *self.sides.values())
        dense = sum(cost.row_flops + cost.expert_row_flops for cost in parts)
        return dense + sum(self.score_flops(role, history) for role in self.text.layers)

    def prompt_flops(self, prompt_tokens: int, mode: PrefillMode) -> float:
        """All products of a cold prompt up to its last row, the head's left out; scores by spans of SPAN_ROWS rows."""
        reach = self.reach(mode, prompt_tokens)
        flops = prompt_tokens * sum(side.row_flops for side in self.sides.values())
        for start in range(0, prompt_tokens, SPAN_ROWS):
            stop = min(start + SPAN_ROWS, prompt_tokens)
            rows_of = rows_in(reach, start, stop)
            for role, cost in zip(self.text.layers, self.layers, strict=True):
                row_flops = cost.row_flops + cost.expert_row_flops + self.score_flops(role, (start + stop) // 2)
                flops += rows_of(role.layer) * row_flops
        return flops

    @cached_property
    def prepared_key_bytes(self) -> int:
        """One index key as scoring reads it: a code of one byte a channel and a scale a group."""
        return self.text.index_head_dim + self.text.index_head_dim // GROUP

    @cached_property
    def hop_row_bytes(self) -> int:
        """A row of a hand-off with everything that may travel (engine/handoff.py)."""
        text = self.text
        four_byte = 1 + text.engram_max_ngram_size + text.hc_mult + text.index_topk + text.candidate_topk_blocks
        return 2 * text.hc_mult * text.hidden_size + 4 * four_byte

    def layer_s(self, layer: int, n_rows: int, history: int, rates: Rates, n_sequences: int = 1) -> float:
        """Seconds of n_rows rows in one layer, each with `history` positions before it; each sequence's keys
        are read once."""
        role = self.text.layers[layer]
        key_bytes = n_sequences * self.scored(role, history) * self.prepared_key_bytes
        score_s = max(n_rows * self.score_flops(role, history) / rates.flops_per_s, key_bytes / rates.bytes_per_s)
        return self.layers[layer].seconds(n_rows, rates) + score_s

    def work_s(
        self,
        layers: Collection[int],
        sides: Collection[int],
        rows_of: Callable[[int], int],
        history: int,
        rates: Rates,
        n_sequences: int = 1,
    ) -> float:
        """Seconds of some layers and key/value sides, without a step's fixed cost.

        rows_of  rows that a layer runs; the sides run those of layer 0, that is all
        """
        seconds = sum(self.sides[source].seconds(rows_of(0), rates) for source in sides)
        for layer in layers:
            if n_rows := rows_of(layer):
                seconds += self.layer_s(layer, n_rows, history, rates, n_sequences)
        return seconds

    def draft_s(self, n_requests: int, rates: Rates) -> float:
        """Seconds of a round of drafts for n_requests, their logits included."""
        n_rows = n_requests * self.text.dspark_block_size
        return self.draft.seconds(n_rows, rates) + self.head.seconds(n_rows, rates)

    def reach(self, mode: PrefillMode, prompt_tokens: int) -> Reach:
        """Which rows of a prompt each layer runs."""
        return reach_for(self.text, mode, prompt_tokens)


def _count(tensors: dict[str, TensorSpec], chosen_share: float) -> LayerCost:
    """Products and bytes of some tensors, those of the attended list and the history left out."""
    row_flops = expert_flops = read_bytes = expert_bytes = 0
    for name, spec in tensors.items():
        is_matrix = len(spec.shape) == 2 and not name.endswith(".scale")
        flops = 2 * prod(spec.shape) * (2 if spec.dtype == "I8" else 1) if is_matrix else 0  # I8: two codes
        if ".ffn.experts." in name:
            expert_flops += flops
            expert_bytes += spec.n_bytes
        else:
            row_flops += flops
            read_bytes += spec.n_bytes
    return LayerCost(row_flops, expert_flops * chosen_share, read_bytes, expert_bytes, chosen_share)


def rows_in(reach: Reach, start: int, stop: int) -> Callable[[int], int]:
    """How many of the rows start .. stop - 1 each layer runs attention and experts on."""
    return lambda layer: max(0, stop - max(start, reach.enters(layer + 1)))


def scored_sources(config: ModelConfig, work: StageLayers) -> set[int]:
    """Sources whose index keys some layer of `work` scores."""
    roles = [config.text_config.layers[layer] for layer in work.layers]
    return {role.kv_source for role in roles if role.has_indexer and role.kv_source is not None}
