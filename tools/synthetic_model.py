"""`--model synthetic:SEED` where a checkpoint's folder is expected: noise of the release's sizes (engine/synthetic.py),
with words that are made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rocline.engine.config import ModelConfig
from rocline.engine.release import RELEASE_CONFIG
from rocline.engine.synthetic import N_STORES, SyntheticWeights, seed_of
from rocline.hip_kernels.driver import devices
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.tools.demo_tokenizer import tokenizer_json


def synthetic_weights(
    config: ModelConfig, seed: int, n_stores: int, options: Options, is_skewed: bool = False
) -> SyntheticWeights:
    """Made on the GPU of the stage that asks for them. Raises HipError without a GPU that options want."""
    kind = devices()[0].torch_device.type if options.device == "hip" else "cpu"
    return SyntheticWeights(config, seed, n_stores, torch.device(kind), is_skewed)


@contextmanager
def files_of(model: str) -> Iterator[Path]:
    """A checkpoint's folder as it is. Of synthetic:SEED one that lasts as long as the context: the release's
    config.json, and the demo's tokenizer with made-up words for the ids that it lacks.

    Raises ConfigError for a SEED that is none.
    """
    seed = seed_of(model)
    if seed is None:
        yield Path(model)
        return
    with TemporaryDirectory(prefix="rocline-") as parent:
        folder = Path(parent) / f"synthetic:{seed}, stores={N_STORES}"  # servers tell clients this name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(RELEASE_CONFIG))
        config = ModelConfig.load(folder)
        (folder / "tokenizer.json").write_bytes(stretched_tokenizer(config.text_config.vocab_size))
        yield folder


def open_engine(model: str, folder: Path, options: Options) -> Engine:
    """folder: files_of(model). Raises what Engine.open does."""
    seed = seed_of(model)
    if seed is None:
        return Engine.open(folder, options)
    config = ModelConfig.load(folder)
    return Engine(config, synthetic_weights(config, seed, N_STORES, options), options)


def stretched_tokenizer(vocab_size: int) -> bytes:
    """The demo's tokenizer.json with vocab_size tokens: ` id4070` and so on, which no text becomes, before the markers
    at its end. Raises ValueError for fewer tokens than the demo's."""
    tokenizer = json.loads(tokenizer_json())
    vocab, first = tokenizer["model"]["vocab"], len(tokenizer["model"]["vocab"])
    late = [added for added in tokenizer["added_tokens"] if added["id"] >= first]
    n_more = vocab_size - first - len(late)
    if n_more < 0:
        raise ValueError(f"{vocab_size} tokens: the demo's tokenizer has {first + len(late)}")
    vocab |= {f"Ġid{token}": token for token in range(first, first + n_more)}
    for added in late:
        added["id"] += n_more
    return json.dumps(tokenizer).encode()
