"""Golden logits: prompts, decode fed with the recorded tokens, and a prompt past the candidates' capacity.

The weak evidence: mistakes that stay near the rounding plateau show in tables and traces (golden_ops.py,
golden_trace.py), not here. What only shows here are mistakes of state, lists over time, and the index-key
defect (backbone.md section 7).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.engine.config import TextConfig
from rocline.engine.handoff import RowKind
from rocline.engine.model import Model
from rocline.hip_kernels.binding import TILE_ROWS
from rocline.tools.golden_limits import (
    CPU_CHANGED_ROWS,
    HEAD_ERROR,
    OVERLAP,
    OVERLAP_CONSUMER,
    ModelLimits,
)
from rocline.tools.golden_ops import block_mask
from rocline.tools.golden_report import Findings, adds_like_the_data, jaccard, row_errors, same_bits, worst_of

Fields = dict[str, Tensor]
RECHUNK_ROWS = 37  # neither a tile nor a page nor even: the answer must not notice


class Recording:
    """A recorder that keeps the named fields, by layer; values of several calls stay apart."""

    def __init__(self, *fields: str) -> None:
        self.values: dict[tuple[int, str], list[Tensor]] = {}
        self._fields = fields

    def __call__(self, layer: int, field: str, value: Tensor) -> None:
        if field in self._fields:
            self.values.setdefault((layer, field), []).append(value.clone())

    def rows(self, layer: int, field: str) -> Tensor:
        return torch.cat(self.values[layer, field])


def check_prefill(model: Model, tensors: Fields, limits: ModelLimits, find: Findings) -> None:
    """Last logits of every prompt, all logits of one, and that chunks and halo change no bit of ours."""
    config = model.config.text_config
    lengths = sorted(int(name.removeprefix("ids.")) for name in tensors if name.startswith("ids."))
    prompts = [tensors[f"ids.{n}"].tolist() for n in lengths]
    logits, hidden = _all_rows(model, prompts)
    errors = []
    for n, ours, h_bf16 in zip(lengths, logits, hidden, strict=True):
        want = tensors[f"logits.{n}"][None]
        error = float(row_errors(ours[-1:], want))
        alone_f32 = F.linear(h_bf16[-1:].float(), model.weights.head_bf16.float())
        note = _reason(config, n, error, same_bits(alone_f32, want)) if find.on_host else ""
        exact, name = same_bits(ours[-1:], want), f"prefill logits.{n}"
        find.at_most(name, "row error", error, limits.last(n), exact, note="" if exact else note)
        errors.append(error)
        if (name := f"logits_all.{n}") in tensors:
            _check_all_rows(name, ours, tensors[name], limits, find)
    worst, (at,) = worst_of(torch.tensor(errors, dtype=torch.float64))
    find.on_cpu("prefill logits", "row error", worst, limits.cpu.last, f"length {lengths[at]}")
    handle = model.open()
    last = model.prefill(handle, prompts[-1], mode="halo", chunk_rows=RECHUNK_ROWS)[-1].logits_f32
    model.close(handle)
    name = f"prefill {lengths[-1]}, halo in chunks of {RECHUNK_ROWS}"
    find.same(name, last[-1], logits[-1][-1], "against our own, full at once")


def _all_rows(model: Model, prompts: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits [N, V] and the head's input [N, D] of every row of each prompt, all prompts in one chunk."""
    handles = [model.open() for _ in prompts]
    recording = Recording("final_h")
    logits = model.extend(list(zip(handles, prompts, strict=True)), RowKind.PREFILL, recording).logits_f32
    hidden = recording.rows(model.config.text_config.num_hidden_layers, "final_h")
    for handle in handles:
        model.close(handle)
    lengths = [len(prompt) for prompt in prompts]
    return list(logits.split(lengths)), list(hidden.split(lengths))


