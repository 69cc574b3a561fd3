"""The model's configuration: HF config.json into frozen dataclasses, every relation checked where it is built.

Spec: backbone.md section 1.1. Field names are the file's own. Nothing assumes the release's numbers:
what a layer does follows from the lists (`ModelConfig.layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from rocline.engine.ngrams import NgramTable, ngram_tables

GROUP = 32  # channels that share a scale in every quantised activation, and the side of a weight tile


class ConfigError(ValueError):
    """config.json is missing, unreadable, or breaks a relation the model needs."""


def _require(good: bool, field: str, value: object, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{field} = {value}: {allowed}")


def _require_all_positive(config: object, prefix: str, fields: Sequence[str]) -> None:
    for field in fields:
        value = getattr(config, field)
        _require(value > 0, prefix + field, value, "must be positive")


def _require_layer_list(field: str, ids: Sequence[int], n_layers: int) -> None:
    ascending = all(a < b for a, b in pairwise(ids))
    _require(
        ascending and all(0 <= i < n_layers for i in ids),
        field,
        list(ids),
        f"must be strictly ascending layer ids below num_hidden_layers = {n_layers}",
    )


@dataclass(frozen=True)
class QuantizationConfig:
    quant_method: str
    fmt: str
    activation_scheme: str
    weight_block_size: tuple[int, int]
    scale_fmt: str
    expert_dtype: str

    def __post_init__(self) -> None:
        only = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": (GROUP, GROUP),
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
        for field, want in only.items():
            value = getattr(self, field)
            _require(value == want, f"quantization_config.{field}", value, f"only {want!r} is supported")


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' table. No attention scale (mscale) exists in this model."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _require(self.rope_type == "yarn", "rope_scaling.rope_type", self.rope_type, "only 'yarn' is supported")
        _require_all_positive(
            self, "rope_scaling.", ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        )


@dataclass(frozen=True)
class VisionConfig:
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        fields = [f for f in self.__dataclass_fields__ if f != "max_wh_ratio"]
        _require_all_positive(self, "vision_config.", fields)
        _require(
            self.hidden_size % self.num_attention_heads == 0,
            "vision_config.hidden_size",
            self.hidden_size,
            f"must be a multiple of num_attention_heads = {self.num_attention_heads}",
        )


@dataclass(frozen=True)
class TextConfig:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    hidden_act: Literal["silu"] = "silu"
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    n_group: int | None = None
    topk_group: int | None = None

    def __post_init__(self) -> None:
        self._check_widths()
        self._check_layer_lists()
        self._check_engram()
        self._check_draft()

    def _check_widths(self) -> None:
        maybe_zero = ("num_nextn_predict_layers", "engram_pad_token_id")
        numbers = [
            f
            for f, spec in self.__dataclass_fields__.items()
            if spec.type in ("int", "float") and f not in maybe_zero and not f.startswith("dspark_")
        ]
        _require_all_positive(self, "", [f for f in numbers if f != "candidate_source_layer_id"])
        for field, want in (
            ("num_key_value_heads", 1),
            ("n_shared_experts", 1),
            ("norm_topk_prob", True),
            ("attention_bias", False),
            ("tie_word_embeddings", False),
        ):
            _require(getattr(self, field) == want, field, getattr(self, field), f"only {want} is supported")
        for field in ("n_group", "topk_group"):
            _require(
                getattr(self, field) in (None, 1),
                field,
                getattr(self, field),
                "routing is not grouped; omit it",
            )
        for field in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
            value = getattr(self, field)
            _require(value % GROUP == 0, field, value, f"must be a multiple of {GROUP}, the quantisation group")
        heads, groups = self.num_attention_heads, self.o_groups
        _require(heads % groups == 0, "num_attention_heads", heads, f"must be a multiple of o_groups = {groups}")
        out_width = groups * self.o_lora_rank
        _require(out_width % GROUP == 0, "o_groups * o_lora_rank", out_width, f"must be a multiple of {GROUP}")
        rope, limit = self.qk_rope_head_dim, min(self.head_dim, self.index_head_dim)
        _require(rope % 2 == 0 and rope <= limit, "qk_rope_head_dim", rope, f"must be even and at most {limit}")
        chosen, experts = self.num_experts_per_tok, self.n_routed_experts
        _require(chosen <= experts, "num_experts_per_tok", chosen, f"at most n_routed_experts = {experts}")

    def _check_layer_lists(self) -> None:
        n_layers, n_draft = self.num_hidden_layers, self.num_nextn_predict_layers
        _require(n_draft >= 0, "num_nextn_predict_layers", n_draft, "must not be negative")
        want = n_layers + n_draft
        _require(
            len(self.compress_ratios) == want,
            "compress_ratios",
            f"{len(self.compress_ratios)} entries",
            f"must have num_hidden_layers + num_nextn_predict_layers = {want}",
        )
        ratios, drafts = self.compress_ratios[:n_layers], self.compress_ratios[n_layers:]
        _require(all(r in (0, 1, 2) for r in ratios), "compress_ratios", list(ratios), "entries must be 0, 1 or 2")
        _require(not any(drafts), "compress_ratios", list(drafts), "draft stages must have ratio 0")
        for field in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            _require_layer_list(field, getattr(self, field), n_layers)
        for owner in self.kv_source_layer_ids:
            _require(
                ratios[owner] > 0,
                "kv_source_layer_ids",
                owner,
                "that layer's compress_ratio is 0: it has no rows",
            )
            _require(
                owner in self.index_source_layer_ids,
                "kv_source_layer_ids",
                owner,
                "a key/value source must also be in index_source_layer_ids",
            )
        for layer, ratio in enumerate(ratios):
            self._check_sources(layer, ratio)
        producer = self.candidate_source_layer_id
        _require(
            producer in self.kv_source_layer_ids and ratios[producer] == 1,
            "candidate_source_layer_id",
            producer,
            f"must be a key/value source with compress_ratio 1, of {list(self.kv_source_layer_ids)}",
        )
        surviving = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
        _require(
            surviving >= self.index_topk,
            "index_topk",
            self.index_topk,
            f"at most (candidate_topk_blocks - 1) * candidate_block_size + 1 = {surviving}",
        )

    def _check_sources(self, layer: int, ratio: int) -> None:
        if ratio == 0:
            _require(layer not in self.index_source_layer_ids, "index_source_layer_ids", layer, "its ratio is 0")
            return
        kv_source = _nearest(self.kv_source_layer_ids, layer)
        index_source = _nearest(self.index_source_layer_ids, layer)
        _require(
            kv_source is not None and self.compress_ratios[kv_source] == ratio,
            "kv_source_layer_ids",
            list(self.kv_source_layer_ids),
            f"layer {layer} (ratio {ratio}) reads compressed rows before a source of that ratio",
        )
        _require(
            index_source is not None and _nearest(self.kv_source_layer_ids, index_source) == kv_source,
            "index_source_layer_ids",
            list(self.index_source_layer_ids),
            f"layer {layer} needs an index source between its key/value source {kv_source} and itself",
        )

    def _check_engram(self) -> None:
        _require(self.engram_head_dim % GROUP == 0, "engram_head_dim", self.engram_head_dim, f"multiple of {GROUP}")
        _require(self.engram_max_ngram_size >= 2, "engram_max_ngram_size", self.engram_max_ngram_size, "at least 2")
        pad = self.engram_pad_token_id
        _require(0 <= pad < self.vocab_size, "engram_pad_token_id", pad, f"a token id below {self.vocab_size}")
        rows = tuple(table.n_rows for table in self.engram_tables)
        _require(
            self.engram_num_embeddings == rows,
            "engram_num_embeddings",
            list(self.engram_num_embeddings),
            f"the bucket primes of this configuration sum to {list(rows)}",
        )

    def _check_draft(self) -> None:
        if self.num_nextn_predict_layers == 0:
            return
        fields = (
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
            "dspark_num_experts_per_tok",
        )
        _require_all_positive(self, "", fields)
        _require_layer_list("dspark_target_layer_ids", self.dspark_target_layer_ids, self.num_hidden_layers)
        _require(len(self.dspark_target_layer_ids) > 0, "dspark_target_layer_ids", [], "must name at least one layer")
        chosen, experts = self.dspark_num_experts_per_tok, self.dspark_n_routed_experts
        _require(chosen <= experts, "dspark_num_experts_per_tok", chosen, f"at most {experts}")
        noise = self.dspark_noise_token_id
        _require(
            0 <= noise < self.vocab_size,
            "dspark_noise_token_id",
            noise,
            f"a token id below {self.vocab_size}",
        )

    @cached_property
    def engram_tables(self) -> tuple[NgramTable, ...]:
        return ngram_tables(
            self.engram_layer_ids,
            self.engram_max_ngram_size,
            self.engram_n_heads,
            self.engram_vocab_size,
            self.engram_compressed_vocab_size,
        )

    @property
    def engram_width(self) -> int:
        """Channels of one token's concatenated table rows."""
        return self.engram_head_dim * self.engram_n_heads * (self.engram_max_ngram_size - 1)

    @cached_property
    def layers(self) -> tuple[LayerRole, ...]:
        return tuple(self._role(layer) for layer in range(self.num_hidden_layers))

    def _role(self, layer: int) -> LayerRole:
        ratio = self.compress_ratios[layer]
        kv_source = _nearest(self.kv_source_layer_ids, layer) if ratio else None
        producer = self.candidate_source_layer_id
        has_indexer = layer in self.index_source_layer_ids
        return LayerRole(
            layer=layer,
            ratio=ratio,
            kv_source=kv_source,
            index_source=_nearest(self.index_source_layer_ids, layer) if ratio else None,
            has_indexer=has_indexer,
            writes_candidates=layer == producer,
            reads_candidates=has_indexer and layer > producer and kv_source == producer,
            engram=self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None,
        )


