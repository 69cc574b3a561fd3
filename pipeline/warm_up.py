"""What an engine runs before its first request: everything that is made at its first use, is made now.

Kernels are compiled or read from their cache, and loaded on every card; scopes of the arenas learn what they will be
asked for; Engram's buffers get their memory. Of forms of products with the same bits each card measures the quickest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from rocline.engine.config import ModelConfig
from rocline.engine.home import PaperHome
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.engine.shapes import SLAB_BYTES, shape_weights
from rocline.engine.steps import STEP_ROWS
from rocline.hip_kernels.binding import shapes_only
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.kernel import compiler, prepare, seen
from rocline.hip_kernels.linear_hip import Launched, asked, use_forms
from rocline.hip_kernels.tactics import Tactics, measure
from rocline.pipeline.options import Options
from rocline.pipeline.request import QueueFull, Request
from rocline.pipeline.stream import Stream

log = logging.getLogger(__name__)

SHORT_PROMPTS = (1, 17, 65)  # rows of the kernels' classes below a whole chunk


def warm_up_requests(options: Options, context: int, vocab_size: int) -> Iterator[list[Request]]:
    """Requests to run together, one list after another: the largest chunk alone, then steps of as many rows as may
    decode. Between them every way of choosing a token."""

    def request(n_rows: int, **sampling: object) -> Request:
        n_rows = max(1, min(n_rows, context - 4))
        params = SamplingParams(max_tokens=3, ignore_eos=True, seed=n_rows, **sampling)  # type: ignore[arg-type]
        return Request(prompt_ids=[row % vocab_size for row in range(n_rows)], params=params, n_logprobs=1)

    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    limits = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {1: 0.5}, "min_tokens": 2}
    yield [request(options.chunk_rows, **penalties, **limits)]
    short = SHORT_PROMPTS * -(-options.running // len(SHORT_PROMPTS))
    yield [request(n_rows, temperature=number % 2) for number, n_rows in enumerate(short[: options.running])]


def prepare_kernels(config: ModelConfig, options: Options) -> None:
    """Compile what the layers launch for any number of rows, on every core, and load it on every card.

    Which kernels those are, a run on paper says. Raises CompileError.
    """
    began_s, context = time.monotonic(), config.text_config.max_position_embeddings
    lengths = sorted({min(n_rows, context) for n_rows in (*SHORT_PROMPTS, options.chunk_rows)})
    with shapes_only(), seen() as kernels, asked() as launched:
        home = PaperHome(config.text_config, options.reference_op)
        model = Model(config, shape_weights(config, "meta"), kv_tokens=lengths[-1], arena_bytes=SLAB_BYTES, home=home)
        for n_rows in lengths:
            handle = model.open()
            model.prefill(handle, [0] * n_rows, chunk_rows=n_rows)
            model.close(handle)
    prepare(kernels, lambda n_done, n_all, what: log.debug("kernel %d of %d: %s", n_done, n_all, what))
    log.info("%d kernels are there after %.1f s", len(kernels), time.monotonic() - began_s)
    if not devices()[0].is_host:  # what a test's device takes says nothing
        choose_forms(launched, options)


def choose_forms(launched: Collection[Launched], options: Options) -> None:
    """Measure what no start before this one has, of products of steps and then of chunks, on the first card; use it.

    Before memory is planned to the byte: no form wants more than the rule's. Raises HipError.
    """
    began_s, device = time.monotonic(), devices()[0]
    tactics, n_measured = Tactics.of(device, compiler().folder), 0
    of_steps = [n for n in STEP_ROWS if n < 2 * options.running]
    of_chunks = [1 << power for power in range(7, (options.chunk_rows - 1).bit_length() + 1)]
    for row_counts in (of_steps, of_chunks):
        if found := measure(device, launched, row_counts, tactics):
            tactics.add(found)
            n_measured += len(found)
    use_forms(tactics.forms)
    seconds = time.monotonic() - began_s
    log.info(
        "%d forms of products, %d measured now, in %.1f s: %s", len(tactics.forms), n_measured, seconds, tactics.path
    )


def warm_up(take: Callable[[Request], Stream], options: Options, context: int, vocab_size: int) -> None:
    """Run them. Raises RequestFailed where that fails: other requests would too."""
    began_s, n_before = time.monotonic(), compiler().n_compiled
    for together in warm_up_requests(options, context, vocab_size):
        streams = []
        with suppress(QueueFull):  # pages for fewer than may run, and no queue
            for request in together:
                streams.append(take(request))
        for stream in streams:
            for _ in stream:
                pass
    compiler().seal()
    seconds, n_compiled = time.monotonic() - began_s, compiler().n_compiled - n_before
    log.info("warmed up in %.1f s; kernels compiled, not found in the cache: %d", seconds, n_compiled)
