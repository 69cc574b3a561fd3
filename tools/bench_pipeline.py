"""python -m rocline.tools.bench_pipeline MODEL: what the pipeline itself costs, without arithmetic; and a soak.

    overhead  every stage returns at once: seconds of wall and of CPU time a stage step, hand-off and answer included
    soak      random requests with cancels and errors on the model itself; what is left behind at the end

One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from rocline.engine.answer import Answer
from rocline.engine.handoff import Rows
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.request import QueueFull, Request, RequestFailed
from rocline.pipeline.stats import Stats
from rocline.pipeline.stream import Stream
from rocline.pipeline.worker import Task

WAIT_S = 600.0
RETRY_S = 0.05


class _Hollow(Engine):
    """Stages whose layers do nothing, nor what they would read, and a head that always says the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for worker in self._workers:
            worker.stage._step = lambda work, layer, rows, record: rows  # type: ignore[method-assign]
            worker.stage._tables = lambda rows: None  # type: ignore[method-assign,assignment,return-value]

    def answers(self, task: Task, rows: Rows) -> dict[int, Answer] | None:
        if task.place < len(self._path) - 1:
            return None
        return {entry.number: Answer(token=5) for entry in task.job.entries}


def overhead(model: Model, n_stages: int, n_requests: int, n_tokens: int) -> dict[str, Any]:
    """Decode steps of n_requests, each in a group of its own: seconds a stage step, on all cores together."""
    options = Options(stages=n_stages, groups=n_requests, running=n_requests, kv_tokens=65_536, prefill="full")
    engine = _Hollow(model.config, model.weights, options)
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for stream in [engine.submit(Request(prompt_ids=[5, 6, 7], params=params)) for _ in range(n_requests)]:
        for _ in stream:
            pass
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    n_steps = sum(stage.steps for stage in engine.stats().stages)
    engine.close()
    return {
        "stages": n_stages,
        "requests": n_requests,
        "stage_steps": n_steps,
        "wall_us_per_stage_step": 1e6 * wall_s / n_steps,
        "cpu_us_per_stage_step": 1e6 * cpu_s / n_steps,
    }


def soak(model: Model, n_requests: int, dice: random.Random, options: Options, page_positions: int) -> dict[str, Any]:
    """Random lengths, cancels at random moments, and prompts with a token whose embedding is not finite.

    Raises RuntimeError naming what was left behind.
    """
    vocab = model.config.text_config.vocab_size
    broken = vocab - 1
    embed_bf16 = model.weights.embed_bf16.clone()
    embed_bf16[broken] = float("nan")
    weights = replace(model.weights, embed_bf16=embed_bf16)
    gc.collect()  # what went before is not this run's
    process, before = psutil.Process(), (threading.active_count(), psutil.Process().num_fds())
    engine = Engine(model.config, weights, options, page_positions=page_positions)
    threads = threading.active_count()
    began_s, streams, n_refused = time.monotonic(), list[Stream](), 0
    for number in range(n_requests):
        ids = [dice.randrange(9, broken) for _ in range(dice.choice((1, 2, 7, 20, dice.randrange(1, 90))))]
        if dice.random() < 0.05:
            ids[dice.randrange(len(ids))] = broken
        params = SamplingParams(max_tokens=dice.randrange(1, 9), seed=number, ignore_eos=dice.random() < 0.8)
        while True:
            try:
                streams.append(engine.submit(Request(prompt_ids=ids, params=params)))
                break
            except QueueFull:
                n_refused += 1
                time.sleep(RETRY_S)
        if dice.random() < 0.2:
            threading.Timer(dice.random() * 0.2, streams[-1].cancel).start()
        if dice.random() < 0.1:
            dice.choice(streams).cancel()
    for stream in streams:
        _read(stream)
    if not engine.drain(WAIT_S):
        raise RuntimeError(f"soak: after {WAIT_S:.0f} s still at work: {engine.stats()}")
    stats, wall_s = engine.stats(), time.monotonic() - began_s
    _check_nothing_left(stats, n_requests, threading.active_count() - threads)
    engine.close()
    gc.collect()
    after = threading.active_count(), process.num_fds()
    if after != before:
        raise RuntimeError(f"soak: {before} threads and file descriptors before, {after} after")
    return {
        "requests": n_requests,
        "ended": stats.ended,
        "refused_and_sent_again": n_refused,
        "output_tokens": stats.output_tokens,
        "wall_s": wall_s,
        "threads": after[0],
        "file_descriptors": after[1],
        "rss_bytes": process.memory_info().rss,
    }


def _read(stream: Stream) -> None:
    try:
        for _ in stream:
            pass
    except RequestFailed:
        return


def _check_nothing_left(stats: Stats, n_requests: int, more_threads: int) -> None:
    spans = [stage.arena.n_used for stage in stats.stages]
    left = {
        "requests": stats.queued + stats.prefilling + stats.decoding + stats.paused,
        "requests without an end": n_requests - sum(stats.ended.values()),
        "pages": stats.n_pages - stats.free_pages,
        "spans": sum(spans),
        "tasks": sum(stage.waiting for stage in stats.stages),
        "threads": more_threads,
    }
    if any(left.values()):
        raise RuntimeError(f"soak: left behind: {left}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of the soak (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each request of the overhead run")
    parser.add_argument("--stages", type=int, default=8, metavar="N", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the soak's requests")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = Model.load(args.model, kv_tokens=4096)
    options = Options(
        stages=args.stages, running=32, queue=64, kv_tokens=32_768, chunk_rows=64, mixed_chunk_rows=32, groups=2
    )
    found = {
        "overhead": overhead(model, args.stages, 8, args.tokens),
        "soak": soak(model, args.requests, random.Random(args.seed), options, 64),
        "seed": args.seed,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
