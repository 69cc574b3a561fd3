"""`rocline bench engine`: complete requests through an engine's `submit`, without HTTP (docs/bench.md).

With --weights the release's sizes are run with noise for weights (engine/synthetic.py): every line says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.release import release_config
from rocline.engine.synthetic import N_STORES, seed_of
from rocline.hip_kernels.dispatch import DispatchError
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.runtime import torch_sees_gpus
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.worker import SWITCH_INTERVAL_S
from rocline.tools.bench_bounds import Ceilings
from rocline.tools.bench_profile import Profiles
from rocline.tools.bench_requests import Requests
from rocline.tools.bench_routing import routing
from rocline.tools.checkout import commit
from rocline.tools.engine_options import NAMES, engine_options
from rocline.tools.load_client import InputError
from rocline.tools.load_protocols import AnotherHash, Talk
from rocline.tools.serve import ConfigurationError
from rocline.tools.synthetic_model import synthetic_weights

EXIT_FAILED = 1


def run(args: argparse.Namespace, talk: Talk) -> int:
    """Every size of chunks after the other. Raises InputError, and AnotherHash where their outputs differ."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    setup = Setup.of(args)
    outputs, has_failed = Outputs(), False
    ceilings = _ceilings(setup)
    sizes = list(dict.fromkeys(args.chunk_rows or [setup.options.chunk_rows]))
    for chunk_rows in sizes:
        session = Session(args, setup, replace(setup.options, chunk_rows=chunk_rows), outputs, talk)
        if args.profile and chunk_rows == sizes[-1]:  # a profiler that has run may slow what is timed after it
            session.ceilings = ceilings
        session.run()
        has_failed |= session.has_failed
        _give_back()
    if len(outputs.sizes) > 1:
        print(json.dumps(setup.labels | {"line": "hashes", "chunk_rows": outputs.sizes, "same": True}), flush=True)
    return EXIT_FAILED if has_failed else 0


def on_gpus(options: Options) -> bool:
    """Whether stages run where torch can measure too."""
    return options.device == "hip" and torch_sees_gpus()


def _ceilings(setup: Setup) -> Ceilings | None:
    """Of the first card, told in a line; None where torch sees none."""
    if not on_gpus(setup.options):
        return None
    ceilings = Ceilings.measured(devices()[0])
    _give_back()
    print(json.dumps(setup.labels | {"line": "ceilings"} | asdict(ceilings)), flush=True)
    return ceilings


@dataclass(frozen=True)
class Setup:
    """What the flags come to. labels: in every line."""

    config: ModelConfig
    options: Options
    labels: dict[str, Any]
    open: Callable[[Options], Engine]

    @staticmethod
    def of(args: argparse.Namespace) -> Setup:
        """Raises InputError for what can be seen to be wrong before anything is loaded."""
        try:
            seed = seed_of(args.weights) if args.weights else None
            if args.weights and seed is None:
                raise InputError(f"--weights {args.weights}: write synthetic:SEED; a checkpoint is named with --model")
            config = ModelConfig.load(args.model) if args.model else release_config()
            options = _options(args, config)
            source = (
                None if seed is None else synthetic_weights(config, seed, args.stores or N_STORES, options, args.skewed)
            )
        except (ConfigurationError, ConfigError, DispatchError, ValueError, RuntimeError) as error:
            raise InputError(str(error)) from None
        _check_requests(args, config, options)

        def open_engine(options: Options) -> Engine:
            return Engine(config, source, options) if source else Engine.open(args.model, options)

        labels = {
            "rocline_bench": "engine",
            "weights": str(source or args.model),
            "commit": commit() or args.commit,
            "seed": args.seed,
            "device": devices()[0].name if options.device == "hip" else "cpu",
            "torch": torch.__version__,
            "stages": options.stages,
            "prefill": options.prefill,
        }
        return Setup(config, options, labels, open_engine)


def _options(args: argparse.Namespace, config: ModelConfig) -> Options:
    """As `rocline serve` settles its own. Raises InputError, ConfigurationError, DispatchError."""
    words = [word.partition("=") for word in args.set]
    pairs = [(name.strip().replace("-", "_"), value.strip()) for name, _, value in words]
    for (name, _), word in zip(pairs, args.set, strict=True):
        if name not in NAMES or "=" not in word:
            raise InputError(f"--set {word}: write NAME=VALUE with a name of {', '.join(NAMES)}")
    flags = argparse.Namespace(
        model=args.model or args.weights, device=args.device, reference_op=args.reference_op, set=pairs
    )
    options = engine_options(flags, config)
    for chunk_rows in args.chunk_rows or ():
        replace(options, chunk_rows=chunk_rows)  # which may be out of range
    return options


