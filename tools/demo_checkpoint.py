"""`rocline demo-checkpoint`: a small checkpoint of the model's architecture, complete and repeatable.

The release's configuration with its 40 layer roles, narrow widths, shaped random weights (demo_weights.py)
in the release's formats and file split, and a tokenizer of its own (demo_tokenizer.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file

from rocline.engine.config import ModelConfig
from rocline.engine.engram import compressed_id_map
from rocline.engine.layout import TensorSpec, expected_tensors
from rocline.engine.ngrams import ngram_tables
from rocline.engine.release import RELEASE_CONFIG, write_release_skeleton
from rocline.tools import demo_tokenizer
from rocline.tools.demo_weights import DemoWeights
from rocline.tools.files import explained

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2
CONTEXT = 65536
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 48,  # a group's rows end inside a 32-row weight tile
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "max_position_embeddings": CONTEXT,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
    "candidate_topk_blocks": 64,  # 512 positions: the restriction already changes a page of text
    "candidate_block_size": 8,
    "engram_vocab_size": 2000,
    "engram_head_dim": 32,
}
_NO_DRAFT: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 0,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [],
    "dspark_markov_rank": 0,
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
}


def demo_config() -> dict[str, Any]:
    """config.json of the demo checkpoint: the release's, narrower, without draft stages and vision tower."""
    tokenizer = demo_tokenizer.load()
    release_text = RELEASE_CONFIG["text_config"]
    text = release_text | _TEXT | _NO_DRAFT
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    yarn = text["rope_scaling"]
    text["rope_scaling"] = yarn | {"original_max_position_embeddings": CONTEXT // yarn["factor"]}
    text["vocab_size"] = tokenizer.get_vocab_size()
    text["engram_compressed_vocab_size"] = int(compressed_id_map(tokenizer).max()) + 1
    text["engram_num_embeddings"] = [
        table.n_rows
        for table in ngram_tables(
            text["engram_layer_ids"],
            text["engram_max_ngram_size"],
            text["engram_n_heads"],
            text["engram_vocab_size"],
            text["engram_compressed_vocab_size"],
        )
    ]
    config = {field: value for field, value in RELEASE_CONFIG.items() if field != "vision_config"}
    return config | {"image_token_id": tokenizer.token_to_id(demo_tokenizer.IMAGE), "text_config": text}


def write_demo_checkpoint(folder: Path, seed: int) -> int:
    """Write the demo checkpoint into `folder`, made if absent; returns its bytes of weights.

    The same seed gives the same bytes. config.json comes last, so a folder that has one is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    config_json = demo_config()
    config = msgspec.convert(config_json, ModelConfig)
    shards: dict[int, dict[str, TensorSpec]] = {}
    for name, spec in expected_tensors(config).items():
        shards.setdefault(spec.shard, {})[name] = spec
    markers = demo_tokenizer.load().get_added_tokens_decoder()
    weights, file_of = DemoWeights(config.text_config, seed, silent_ids=list(markers)), dict[str, str]()
    for number, specs in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(weights.tensors(specs), folder / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(specs, file))
    n_bytes = sum(spec.n_bytes for specs in shards.values() for spec in specs.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(file_of.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    (folder / "tokenizer.json").write_bytes(demo_tokenizer.tokenizer_json())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "generation_config.json", _generation_config(config_json))
    _write_json(folder / "config.json", config_json)
    return n_bytes


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": demo_tokenizer.BEGIN,
        "eos_token": demo_tokenizer.END,
        "pad_token": demo_tokenizer.PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _generation_config(config_json: dict[str, Any]) -> dict[str, Any]:
    copied = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    sampling = {"_from_model_config": True, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    return sampling | {field: config_json[field] for field in copied}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo-checkpoint",
        description="Write a small checkpoint of the model's architecture with random weights, 18 MB. Exit status 1: "
        "it could not be written to its end, 2: wrong input.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="where to write; made if absent, else it must be empty"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that already holds files")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights (default %(default)s)")
    what.add_argument(
        "--release-skeleton",
        action="store_true",
        help="write the release's headers as sparse files instead: full size, all weights zero",
    )


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds_files = any(folder.iterdir())
    except OSError as error:
        print(f"demo-checkpoint: {explained(error)}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    if holds_files and not args.force:
        print(f"demo-checkpoint: {folder} already holds files; name another folder, or add --force", file=sys.stderr)
        return EXIT_WRONG_INPUT
    try:
        if args.release_skeleton:
            write_release_skeleton(folder)
            said = "the release's headers, no weights"
        else:
            said = f"{write_demo_checkpoint(folder, args.seed) / 1e6:.1f} MB of weights, seed {args.seed}"
    except OSError as error:
        print(f"demo-checkpoint: {explained(error, error.filename or folder)}", file=sys.stderr)
        return EXIT_FAILED
    print(f"demo-checkpoint: wrote {folder}: {said}", file=sys.stderr)
    return 0