def _reason(config: TextConfig, n_rows: int, error: float, head_alone_exact: bool) -> str:
    """Why the last row of a prompt may differ although nothing is wrong: contract against the reference's shapes."""
    if head_alone_exact:
        return "head: 64-row tile, the reference multiplies one row; on one row the bits are equal"
    if error <= HEAD_ERROR:
        return "head: 64-row tile, the reference multiplies one row"
    if not adds_like_the_data():
        return "library sums and exponentials of another kind of CPU"
    if n_rows < config.sliding_window:
        return f"list layout: T={n_rows} < window={config.sliding_window}"
    fewest = min(n_rows // ratio for ratio in config.compress_ratios if ratio)
    if fewest < config.index_topk:
        return f"list layout: {fewest} compressed rows at T={n_rows} < index_topk={config.index_topk}"
    return f"{TILE_ROWS}-row tiles: T={n_rows}"


def _check_all_rows(name: str, got: Tensor, want: Tensor, limits: ModelLimits, find: Findings) -> None:
    errors = row_errors(got, want)
    exact = same_bits(got, want)
    worst, (row,) = worst_of(errors)
    median, p90 = spread(errors)
    agree = float((got.argmax(1) == want.argmax(1)).double().mean())
    find.at_most(f"prefill {name} median", "row error", median, limits.prefill_median, exact)
    find.at_most(f"prefill {name} p90", "row error", p90, limits.prefill_p90, exact)
    find.informative(f"prefill {name} max", "row error", worst, f"row {row}", f"arg-max agrees on {agree:.1%}")
    changed = float((~(errors <= HEAD_ERROR)).double().mean())
    find.on_cpu(f"prefill {name}", "rows changed", changed, CPU_CHANGED_ROWS, f"worst row {row}")


def spread(errors: Tensor) -> tuple[float, float]:
    """Median and 90th percentile; NaN where one error is NaN."""
    median, p90 = torch.quantile(errors.double(), torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
    return median, p90


def check_long(model: Model, tensors: Fields, limits: ModelLimits, find: Findings) -> None:
    """Lists, candidate blocks and the last logits of a prompt that passes the candidates' capacity."""
    config = model.config.text_config
    recording = Recording("sel", "cand_blocks")
    handle = model.open()
    ids = tensors["ids"].tolist()
    logits_f32 = model.prefill(handle, ids, mode="full", record=recording)[-1].logits_f32
    model.close(handle)
    want = tensors["logits"][None]
    error, exact = float(row_errors(logits_f32[-1:], want)), same_bits(logits_f32[-1:], want)
    find.at_most("long logits", "row error", error, limits.any_device.long, exact)
    find.on_cpu("long logits", "row error", error, limits.cpu.long)

    producer = config.candidate_source_layer_id
    keep = tensors[f"L{producer}.cand_keep"]
    n_queries, n_blocks = keep.shape
    kept = block_mask(recording.rows(producer, "cand_blocks")[-n_queries:], n_blocks)
    positions = torch.arange(len(ids) - n_queries, len(ids))
    newest = (positions + 1) // config.layers[producer].ratio - 1
    newest_kept = kept.gather(1, (newest // config.candidate_block_size)[:, None])
    find.same("long newest block kept", newest_kept, torch.ones_like(newest_kept))
    find.same("long number of kept blocks", kept.sum(1), keep.sum(1))
    for role in config.layers:
        if not role.has_indexer:
            continue
        selected = recording.rows(role.layer, "sel")[-n_queries:]
        overlap = jaccard(selected, tensors[f"L{role.layer}.sel"])
        least = OVERLAP_CONSUMER if role.reads_candidates else OVERLAP
        item = f"long sel L{role.layer}"
        find.at_least(item, "mean overlap", float(overlap.mean()), least, f"query {int(overlap.argmin())}")
        if role.reads_candidates:
            block = (selected.clamp_min(0) // config.candidate_block_size).long()
            outside = (kept.gather(1, block) == 0) & (selected >= 0)
            find.same(f"{item} inside our own kept blocks", outside, torch.zeros_like(outside))
