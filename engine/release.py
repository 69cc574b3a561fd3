"""The release's configuration as data, and its checkpoint's outline: every header, no weights.

Spec: backbone.md sections 1.1 and 12. The outline lets opening, checking and planning be tried at full
size on any disk whose file system has sparse files.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from rocline.engine.config import ModelConfig
from rocline.engine.layout import TensorSpec, expected_tensors

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

RELEASE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": _TEXT,
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def release_config() -> ModelConfig:
    return msgspec.convert(RELEASE_CONFIG, ModelConfig)


def write_release_skeleton(folder: str | Path) -> None:
    """Write the release's config.json, index and 48 shards into `folder`: 510 GB apparent, a few MB on disk.

    The shards are sparse, so every weight reads as zero bytes. Raises OSError where the file system cannot
    hold them (no sparse files, or a file size limit below 102 GB).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[int, dict[str, TensorSpec]] = {}
    for name, spec in expected_tensors(release_config()).items():
        shards.setdefault(spec.shard, {})[name] = spec
    file_of: dict[str, str] = {}
    for number, tensors in sorted(shards.items()):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_sparse_shard(folder / file, tensors)
        file_of.update(dict.fromkeys(tensors, file))
    n_bytes = sum(spec.n_bytes for tensors in shards.values() for spec in tensors.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(file_of.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(RELEASE_CONFIG, indent=2))


def _write_sparse_shard(path: Path, tensors: dict[str, TensorSpec]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors.items():
        begin, end = end, end + spec.n_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format pads the header so that the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
