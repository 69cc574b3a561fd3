"""Rungs on the whole model: loading it, one request in several ways, the shipped text, and the long prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rocline.engine.progress import RowProgress
from rocline.engine.sampling import SamplingParams
from rocline.pipeline.engine import Engine
from rocline.pipeline.forecast import PUBLISHED
from rocline.pipeline.plan import HEADROOM_FLOOR_BYTES
from rocline.pipeline.request import Request, Summary
from rocline.pipeline.timeline import Kind
from rocline.tools.bring_up_site import Site
from rocline.tools.doctor_checks import Check, gib
from rocline.tools.perplexity import LIMIT_GROWTH, LIMIT_NATS, Score, figures_of, judge, score_text

OUTPUT_TOKENS, LONG_OUTPUT_TOKENS = 4, 8  # after a prompt that runs three ways; after a long one
COMPANION_TOKENS = 8  # of the prompt that decodes beside another
LEAST_SHARE = 0.5  # of output tokens that must go on as the repeated text does

# -- loading -----------------------------------------------------------------------------------------------------


def load(site: Site) -> Check:
    """All weights to where they live, and what is free then."""
    it = Check("load")
    began_s = time.monotonic()
    engine = site.engine()
    took_s = time.monotonic() - began_s
    it.values |= {"bytes": site.n_weight_bytes, "took_s": round(took_s, 3), "stages": len(engine.placement.stages)}
    it.ok(
        f"{gib(site.n_weight_bytes)} in {took_s:.1f} s, {len(engine.placement.stages)} stages, context "
        f"{engine.context:,}"
    )
    _say_memory(it, site, engine)
    return it


def _say_memory(it: Check, site: Site, engine: Engine) -> None:
    """The least that has been free since the engine started, of each device."""
    readings = [memory for memory in engine.headroom.readings() if memory.min_free_bytes is not None]
    it.values["min_free_bytes"] = {_of(memory.device): memory.min_free_bytes for memory in readings}
    if not readings or not site.found.cards:
        return
    fullest = min(readings, key=lambda memory: memory.min_free_bytes or 0)
    least = fullest.min_free_bytes or 0
    said = f"least free so far: {gib(least)}, on device {fullest.device}"
    if least < HEADROOM_FLOOR_BYTES:
        it.warning(
            f"{said}, want {gib(HEADROOM_FLOOR_BYTES)}", "--set arena_gib or kv_tokens lower; `rocline plan` shows"
        )
    else:
        it.ok(said)


def _of(device: int | None) -> str:
    return "host" if device is None else f"device {device}"


# -- requests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A prompt's answer, and the largest chunk that it went in."""

    how: str
    summary: Summary
    output_ids: list[int]
    chunk_rows: int

    def as_json(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "chunk_rows": self.chunk_rows,
            "prompt_tokens": self.summary.prompt_tokens,
            "first_token_s": self.summary.first_token_s,
            "total_s": self.summary.total_s,
            "output_ids": self.output_ids,
            "output_ids_sha256": self.summary.output_ids_sha256,
            "logits_sha256": self.summary.logits_sha256,
        }

    @property
    def tokens_per_s(self) -> float:
        return self.summary.prompt_tokens / (self.summary.first_token_s or math.inf)


def run_prompt(site: Site, n_tokens: int, how: str, n_output: int = OUTPUT_TOKENS, full: bool = False) -> Ran:
    """A prompt of the shipped text and n_output tokens after it. full: every row through all layers.

    Raises EngineError where it ends without an answer, and what loading raises.
    """
    engine, ids, began_ns = site.engine(), list[int](), time.monotonic_ns()
    params = SamplingParams(temperature=0, max_tokens=n_output, ignore_eos=True)
    request = Request(
        prompt_ids=site.prompt(n_tokens),
        params=params,
        n_logprobs=0 if full else None,
        prompt_logprobs=full,
        logits_digest=True,
    )
    stream = engine.submit(request)
    try:
        with RowProgress(f"{n_tokens:,} tokens, {how}", n_tokens) as progress:
            for update in stream:
                progress.advance(min(update.progress.rows_done, n_tokens) - progress.done)
                ids += update.ids
    finally:
        stream.cancel()
    assert stream.summary
    return Ran(how, stream.summary, ids, _largest_chunk(engine, began_ns))


def _largest_chunk(engine: Engine, since_ns: int) -> int:
    seen = engine.timeline()
    rows = seen["rows"][(seen["kind"] == Kind.PREFILL) & (seen["start_ns"] >= since_ns)]
    return int(rows.max(initial=0))


@contextmanager
def decoding(site: Site) -> Iterator[None]:
    """Meanwhile another request decodes, so prompts go in chunks of mixed_chunk_rows."""
    params = SamplingParams(temperature=0, max_tokens=site.context, ignore_eos=True)
    stream = site.engine().submit(Request(prompt_ids=site.prompt(COMPANION_TOKENS), params=params))
    try:
        next(update for update in stream if update.ids)
        yield
    finally:
        stream.cancel()