@dataclass(frozen=True)
class LayerRole:
    """What one layer does, read off the lists.

    kv_source     layer whose compressed rows it attends, itself for an owner, None where ratio is 0
    index_source  layer whose selection it attends, itself where it has an indexer
    engram        index of its Engram table, or None
    """

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    has_indexer: bool
    writes_candidates: bool
    reads_candidates: bool
    engram: int | None

    @property
    def owns_rows(self) -> bool:
        return self.ratio > 0 and self.kv_source == self.layer

    @property
    def kind(self) -> Literal["window", "full", "reindex", "reuse"]:
        """Its row of the table in backbone.md section 0."""
        if self.ratio == 0:
            return "window"
        return "full" if self.owns_rows else "reindex" if self.has_indexer else "reuse"


@dataclass(frozen=True)
class ModelConfig:
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantization_config: QuantizationConfig
    text_config: TextConfig
    model_type: Literal["deepseek_v41"]
    vision_config: VisionConfig | None = None

    def __post_init__(self) -> None:
        for field in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value, vocab = getattr(self, field), self.text_config.vocab_size
            _require(0 <= value < vocab, field, value, f"must be a token id below vocab_size = {vocab}")

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read FOLDER/config.json. Raises ConfigError with the field, its value and what is allowed."""
        path = Path(folder) / "config.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; name a folder that holds a model") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _nearest(ids: Sequence[int], layer: int) -> int | None:
    """The largest of `ids` at or below `layer`."""
    return max((i for i in ids if i <= layer), default=None)
