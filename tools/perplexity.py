"""`rocline perplexity`: how well a model foretells a text, in nats a token. A check that weights mean what they should.

Every token is scored from the tokens before it, all layers on every row (`full`), as a request for prompt
log-probabilities runs. Logits are held a tile of rows at a time, whatever the text's length.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.model import PromptError
from rocline.engine.progress import ByteProgress, RowProgress
from rocline.engine.sampling import SamplingParams
from rocline.engine.shards import CheckpointError
from rocline.engine.text import TextTokenizer, TokenizerError
from rocline.pipeline.engine import Engine
from rocline.pipeline.placement import PlacementError
from rocline.pipeline.request import EngineError, Request
from rocline.tools.device import DEVICE_ERRORS
from rocline.tools.engine_options import add_engine_options, engine_options
from rocline.tools.files import FileError, read_text
from rocline.tools.flags import positive_int
from rocline.tools.generate import bytes_to_read
from rocline.tools.serve import ConfigurationError

EXIT_MISSED, EXIT_WRONG_INPUT = 1, 2
TEXT = Path(__file__).resolve().parent / "data" / "news_from_nowhere.txt"
BUCKET_TOKENS = 4096
# Provisional: of the shipped English text, until the release has been scored on a card.
LIMIT_NATS, LIMIT_GROWTH = 3.0, 0.20
INPUT_ERRORS = (
    *(ConfigError, ConfigurationError, TokenizerError, FileError, PromptError, CheckpointError, PlacementError),
    *DEVICE_ERRORS,
)


@dataclass
class Bucket:
    """Tokens first, first + 1, ... of a text, and the sum of their negated log-probabilities."""

    first: int
    n_tokens: int = 0
    nats: float = 0.0

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.n_tokens


@dataclass
class Score:
    """Log-probabilities of a text's tokens, added in FP64 one after the other: how they come in parts changes no bit.

    bucket_tokens  of every bucket but the last
    """

    bucket_tokens: int = BUCKET_TOKENS
    buckets: list[Bucket] = field(default_factory=list)

    def add(self, logprobs_f32: Iterable[float]) -> None:
        """Those of the next tokens."""
        for value in logprobs_f32:
            if not self.buckets or self.buckets[-1].n_tokens == self.bucket_tokens:
                self.buckets.append(Bucket(self.n_tokens))
            self.buckets[-1].n_tokens += 1
            self.buckets[-1].nats -= value

    @property
    def n_tokens(self) -> int:
        return self.buckets[-1].first + self.buckets[-1].n_tokens if self.buckets else 0

    @property
    def nats_per_token(self) -> float:
        return sum(bucket.nats for bucket in self.buckets) / self.n_tokens

    def growth(self) -> list[float]:
        """By how much each bucket is worse than the first, as a share of it. Less than half a bucket is no evidence:
        a last one so short is left out."""
        first = self.buckets[0].nats_per_token
        return [b.nats_per_token / first - 1 for b in self.buckets if b is self.buckets[0] or self._is_judged(b)]

    def _is_judged(self, bucket: Bucket) -> bool:
        return 2 * bucket.n_tokens >= self.bucket_tokens


def judge(score: Score, limit_nats: float, limit_growth: float) -> list[str]:
    """Which limits were missed, with the values, and what may be wrong; empty if none."""
    missed = []
    if not score.nats_per_token <= limit_nats:  # NaN misses too
        missed.append(
            f"{score.nats_per_token:.4f} nats/token, limit {limit_nats:g}. At the uniform value or above, weights are "
            "read wrong: swapped nibbles or scales, a file of another model. Below it: RoPE of the wrong base, "
            "Engram left out, another tokenizer"
        )
    growth = score.growth()
    worst = max(range(len(growth)), key=growth.__getitem__)
    if not growth[worst] <= limit_growth:
        missed.append(
            f"from token {score.buckets[worst].first:,} on {growth[worst]:.0%} worse than the first bucket, limit "
            f"{limit_growth:.0%}. History is read wrong: RoPE base or YaRN of the compressed layers from about 4,000 "
            "tokens on, the chain of candidate blocks past its capacity, pages of key/value rows"
        )
    return missed


def score_text(
    engine: Engine,
    text_ids: Sequence[int],
    score: Score,
    advance: Callable[[int], None] = lambda n_tokens: None,
) -> None:
    """Add every token of a text to `score`, each after the begin token and those before it.

    advance is called with the tokens of each part done. Raises PromptError for a text that does not fit the engine's
    context, EngineError where the request ends without an answer.
    """
    ids = [engine.config.bos_token_id, *text_ids]
    params = SamplingParams(temperature=0, max_tokens=1)
    stream = engine.submit(Request(prompt_ids=ids, params=params, n_logprobs=0, prompt_logprobs=True))
    try:
        for update in stream:
            if update.prompt_logprobs:
                score.add(update.prompt_logprobs.own_f32)
                advance(len(update.prompt_logprobs))
    finally:
        stream.cancel()


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "perplexity",
        description="Score a text with a model. Figures go to stdout as CSV, everything else to stderr. Exit status 0: "
        "within the limits, 1: a limit was missed, 2: wrong input.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="UTF-8 text to score (default: 160 KB of William Morris, of 1890)",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="folder of the checkpoint")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="score only the text's first N tokens (default: all)"
    )
    parser.add_argument(
        "--chunk-rows",
        type=positive_int,
        metavar="N",
        help="rows that run together; changes no bit (default: as `rocline serve`)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of CSV")

    def option(flag: str, help_text: str, **how: Any) -> None:
        parser.add_argument(flag, help=f"{help_text} (default %(default)s)", **how)

    option(
        "--bucket", "tokens that one line of the figures is of", type=positive_int, default=BUCKET_TOKENS, metavar="N"
    )
    option(
        "--limit-nats", "most nats a token that the whole text may have", type=float, default=LIMIT_NATS, metavar="X"
    )
    option(
        "--limit-growth",
        "how much worse than the first a later line may be, as a share",
        type=float,
        default=LIMIT_GROWTH,
        metavar="X",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        config = ModelConfig.load(args.model)
        text_ids = _text_ids(args, config)
        n_positions = len(text_ids) + 2  # a begin token before, and the one token that a request must have after
        options = engine_options(args, config, context=n_positions, kv_tokens=n_positions, running=1)
        with ByteProgress("weights", bytes_to_read(config, options.engram)) as loading:
            engine = Engine.open(args.model, options, advance=loading.advance)
    except INPUT_ERRORS as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    score, began_s = Score(args.bucket), time.monotonic()
    try:
        with RowProgress("scored", len(text_ids)) as progress:
            score_text(engine, text_ids, score, progress.advance)
    except PromptError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except EngineError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return EXIT_MISSED
    finally:
        engine.close()
    missed = judge(score, args.limit_nats, args.limit_growth)
    uniform = math.log(config.text_config.vocab_size)
    figures = {
        "file": str(args.file or TEXT.name),
        "device": options.device,
        "chunk_rows": options.chunk_rows,
        **figures_of(score, uniform),
        "limit_nats": args.limit_nats,
        "limit_growth": args.limit_growth,
        "missed": missed,
        "took_s": round(time.monotonic() - began_s, 3),
    }
    _print(figures, args.json)
    return EXIT_MISSED if missed else 0


def figures_of(score: Score, uniform_nats: float) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "tokens": score.n_tokens,
        "nats_per_token": score.nats_per_token,
        "uniform_nats": uniform_nats,
        "buckets": [
            {"first": b.first, "tokens": b.n_tokens, "nats_per_token": b.nats_per_token} for b in score.buckets
        ],
    }


def _print(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        rows = [*figures["buckets"], {"first": "all"} | {name: figures[name] for name in ("tokens", "nats_per_token")}]
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        f"{figures['nats_per_token']:.4f} nats/token over {figures['tokens']:,} tokens of {figures['file']}; all "
        f"tokens alike are ln(vocabulary) = {figures['uniform_nats']:.4f}, and random weights are there or above"
    ]
    lines += [f"missed: {text}" for text in figures["missed"]]
    print(*(f"perplexity: {line}" for line in lines), sep="\n", file=sys.stderr)


def shipped_ids(folder: Path, config: ModelConfig) -> list[int]:
    """The shipped text in a model's tokens. Raises TokenizerError."""
    tokenizer = TextTokenizer.load(folder, config.text_config.vocab_size)
    return tokenizer.encode(TEXT.read_text("ascii"))


def _text_ids(args: argparse.Namespace, config: ModelConfig) -> list[int]:
    """What is to be scored. Raises TokenizerError, FileError, and PromptError for a text that cannot be.

    The shipped text is cut where the model's context ends, any other is refused: nobody asked for a part of it.
    """
    most = config.text_config.max_position_embeddings - 2
    if args.file is None:
        return shipped_ids(args.model, config)[: min(args.max_tokens or most, most)]
    tokenizer = TextTokenizer.load(args.model, config.text_config.vocab_size)
    ids = tokenizer.encode(read_text(args.file))
    if not ids:
        raise PromptError(f"{args.file}: empty; name a text of at least one token")
    wanted = ids[: args.max_tokens]
    if len(wanted) > most:
        raise PromptError(f"{args.file}: {len(wanted):,} tokens, at most {most:,} fit the context: --max-tokens {most}")
    return wanted
