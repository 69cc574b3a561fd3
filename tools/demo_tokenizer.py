"""The demo checkpoint's tokenizer: the release's shape and marker strings with 4,096 entries.

data/demo_tokenizer.json is committed because its training text, the standard library of one Python, differs
from patch release to patch release. `python -m rocline.tools.demo_tokenizer` writes it anew on CORPUS_PYTHON.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
# Ids follow the release's order: the first three, then the byte-level pieces, then everything else added.
ADDED_SPECIAL = (
    *("<｜System｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>", "<|EOT|>"),
    *("<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"),
    *("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
)
# Added but not flagged special, as in the release: a decoder that skips special tokens still shows them.
ADDED_VISIBLE = (
    *("<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>"),
    *("<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>", IMAGE),
)

CORPUS_PYTHON = "3.11.7"
CORPUS_SHA256 = "4ad68484e596ffb80530245843a7a0b51a082293e040a9ee5a60a948d00d5dc2"

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    _ASCII_PUNCTUATION + r"[A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE over `texts` with the release's pre-tokeniser and markers (io.md Part 1).

    The result depends on the text alone. It has fewer than `vocab_size` entries where the text offers too
    few merges.
    """
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_SPECIAL) - len(ADDED_VISIBLE),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_added(text, special=True) for text in (BEGIN, END, PAD)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([_added(text, special=True) for text in ADDED_SPECIAL])
    tokenizer.add_tokens([_added(text, special=False) for text in ADDED_VISIBLE])
    return tokenizer


def _added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)


def corpus() -> list[str]:
    """Sources of the running Python's top-level modules and the text of its language reference."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [*sorted(stdlib.glob("*.py")), stdlib / "pydoc_data" / "topics.py"]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def corpus_sha256(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def tokenizer_json() -> bytes:
    """The committed tokenizer.json, the one every demo checkpoint gets."""
    return resources.files("rocline.tools").joinpath("data", "demo_tokenizer.json").read_bytes()


def load() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json().decode())


def main() -> int:
    texts = corpus()
    sha256 = corpus_sha256(texts)
    if sha256 != CORPUS_SHA256:
        print(
            f"demo_tokenizer: the corpus of Python {sys.version.split()[0]} has SHA-256 {sha256}, "
            f"want {CORPUS_SHA256}; run Python {CORPUS_PYTHON}, or record the new text here",
            file=sys.stderr,
        )
        return 1
    target = Path(__file__).resolve().parent / "data" / "demo_tokenizer.json"
    target.write_text(train(texts).to_str(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
