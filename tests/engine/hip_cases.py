"""Models for a GPU: `micro` as it is, and one that the index kernels fit."""

import json
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from rocline.engine.answer import Answer, Ask, answer
from rocline.engine.config import ModelConfig
from rocline.engine.handoff import RowKind, RowSpan, reach_for
from rocline.engine.layers.head import embed_rows
from rocline.engine.layout import expected_tensors
from rocline.engine.model import Model
from rocline.tools.demo_weights import DemoWeights

PAGE = 128
OPTIONS = {"kv_tokens": 4096, "page_positions": PAGE, "arena_bytes": 256 << 20, "poison": True}
# What index kernels want, q_lora_rank = head_dim = index_head_dim for DemoWeights, and whole groups of 32 to round.
FITTING = {"head_dim": 128, "q_lora_rank": 128, "index_head_dim": 128, "qk_rope_head_dim": 64, "o_lora_rank": 64}


VOCABULARY = ("vocab_size", "engram_compressed_vocab_size", "engram_pad_token_id")


def write_fitting_model(micro_model: Path, folder: Path, words_of: Path | None = None, **changes: object) -> Path:
    """A checkpoint of micro's layers with index vectors of the release's width; its words are noise.

    words_of  another checkpoint, whose tokenizer it shall have; None: micro, whose has no words to chat in
    changes   to the text configuration
    """
    folder.mkdir()
    words = words_of or micro_model
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (words / name).exists():
            shutil.copy(words / name, folder)
    config, of_words = (json.loads((path / "config.json").read_text()) for path in (micro_model, words))
    layers = config["text_config"] | FITTING | {name: of_words["text_config"][name] for name in VOCABULARY} | changes
    config = of_words | {"text_config": layers}
    (folder / "config.json").write_text(json.dumps(config))
    model_config = msgspec.convert(config, ModelConfig)
    weights = DemoWeights(model_config.text_config, seed=5, silent_ids=[0])
    save_file(weights.tensors(expected_tensors(model_config)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answer_of(model: Model, ids: list[int], ask: Ask) -> Answer:
    """What becomes of a prompt's last row, chosen where the model is."""
    handle = model.open()
    model.pages.grow([(handle.page_table, len(ids))])
    reach = reach_for(model.config.text_config, "full", len(ids))
    spans = (RowSpan(handle.number, 0, len(ids), RowKind.PREFILL, reach, len(ids) - 1),)
    all_ids = {handle.number: ids}
    with torch.inference_mode(), model.at_the_ends():
        engram = model.engram_rows(spans, all_ids)
        rows = embed_rows(model.config.text_config, model.placed.embed_bf16, spans, all_ids, engram)
        for stage in model.stages:
            rows = stage.run(rows)
        out = answer(model.config.text_config, model.placed, rows, {handle.number: ask})[handle.number]
        rows.release()
    model.close(handle)
    return out


def run(model: Model, ids: list[int], n_decoded: int = 3, **how: object) -> bytes:
    """Bits of the logits after a prompt and after each of some tokens."""
    handle = model.open()
    rows = [model.prefill(handle, ids, **how)[-1]]
    rows += [model.decode([(handle, 20 + token)]) for token in range(n_decoded)]
    model.close(handle)
    assert all(logits.finite_u8.all() for logits in rows)
    return b"".join(logits.logits_f32[-1:].numpy().tobytes() for logits in rows)
