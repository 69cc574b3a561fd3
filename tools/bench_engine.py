"""Complete requests through an engine's `submit`, without HTTP: cold prefills and decoding, one JSON line each.

    python -m rocline.tools.bench_engine --device hip --devices 1 --decode 1,8 --prefill 16384,65536
    python -m rocline.tools.bench_engine --model demo/model --stages 2 --decode 1 --prefill 512

Without --model the release's sizes are run with noise for weights, in --stores stores of experts (engine/synthetic.py):
every line says so. A prefill's rate is its tokens over the time from submit to the first id; on the way lines tell of
the rows done. A decode rate is of the window in which all streams decode.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rocline.engine.release import release_config
from rocline.engine.sampling import SamplingParams
from rocline.engine.synthetic import SyntheticWeights
from rocline.hip_kernels.driver import devices
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.request import EngineError, Request
from rocline.pipeline.stream import Stream
from rocline.pipeline.worker import SWITCH_INTERVAL_S
from rocline.tools.checkout import commit

LOOK_S = 0.02
NUMBERS = (
    "stages",
    "devices",
    "context",
    "kv_tokens",
    "chunk_rows",
    "inflight_chunks",
    "running",
    "groups",
)
LEAST_ID = 300  # ids below may be special


class Bench:
    """Of one engine. what: said in every line."""

    def __init__(self, engine: Engine, seed: int, what: dict[str, Any]) -> None:
        self._engine, self._dice, self._what = engine, random.Random(seed), what

    def say(self, **figures: Any) -> None:
        print(json.dumps(self._what | figures), flush=True)

    def _stream(self, n_prompt: int, n_output: int) -> Stream:
        ids = self._dice.choices(range(LEAST_ID, self._engine.config.text_config.vocab_size), k=n_prompt)
        params = SamplingParams(max_tokens=n_output, ignore_eos=True, temperature=0)
        return self._engine.submit(Request(prompt_ids=ids, params=params))

    def prefill(self, n_tokens: int, report_rows: int) -> None:
        stream, next_rows = self._stream(n_tokens, 1), report_rows
        while not stream.ended:
            time.sleep(LOOK_S)
            done, now_s = stream.progress.rows_done, time.monotonic() - stream.submitted_s
            if next_rows <= done < n_tokens:
                self.say(on_the_way=n_tokens, rows=done, seconds=round(now_s, 3), rows_s=round(done / now_s, 1))
                next_rows = done - done % report_rows + report_rows
        summary = _summary(stream)
        self.say(
            prefill_tokens=n_tokens,
            ttft_s=summary.first_token_s,
            tokens_s=n_tokens / summary.first_token_s,
            output_ids_sha256=summary.output_ids_sha256,
            **self._memory(),
        )

    def decode(self, n_streams: int, n_context: int, n_output: int) -> None:
        """All streams at once; the window is from the last one's first token to the first one's end."""
        streams = [self._stream(n_context, n_output) for _ in range(n_streams)]
        token_s: list[list[float]] = [[] for _ in streams]

        def read(stream: Stream, times: list[float]) -> None:
            for update in stream:
                times += [time.monotonic()] * len(update.ids)

        readers = [threading.Thread(target=read, args=pair) for pair in zip(streams, token_s, strict=True)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        summaries = [_summary(stream) for stream in streams]
        start_s, end_s = max(times[0] for times in token_s), min(times[-1] for times in token_s)
        n_tokens = sum(start_s < at_s <= end_s for times in token_s for at_s in times)
        self.say(
            decode_streams=n_streams,
            context=n_context,
            output_tokens=n_output,
            window_s=end_s - start_s,
            tokens_s=n_tokens / (end_s - start_s) if end_s > start_s else None,
            output_ids_sha256=[summary.output_ids_sha256 for summary in summaries],
            **self._memory(),
        )

    def _memory(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "min_headroom_bytes": stats.min_headroom_bytes,
            "device_allocs": [stage.arena.device_allocs for stage in stats.stages],
            "arena_high_water_bytes": [stage.arena.high_water_bytes for stage in stats.stages],
            "busy_s": [round(stage.busy_s, 3) for stage in stats.stages],
        }


def _summary(stream: Stream) -> Any:
    """Of an ended stream. Raises what ended it otherwise."""
    for _ in stream:
        pass
    return stream.summary


def _open(args: argparse.Namespace, options: Options) -> tuple[Engine, str]:
    if args.model:
        return Engine.open(args.model, options), str(args.model)
    config = release_config()
    home = devices()[0].torch_device if options.device == "hip" else torch.device("cpu")
    weights = SyntheticWeights(config, args.seed, args.stores, home)
    return Engine(config, weights, options), str(weights)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint, instead of noise")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of weights and prompts (default %(default)s)")
    parser.add_argument("--stores", type=int, default=12, metavar="N", help="of experts (default %(default)s)")
    parser.add_argument("--prefill", type=_numbers, default=[], metavar="N[,N...]", help="tokens of cold prefills")
    parser.add_argument("--decode", type=_numbers, default=[], metavar="N[,N...]", help="streams that decode at once")
    parser.add_argument("--decode-context", type=int, default=4096, metavar="N", help="(default %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="(default %(default)s)")
    parser.add_argument("--report-rows", type=int, default=32_768, metavar="N", help="(default %(default)s)")
    for name, kind in (("device", str), ("prefill-mode", str), ("placement", str)):
        parser.add_argument(f"--{name}", type=kind, metavar="NAME")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    parser.epilog = "Options of the engine are those of `rocline serve`."
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    names = ("device", "placement", *NUMBERS)
    given = {"prefill": args.prefill_mode} | {name: getattr(args, name) for name in names}
    try:
        options = Options(**{name: value for name, value in given.items() if value is not None})
        began_s = time.monotonic()
        engine, weights = _open(args, options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 1
    bench = Bench(engine, args.seed, {"weights": weights, "chunk_rows": options.chunk_rows, "prefill": options.prefill})
    device = devices()[0].name if options.device == "hip" else "cpu"
    build = {"commit": commit(), "torch": torch.__version__, "device": device}
    bench.say(opened_s=round(time.monotonic() - began_s, 1), **build)
    try:
        for n_streams in args.decode:
            bench.decode(n_streams, args.decode_context, args.output_tokens)
        for n_tokens in args.prefill:
            bench.prefill(n_tokens, args.report_rows)
    except (EngineError, ValueError) as error:  # what cannot run, and what ended
        print(f"bench_engine: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
