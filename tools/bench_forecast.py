"""What the memory plan's cost model says of eight W7900D, from slow to fast cards: modelled, for a page of results."""

from __future__ import annotations

from rocline.engine.release import release_config
from rocline.pipeline.costs import Rates
from rocline.pipeline.forecast import (
    FORECAST_FLOPS,
    PUBLISHED,
    PUBLISHED_CARDS,
    decode_rate,
    prefill,
    prefill_rate,
    published_runs,
    reproduces_published,
)
from rocline.pipeline.options import Options
from rocline.pipeline.plan import GIB, KV_TOKENS, Request, make_plan
from rocline.pipeline.simulate import DECODE_HISTORY

CARD_BYTES, CARD_BYTES_PER_S = 48 * GIB, 864e9
SLOW = Rates(FORECAST_FLOPS[0], 0.35 * CARD_BYTES_PER_S)  # products as in the published run; half of fast copies
FAST = Rates(FORECAST_FLOPS[-1], 0.7 * CARD_BYTES_PER_S)  # shares of peaks that an H200 reached
DECODING = (1, 8)


def forecast() -> str:
    """A paragraph. Takes seconds: it simulates pipelines."""
    config = release_config()
    request = Request(
        n_devices=PUBLISHED_CARDS,
        device_bytes=CARD_BYTES,
        n_stages=PUBLISHED_CARDS,
        kind="folded",
        context=config.text_config.max_position_embeddings,
        kv_tokens=KV_TOKENS,
        chunk_rows=Options().chunk_rows,
    )
    plan = make_plan(config, request)
    checks = " and ".join(f"{run.error:+.1%}" for run in published_runs()[1])
    if not reproduces_published():
        return f"No forecast for eight W7900D: the cost model is too far ({checks}) from the published run."

    def words(slow: float, fast: float) -> str:
        return f"{slow:,.0f} to {fast:,.0f} token/s"

    parts = []
    for n_tokens, _ in PUBLISHED:
        runs = [prefill(plan.model, plan.placement, n_tokens, request.chunk_rows, rates) for rates in (SLOW, FAST)]
        slow, fast = (prefill_rate(run, n_tokens) for run in runs)
        parts.append(f"a cold `halo` prefill of {n_tokens:,} tokens at {words(slow, fast)}")
    for n_requests in DECODING:
        slow, fast = (
            max(decode_rate(plan.model, plan.placement, n_requests, n, rates) for n in range(1, n_requests + 1))
            for rates in (SLOW, FAST)
        )
        many = "one request" if n_requests == 1 else f"{n_requests} together"
        parts.append(f"decode of {many} ({DECODE_HISTORY:,} tokens before, no drafts) at {words(slow, fast)}")
    return (
        f"**Modelled, not measured:** the memory plan's cost model has eight W7900D do {'; '.join(parts)}. From cards "
        f"that reach {SLOW.flops_per_s / 1e12:g} TFLOP/s of products and {SLOW.bytes_per_s / 1e9:.0f} GB/s while busy "
        f"to cards that reach {FAST.flops_per_s / 1e12:g} and {FAST.bytes_per_s / 1e9:.0f}. The first are assumed, the "
        f"others are the shares of its ceilings that one H200 reached. Of the published rows of another engine the "
        f"model is {checks} off, of which the first fixed its rate. Nothing was measured on such cards."
    )
