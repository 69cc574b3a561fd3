"""`rocline generate`: continue a prompt. Text streams to stdout, progress and figures go to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.generation import Generation, GenerationError, check_prompt
from rocline.engine.layout import expected_tensors
from rocline.engine.model import CHUNK_ROWS, Model, PrefillMode, PromptError
from rocline.engine.progress import ByteProgress, RowProgress
from rocline.engine.sampling import SamplingError, SamplingParams
from rocline.engine.shards import CheckpointError
from rocline.engine.text import Detokenizer, TextTokenizer, TokenizerError
from rocline.engine.weights import NOT_LOADED, EngramHome
from rocline.tools.device import DEVICE_ERRORS, add_device_options, check_device_options
from rocline.tools.files import FileError, read_bytes, text_of
from rocline.tools.flags import positive_int

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2
INPUT_ERRORS = (
    *(SamplingError, ConfigError, TokenizerError, FileError, PromptError, CheckpointError),
    *DEVICE_ERRORS,
)
# What a terminal would obey is shown as a picture of itself: output is data, and may be anything.
_TERMINAL_SAFE = {code: 0x2400 + code for code in range(0x20) if code not in b"\n\t"}
_TERMINAL_SAFE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def add_parser(subparsers: Any) -> None:
    default = SamplingParams()
    parser = subparsers.add_parser(
        "generate",
        description="Continue a prompt. The text goes to stdout as it comes, everything else to stderr. Exit status 0: "
        "done, 1: failed on the way, 2: wrong input.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to continue, taken as it is: no control token, nothing added"
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 file of the text to continue; - is stdin")
    prompt.add_argument(
        "--ids-file",
        metavar="FILE",
        help="file of token ids to continue: a JSON list, or with spaces between; - is stdin",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")

    def option(flag: str, help_text: str, **how: Any) -> None:
        group.add_argument(flag, help=f"{help_text} (default %(default)s)", **how)

    group = parser.add_argument_group("sampling")
    option("--max-tokens", "most tokens of output", type=int, default=default.max_tokens, metavar="N")
    option(
        "--temperature", "of sampling; 0: always the best token", type=float, default=default.temperature, metavar="X"
    )
    option("--top-k", "how many of the best tokens are kept; -1: all", type=int, default=default.top_k, metavar="N")
    option("--top-p", "share of the probability that is kept, 0 to 1", type=float, default=default.top_p, metavar="X")
    option(
        "--min-p",
        "keep tokens with at least this share of the best one's probability, 0 to 1",
        type=float,
        default=default.min_p,
        metavar="X",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="of the sampling noise (default: one is drawn, and printed)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    group = parser.add_argument_group("work", "The answer is the same, to the bit, whatever these are.")
    add_device_options(group)
    option("--prefill", "layers that every prompt row runs", choices=get_args(PrefillMode), default="halo")
    option("--chunk-rows", "prompt rows that run together", type=positive_int, default=CHUNK_ROWS, metavar="N")
    option(
        "--engram", "read the Engram tables into memory, or map their file", choices=get_args(EngramHome), default="ram"
    )


def run(args: argparse.Namespace) -> int:
    try:
        check_device_options(args)
        params = _sampling(args)
        config = ModelConfig.load(args.model)
        tokenizer = TextTokenizer.load(args.model, config.text_config.vocab_size)
        prompt_ids = _prompt_ids(args, tokenizer)
        check_prompt(config.text_config, prompt_ids)
        n_positions = min(len(prompt_ids) + params.max_tokens, config.text_config.max_position_embeddings)
        with ByteProgress("weights", bytes_to_read(config, args.engram)) as loading:
            model = Model.load(
                args.model,
                engram=args.engram,
                advance=loading.advance,
                device=args.device,
                reference_ops=args.reference_op,
                kv_tokens=n_positions,
            )
        if args.device != "cpu":
            print(f"generate: {model.home}", file=sys.stderr)
    except INPUT_ERRORS as error:
        print(f"generate: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    try:
        with RowProgress("prefill", len(prompt_ids)) as prefill:
            generation = Generation(
                model, prompt_ids, params, mode=args.prefill, chunk_rows=args.chunk_rows, progress=prefill.advance
            )
            first = next(iter(generation))  # the prompt is done with the first token
        text = _stream(first, generation, Detokenizer(tokenizer), silent=args.json)
    except GenerationError as error:
        print(f"generate: {error}", file=sys.stderr)
        return EXIT_FAILED
    figures = _figures(args, generation)
    if args.json:
        print(json.dumps({"text": text, "output_ids": list(generation.output_ids), **figures}))
    else:
        _print_figures(figures)
    return 0


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Raises SamplingError, which names the flag."""
    fields = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    try:
        return SamplingParams(**{field: getattr(args, field) for field in fields})
    except SamplingError as error:
        field, _, rest = str(error).partition(" = ")
        raise SamplingError(f"--{field.replace('_', '-')} {rest}") from None