def _check_requests(args: argparse.Namespace, config: ModelConfig, options: Options) -> None:
    limit = config.text_config.max_position_embeddings
    context = min(options.context or limit, limit)
    if not (args.decode or args.prefill or args.routing):
        raise InputError("nothing to do; say --decode, --prefill, --routing or several of them")
    if args.skewed and not args.weights:
        raise InputError("--skewed is of --weights synthetic:SEED")
    if args.routing and args.routing > min(args.chunk_rows or [options.chunk_rows]):
        raise InputError(f"--routing {args.routing}: they go through in one chunk; --chunk-rows is smaller")
    lengths = {f"--prefill {n_tokens}": n_tokens + 1 for n_tokens in args.prefill}
    if args.decode:
        lengths["--decode-context and --output-tokens"] = args.decode_context + args.output_tokens
        if args.output_tokens < 2:
            raise InputError("--output-tokens 1: the rate of decoding needs 2 at least")
    for what, n_tokens in lengths.items():
        if n_tokens > context:
            raise InputError(f"{what}: {n_tokens} tokens with the output; the context holds {context}")
    if args.decode and max(args.decode) > options.running:
        raise InputError(f"--decode {max(args.decode)}: {options.running} run at a time; say --set running=N")
    if args.profile and not on_gpus(options):
        raise InputError("--profile reads torch's profiler of a GPU: it needs --device hip and a torch that sees one")


class Outputs:
    """Hashes of outputs by request: each must be one, whatever the size of the chunks."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, int]] = {}
        self.sizes: list[int] = []

    def check(self, request: str, output_sha256: str, chunk_rows: int) -> None:
        """Raises AnotherHash."""
        if chunk_rows not in self.sizes:
            self.sizes.append(chunk_rows)
        first_sha256, first_rows = self._first.setdefault(request, (output_sha256, chunk_rows))
        if output_sha256 != first_sha256:
            raise AnotherHash(
                f"{request}: {output_sha256} with chunks of {chunk_rows} rows, {first_sha256} with {first_rows}; no "
                "size may change a bit of any answer. Report this"
            )


class Session:
    """All requests to an engine that is opened for them, with one size of chunks.

    ceilings  with them requests are profiled when all have been timed
    """

    ceilings: Ceilings | None = None

    def __init__(self, args: argparse.Namespace, setup: Setup, options: Options, outputs: Outputs, talk: Talk) -> None:
        self._args, self._setup, self._options, self._outputs, self._talk = args, setup, options, outputs, talk
        self._labels = setup.labels | {"chunk_rows": options.chunk_rows}
        self.has_failed = False

    def say(self, **fields: Any) -> None:
        """A line to stdout, at once."""
        print(json.dumps(self._labels | fields), flush=True)

    def run(self) -> None:
        """Tells what fails. Raises AnotherHash."""
        options, began_s = self._options, time.monotonic()
        self._talk.say(f"bench: opening {self._setup.labels['weights']}, chunks of {options.chunk_rows} rows")
        try:
            engine = self._setup.open(options)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            self.failed(error)
            return
        try:
            self._labels |= {
                "devices": len({stage.device for stage in engine.placement.stages}),
                "arena_bytes": [stage.arena.slab_bytes for stage in engine.stats().stages],
            }
            opened_s, command = round(time.monotonic() - began_s, 3), shlex.join(["rocline", *sys.argv[1:]])
            self.say(line="opened", seconds=opened_s, command=command, settings=asdict(options))
            self._requests(engine)
        finally:
            engine.close()

    def _requests(self, engine: Engine) -> None:
        args = self._args
        requests = Requests(engine, args.seed, self.say)
        context, n_output = args.decode_context, args.output_tokens
        for n_streams in args.decode:
            self._one(f"decode of {n_streams}", partial(requests.decode, n_streams, context, n_output))
        for n_tokens in args.prefill:
            self._one(f"prefill of {n_tokens}", partial(requests.prefill, n_tokens, args.report_rows))
        if args.routing:
            self._one("routing", lambda: self.say(line="routing", **routing(engine, args.seed, args.routing)))
        if self.ceilings:
            profiles = Profiles(engine, requests, self.ceilings, self.say, self._talk)
            for n_streams in dict.fromkeys(args.decode):
                self._one(f"profile of decode of {n_streams}", partial(profiles.decode, n_streams, context))
            if args.prefill:
                n_tokens = min(args.profile_tokens, max(args.prefill))
                self._one(f"profile of prefill of {n_tokens}", partial(profiles.prefill, n_tokens))

    def _one(self, name: str, request: Callable[[], str | None]) -> None:
        """A request, after which the next one comes even if it fails. Raises AnotherHash."""
        try:
            output_sha256 = request()
        except (RuntimeError, ValueError) as error:
            self.failed(error, name)
        else:
            if output_sha256:
                self._outputs.check(name, output_sha256, self._options.chunk_rows)

    def failed(self, error: Exception, what: str = "opening") -> None:
        self.has_failed = True
        self.say(line="failed", what=what, why=f"{type(error).__name__}: {error}")
        self._talk.say(f"bench: {what}, chunks of {self._options.chunk_rows} rows: {error}")


def _give_back() -> None:
    """What the engine held, for the next one."""
    gc.collect()
    if torch_sees_gpus():
        torch.cuda.empty_cache()