def request(site: Site, name: str, n_tokens: int) -> Check:
    """One prompt three ways: by itself, with all layers on every row, and in smaller chunks beside another request."""
    it = Check(name)
    if n_tokens + OUTPUT_TOKENS > site.context:
        it.not_applicable(f"{n_tokens:,} tokens and {OUTPUT_TOKENS} after: the context is {site.context:,}")
        return it
    runs = [run_prompt(site, n_tokens, "halo"), run_prompt(site, n_tokens, "full", full=True)]
    with decoding(site):
        runs.append(run_prompt(site, n_tokens, "halo beside a decoding request"))
    it.values["runs"] = [ran.as_json() for ran in runs]
    first, full, mixed = runs
    sizes = f"chunks of {first.chunk_rows:,} and {mixed.chunk_rows:,} rows"
    _compare(it, first, full, "full differs from halo", "docs/bring-up.md, request, on halo and full")
    _compare(it, first, mixed, f"{sizes} differ", "docs/bring-up.md, request, on chunks")
    if it.verdict == "problem":
        return it
    it.ok(
        f"{n_tokens:,} tokens, full and halo, {sizes}: one hash {str(first.summary.logits_sha256)[:16]} of the logits"
    )
    it.ok(
        f"first token after {first.summary.first_token_s:.2f} s, {first.tokens_per_s:,.1f} tokens/s (halo, by itself)"
    )
    if first.chunk_rows == mixed.chunk_rows:
        it.warning(
            f"both went in chunks of {first.chunk_rows}", "--set chunk_rows and mixed_chunk_rows to less than that"
        )
    return it


def _compare(it: Check, one: Ran, other: Ran, what: str, section: str) -> None:
    if one.summary.logits_sha256 == other.summary.logits_sha256:
        return
    same = next((n for n, (a, b) in enumerate(zip(one.output_ids, other.output_ids, strict=True)) if a != b), None)
    tokens = "the tokens are the same" if same is None else f"the tokens differ from output {same} on"
    it.problem(
        f"{what}: logits {str(one.summary.logits_sha256)[:16]} and {str(other.summary.logits_sha256)[:16]}, {tokens}",
        "some kernel's bits depend on how many rows run together: climb again with --from and --reference-op, each of "
        f"attention, experts, fp8_linear, index_select, ... by itself, until one passes; {section}",
    )


def past_candidates(site: Site, n_tokens: int) -> Check:
    """As `request`, where more positions are there than candidate blocks hold."""
    text = site.config.text_config
    capacity = text.candidate_topk_blocks * text.candidate_block_size
    it = request(site, "past-candidates", n_tokens)
    if it.verdict == "ok":
        it.ok(f"{n_tokens - capacity:,} positions more than the candidate blocks hold ({capacity:,})")
    return it


def long(site: Site, name: str, n_tokens: int) -> Check:
    """One long prompt, once: the text over and over, so that it is known how it goes on."""
    it = Check(name)
    if n_tokens + LONG_OUTPUT_TOKENS > site.context or n_tokens <= 2 * site.config.text_config.sliding_window:
        it.not_applicable(f"{n_tokens:,} tokens in a context of {site.context:,}: no long prompt")
        return it
    ran = run_prompt(site, n_tokens, "halo", LONG_OUTPUT_TOKENS)
    it.values["runs"] = [ran.as_json()]
    it.ok(
        f"{n_tokens:,} tokens: first token after {ran.summary.first_token_s:.2f} s, {ran.tokens_per_s:,.1f} tokens/s, "
        f"in chunks of {ran.chunk_rows:,}"
    )
    if published := dict(PUBLISHED).get(n_tokens):
        it.ok(f"the published run, on eight W7900D: {published:,.2f} tokens/s")
    _say_memory(it, site, site.engine())
    if n_tokens < 2 * len(site.text_ids):
        return it
    right = sum(a == b for a, b in zip(ran.output_ids, site.after(n_tokens, LONG_OUTPUT_TOKENS), strict=True))
    n_read = n_tokens // len(site.text_ids)
    said = f"{right} of {LONG_OUTPUT_TOKENS} output tokens go on as the text, read {n_read} times before"
    if right >= LEAST_SHARE * LONG_OUTPUT_TOKENS or not site.is_release:
        it.ok(said if site.is_release else f"{said}; other weights than the release's need not")
    else:
        it.problem(
            said,
            "history is read wrong from some length on: try --set context between this and the last good length, and "
            "--reference-op index_select,index_select_among; docs/bring-up.md, long prompts",
        )
    return it


# -- the shipped text --------------------------------------------------------------------------------------------


def n_scored(site: Site) -> int:
    """Tokens of the shipped text: all, but no more than the quarter rung has, for models of a short context."""
    return min(len(site.text_ids), site.lengths.quarter)


def perplexity(site: Site) -> Check:
    """Every token of the shipped text foretold. What is asked of the release is not asked of other weights."""
    it = Check("perplexity")
    uniform = math.log(site.config.text_config.vocab_size)
    ids = site.text_ids[: n_scored(site)]
    score, engine = Score(), site.engine()
    with RowProgress("scored", len(ids)) as progress:
        score_text(engine, ids, score, progress.advance)
    it.values |= figures_of(score, uniform)
    said = f"{score.nats_per_token:.4f} nats/token over {score.n_tokens:,} tokens; all tokens alike are {uniform:.4f}"
    if not site.is_release:
        it.not_applicable(f"{said}. The limits are of the release; this is another model")
        return it
    for missed in judge(score, LIMIT_NATS, LIMIT_GROWTH):
        it.problem(missed, "docs/bring-up.md, perplexity; `rocline perplexity --json` has it by buckets")
    if it.verdict != "problem":
        it.ok(f"{said}; limit {LIMIT_NATS:g}, and no later bucket {LIMIT_GROWTH:.0%} worse than the first")
    return it