def _prompt_ids(args: argparse.Namespace, tokenizer: TextTokenizer) -> list[int]:
    """Raises FileError, and PromptError for ids that are no integers."""
    if args.prompt is not None:
        # What the shell passed that is not UTF-8 arrives as lone surrogates; back to bytes, to be refused as in a file.
        return tokenizer.encode(text_of(args.prompt.encode("utf-8", "surrogateescape"), "--prompt"))
    if args.prompt_file is not None:
        return tokenizer.encode(text_of(_read(args.prompt_file), args.prompt_file))
    return _ids(args.ids_file, _read(args.ids_file))


def _read(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == "-" else read_bytes(file)


def _ids(source: str, data: bytes) -> list[int]:
    text = text_of(data, source)
    try:
        if text.lstrip().startswith("["):
            return msgspec.json.decode(text, type=list[int])
        return [int(word) for word in text.split()]
    except (msgspec.DecodeError, ValueError) as error:
        raise PromptError(f"{source}: {error}; write token ids as a JSON list, or with spaces between") from error


def bytes_to_read(config: ModelConfig, engram: EngramHome) -> int:
    """The bytes that Model.load will report: every served tensor, without the tables that stay in their file."""
    return sum(
        spec.n_bytes
        for name, spec in expected_tensors(config).items()
        if spec.component not in NOT_LOADED and not (engram == "mmap" and ".engram.embed." in name)
    )


def _stream(first: int, generation: Generation, detokenizer: Detokenizer, silent: bool) -> str:
    """Run to the end and return the text, written to stdout as it comes unless silent. A stop token writes nothing."""
    pieces = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if piece and not silent:
            shown = piece.translate(_TERMINAL_SAFE) if sys.stdout.isatty() else piece
            sys.stdout.buffer.write(shown.encode())  # UTF-8 whatever the locale, like the prompt
            sys.stdout.buffer.flush()

    try:
        for token in chain([first], generation):
            if generation.finish_reason != "stop":
                write(detokenizer.push(token))
        write(detokenizer.finish())
    finally:
        if not silent and sys.stdout.isatty():
            print()
    return "".join(pieces)


def _figures(args: argparse.Namespace, generation: Generation) -> dict[str, Any]:
    n_prompt, n_output = len(generation.prompt_ids), len(generation.output_ids)
    return {
        "prompt_tokens": n_prompt,
        "output_tokens": n_output,
        "prefill": args.prefill,
        "chunk_rows": args.chunk_rows,
        "prefill_s": generation.prefill_s,
        "prefill_tokens_per_s": n_prompt / generation.prefill_s,
        "decode_tokens_per_s": (n_output - 1) / generation.decode_s if n_output > 1 else None,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "output_ids_sha256": generation.output_ids_sha256,
        "logits_sha256": generation.logits_sha256,
    }


def _print_figures(figures: dict[str, Any]) -> None:
    if not sys.stdout.isatty():
        print(file=sys.stderr)  # the text gets no newline there, and both may go to one file
    decode_rate = figures["decode_tokens_per_s"]
    lines = (
        f"prompt {figures['prompt_tokens']:,} tokens, prefill {figures['prefill']} with chunk_rows "
        f"{figures['chunk_rows']:,}: {figures['prefill_s']:.2f} s, {figures['prefill_tokens_per_s']:,.2f} token/s",
        f"output {figures['output_tokens']:,} tokens"
        + (f", {decode_rate:,.2f} token/s" if decode_rate else "")
        + f"; finish reason {figures['finish_reason']}; seed {figures['seed']}",
        f"output_ids_sha256 {figures['output_ids_sha256']}",
        f"logits_sha256 {figures['logits_sha256']}",
    )
    print(*(f"generate: {line}" for line in lines), sep="\n", file=sys.stderr)
