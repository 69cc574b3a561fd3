"""The checkpoint's layout: every tensor that a configuration's files hold, with its dtype and shape.

Spec: backbone.md section 12, dspark.md section 2, vision.md section 2. Names, dtypes and shapes are
those on disk; nothing is renamed on the way in.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from rocline.engine.config import GROUP, ModelConfig, TextConfig, VisionConfig

Component = Literal[
    "embed",
    "head",
    "norm",
    "attention",  # the compressor included
    "indexer",
    "hc",
    "gate",
    "gate_vl",  # the router's image bias
    "experts",
    "shared",
    "engram",
    "draft",
    "vision",
    "unused",  # present in the release, read by no forward pass
]

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}  # I8: two E2M1 codes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor must look like on disk.

    dtype      the safetensors name; a key of DTYPE_BYTES
    shape      as stored: an I8 tensor holds two codes a byte along its last axis
    component  what it belongs to; a loader leaves out whole components
    shard      the file it has in the release's own split, from 1 (its map in section 12)
    layer      its backbone layer, None elsewhere
    """

    dtype: str
    shape: tuple[int, ...]
    component: Component
    shard: int
    layer: int | None = None

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of `config`, by name: backbone, Engram, draft stages and vision tower."""
    text, tensors = config.text_config, dict[str, TensorSpec]()
    n_layers, n_drafts = text.num_hidden_layers, text.num_nextn_predict_layers
    if config.vision_config:
        _vision(_Section(tensors, shard=1), config.vision_config, text.hidden_size)
        delimiters = _Section(tensors, shard=2)
        for name in ("image_start", "image_newline", "image_end"):
            delimiters.bf16(name, "vision", text.hidden_size)
    _Section(tensors, shard=2).bf16("embed.weight", "embed", text.vocab_size, text.hidden_size)
    for layer in range(n_layers):
        _layer(tensors, text, layer)
    last = _Section(tensors, shard=n_layers + 3)
    last.bf16("head.weight", "head", text.vocab_size, text.hidden_size)
    last.bf16("norm.weight", "norm", text.hidden_size)
    for stage in range(n_drafts):
        shard = n_layers + 4 + stage
        _draft(_Section(tensors, f"mtp.{stage}.", shard, sole_component="draft"), text, stage)
    for table, layer in enumerate(text.engram_layer_ids):
        shard = n_layers + 4 + n_drafts + table
        _engram(_Section(tensors, f"layers.{layer}.", shard, layer), text, table)
    return tensors


@dataclass(frozen=True)
class _Section:
    """Adds tensors under one prefix, in one shard. A sole component takes in all of them that are read."""

    tensors: dict[str, TensorSpec]
    prefix: str = ""
    shard: int = 0
    layer: int | None = None
    sole_component: Component | None = None

    def add(self, name: str, component: Component, dtype: str, *shape: int) -> None:
        if self.sole_component and component != "unused":
            component = self.sole_component
        self.tensors[self.prefix + name] = TensorSpec(dtype, shape, component, self.shard, self.layer)

    def bf16(self, name: str, component: Component, *shape: int) -> None:
        self.add(name, component, "BF16", *shape)

    def f32(self, name: str, component: Component, *shape: int) -> None:
        self.add(name, component, "F32", *shape)

    def fp8(self, name: str, component: Component, n_out: int, n_in: int) -> None:
        """E4M3 codes with one scale per 32 x 32 tile; config.py holds every width to whole tiles."""
        self.add(f"{name}.weight", component, "F8_E4M3", n_out, n_in)
        self.add(f"{name}.scale", component, "F8_E8M0", n_out // GROUP, n_in // GROUP)

    def fp4(self, name: str, component: Component, n_out: int, n_in: int) -> None:
        """Packed E2M1 codes with one scale per row and 32 inputs."""
        self.add(f"{name}.weight", component, "I8", n_out, n_in // 2)
        self.add(f"{name}.scale", component, "F8_E8M0", n_out, n_in // GROUP)


def _layer(tensors: dict[str, TensorSpec], text: TextConfig, layer: int) -> None:
    role, section = text.layers[layer], _Section(tensors, f"layers.{layer}.", layer + 3, layer)
    _block(section, text, text.n_routed_experts, "gate_vl")
    hidden, head_dim, index_dim = text.hidden_size, text.head_dim, text.index_head_dim
    if role.has_indexer:
        section.fp8("attn.indexer.wq_b", "indexer", text.index_n_heads * index_dim, text.q_lora_rank)
        section.bf16("attn.indexer.weights_proj.weight", "indexer", text.index_n_heads, hidden)
    if role.owns_rows:
        section.bf16("attn.indexer.wk.weight", "indexer", index_dim, head_dim)
        section.bf16("attn.indexer.k_norm.weight", "indexer", index_dim)
        section.bf16("attn.compressor.wkv.weight", "attention", head_dim, hidden)
        section.bf16("attn.compressor.norm.weight", "attention", head_dim)
        if role.ratio > 1:  # a group of one has nothing to gate
            section.bf16("attn.compressor.wgate.weight", "attention", head_dim, hidden)


def _block(section: _Section, text: TextConfig, n_experts: int, image_bias: Component) -> None:
    """What a backbone layer and a draft stage share: window attention, mHC and experts."""
    hidden, heads_dim = text.hidden_size, text.num_attention_heads * text.head_dim
    out_width = text.o_groups * text.o_lora_rank
    section.fp8("attn.wq_a", "attention", text.q_lora_rank, hidden)
    section.bf16("attn.q_norm.weight", "attention", text.q_lora_rank)
    section.fp8("attn.wq_b", "attention", heads_dim, text.q_lora_rank)
    section.fp8("attn.wkv", "attention", text.head_dim, hidden)
    section.bf16("attn.kv_norm.weight", "attention", text.head_dim)
    section.fp8("attn.wo_a", "attention", out_width, heads_dim // text.o_groups)
    section.fp8("attn.wo_b", "attention", hidden, out_width)
    section.f32("attn.attn_sink", "attention", text.num_attention_heads)
    n_mix = text.hc_mult * (text.hc_mult + 2)  # pre and post of each stream, and the stream-to-stream matrix
    for sublayer in ("attn", "ffn"):
        section.bf16(f"{sublayer}_norm.weight", "norm", hidden)
        section.f32(f"hc_{sublayer}_fn", "hc", n_mix, text.hc_mult * hidden)
        section.f32(f"hc_{sublayer}_base", "hc", n_mix)
        section.f32(f"hc_{sublayer}_scale", "hc", 3)
    section.bf16("ffn.gate.weight", "gate", n_experts, hidden)
    section.f32("ffn.gate.bias", "gate", n_experts)
    section.add("ffn.gate.bias_vl", image_bias, "F32", n_experts)
    width = text.moe_intermediate_size
    for name, n_out, n_in in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
        section.fp8(f"ffn.shared_experts.{name}", "shared", n_out, n_in)
        for expert in range(n_experts):
            section.fp4(f"ffn.experts.{expert}.{name}", "experts", n_out, n_in)


def _engram(section: _Section, text: TextConfig, table: int) -> None:
    n_rows, width = text.engram_num_embeddings[table], text.engram_head_dim
    section.add("engram.embed.weight", "engram", "F8_E4M3", n_rows, width)
    section.add("engram.embed.scale", "engram", "F8_E8M0", n_rows, width // GROUP)  # a row's own, not a tile's
    section.fp8("engram.wkv", "engram", (text.hc_mult + 1) * text.hidden_size, text.engram_width)
    section.bf16("engram.q_weight", "engram", text.hc_mult, text.hidden_size)
    section.bf16("engram.k_weight", "engram", text.hc_mult, text.hidden_size)


def _draft(section: _Section, text: TextConfig, stage: int) -> None:
    hidden, vocab, rank = text.hidden_size, text.vocab_size, text.dspark_markov_rank
    _block(section, text, text.dspark_n_routed_experts, "unused")  # a draft is never an image row
    if stage == 0:
        section.fp8("main_proj", "draft", hidden, len(text.dspark_target_layer_ids) * hidden)
        section.bf16("main_norm.weight", "draft", hidden)
    if stage == text.num_nextn_predict_layers - 1:
        section.bf16("norm.weight", "draft", hidden)
        section.bf16("markov_head.embed.weight", "draft", vocab, rank)
        section.bf16("markov_head.head.weight", "draft", vocab, rank)
        section.bf16("confidence_head.proj.weight", "draft", 1, hidden + rank)


def _vision(section: _Section, vision: VisionConfig, text_hidden: int) -> None:
    hidden, width = vision.hidden_size, vision.intermediate_size

    def linear(name: str, n_out: int, n_in: int) -> None:
        section.bf16(f"{name}.weight", "vision", n_out, n_in)
        section.bf16(f"{name}.bias", "vision", n_out)

    linear("vision.patch_embed.proj", hidden, 3 * vision.patch_size**2)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        section.bf16(f"{prefix}.norm1.weight", "vision", hidden)
        section.bf16(f"{prefix}.norm2.weight", "vision", hidden)
        linear(f"{prefix}.attn.wqkv", 3 * hidden, hidden)
        linear(f"{prefix}.attn.wo", hidden, hidden)
        section.bf16(f"{prefix}.mlp.w1.weight", "vision", 2 * width, hidden)
        section.bf16(f"{prefix}.mlp.w2.weight", "vision", hidden, width)
    section.bf16("vision.norm.weight", "vision", hidden)
    linear("aligner.w1", text_hidden, vision.downsample_ratio**2 * hidden)
    linear("aligner.w2", text_hidden, text_hidden)
