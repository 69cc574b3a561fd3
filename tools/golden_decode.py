"""Golden decode: rows fed with the recorded tokens, the lists behind them, and the release's index-key defect."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine.handoff import RowKind
from rocline.engine.model import Model
from rocline.hip_kernels.binding import TILE_ROWS
from rocline.tools.golden_limits import FILLING_MEDIAN, OVERLAP_EVEN, ModelLimits
from rocline.tools.golden_model import Fields, Recording, spread
from rocline.tools.golden_report import Findings, jaccard, row_errors, same_bits, worst_of

DEFECT_ROWS = 24  # rows of the defect to run: it shows from the first even position on
TILES = f"{TILE_ROWS}-row tiles: a decode step of the reference has one row"


@dataclass(frozen=True)
class Forced:
    """One start length: what was recorded, and what we gave when fed the same tokens.

    logits_f32  [n, V]; lists  by index layer [n - 1, K], the first of the step after the prompt
    """

    start: int
    prompt: list[int]
    ids: list[int]
    logits_f32: Tensor
    lists: dict[int, Tensor]


def check_decode(model: Model, slot_model: Model, tensors: Fields, limits: ModelLimits, find: Findings) -> None:
    """slot_model: the same weights with shared_key_slot=True, for the recorded defect."""
    starts = sorted(int(name.removeprefix("prompt.")) for name in tensors if name.startswith("prompt."))
    forced = _feed(model, tensors, starts)
    errors = [row_errors(run.logits_f32, tensors[f"logits.{run.start}"]) for run in forced]
    for run, run_errors, at_once_f32 in zip(forced, errors, _at_once(model, forced), strict=True):
        _check_rows(model, run, run_errors, tensors[f"logits.{run.start}"], limits, find)
        find.same(f"decode {run.start} against our own prefill", run.logits_f32, at_once_f32)
        _check_lists(model, run, tensors, find)
    median, p90 = spread(torch.cat(errors))
    find.on_cpu("decode median, all rows", "row error", median, limits.cpu.decode_median)
    find.on_cpu("decode p90, all rows", "row error", p90, limits.cpu.decode_p90)
    for start in starts:
        if tensors[f"defect_forced_maxdiff.{start}"].any():
            _check_defect(slot_model, start, tensors, limits, find)
        else:
            find.not_read(f"decode {start} defect", "recorded as changing nothing at this length")


def _feed(model: Model, tensors: Fields, starts: list[int]) -> list[Forced]:
    """Every prompt, then its recorded tokens one by one: all start lengths share the steps."""
    prompts = [tensors[f"prompt.{start}"].tolist() for start in starts]
    ids = [tensors[f"ids.{start}"].tolist() for start in starts]
    handles = [model.open() for _ in starts]
    logits = [[model.prefill(h, prompt)[-1].logits_f32[-1]] for h, prompt in zip(handles, prompts, strict=True)]
    lists: list[dict[int, list[Tensor]]] = [{} for _ in starts]
    for step in range(max(map(len, ids)) - 1):
        active = [at for at in range(len(starts)) if step < len(ids[at]) - 1]
        recording = Recording("sel")
        out = model.decode([(handles[at], ids[at][step]) for at in active], recording)
        for row, at in enumerate(active):
            logits[at].append(out.logits_f32[row])
            for (layer, _), values in recording.values.items():
                lists[at].setdefault(layer, []).append(values[0][row])
    for handle in handles:
        model.close(handle)
    return [
        Forced(start, prompts[at], ids[at], torch.stack(logits[at]), {k: torch.stack(v) for k, v in lists[at].items()})
        for at, start in enumerate(starts)
    ]


def _at_once(model: Model, forced: list[Forced]) -> list[Tensor]:
    """The same rows' logits when prompt and fed tokens are one prompt."""
    handles = [model.open() for _ in forced]
    prompts = [run.prompt + run.ids[:-1] for run in forced]
    logits_f32 = model.extend(list(zip(handles, prompts, strict=True)), RowKind.PREFILL).logits_f32
    for handle in handles:
        model.close(handle)
    parts = logits_f32.split([len(prompt) for prompt in prompts])
    return [part[run.start - 1 :] for part, run in zip(parts, forced, strict=True)]


def _check_rows(model: Model, run: Forced, errors: Tensor, want: Tensor, limits: ModelLimits, find: Findings) -> None:
    name, wide = f"decode {run.start}", limits.any_device
    exact, note = same_bits(run.logits_f32, want), TILES if find.on_host else ""
    (median, p90), (_, (row,)) = spread(errors), worst_of(errors)
    find.at_most(f"{name} median", "row error", median, wide.decode_median, exact, f"worst row {row}", note)
    find.at_most(f"{name} p90", "row error", p90, wide.decode_p90, exact, f"worst row {row}", note)
    n_filling = model.config.text_config.sliding_window - run.start
    if n_filling > 0:
        median, _ = spread(errors[1 : n_filling + 1])
        item = f"{name} median, rows 1-{n_filling}"
        find.on_cpu(item, "row error", median, FILLING_MEDIAN, "window filling")
    _check_greedy(name, run.logits_f32, run.ids, want, wide.decode_p90, find)


def _check_greedy(name: str, logits_f32: Tensor, ids: list[int], want: Tensor, limit: float, find: Findings) -> None:
    """Free-running ids are those of the fed rows up to the first that differs: only a near-tied row may."""
    differs = (logits_f32.argmax(1) != torch.tensor(ids)).nonzero()
    n_same = int(differs[0]) if len(differs) else len(ids)
    note = f"{n_same} of {len(ids)} ids before the first other one"
    if n_same == len(ids):
        find.at_most(f"{name} greedy ids", "margin / rms", 0.0, limit, True, note=note)
        return
    best = want[n_same].topk(2).values
    margin = float((best[0] - best[1]) / want[n_same].square().mean().sqrt())
    find.at_most(f"{name} greedy ids", "margin / rms", margin, 2 * limit, False, f"row {n_same}", note)


def _check_lists(model: Model, run: Forced, tensors: Fields, find: Findings) -> None:
    steps = torch.arange(1, len(run.ids))
    even = (run.start + steps - 1) % 2 == 0
    others = []
    for role in model.config.text_config.layers:
        if not role.has_indexer:
            continue
        overlap = jaccard(run.lists[role.layer], tensors[f"sel.{run.start}.L{role.layer}"])
        if role.ratio == 2 and role.owns_rows:
            worst = f"step {int((overlap + ~even).argmin()) + 1}"
            item = f"decode {run.start} sel L{role.layer}, even positions"
            find.at_least(item, "mean overlap", float(overlap[even].mean()), OVERLAP_EVEN, worst)
        else:
            others.append(overlap.mean())
    if others:
        note = "index layers that read ratio-1 rows"
        find.informative(f"decode {run.start} sel, other layers", "mean overlap", float(min(others)), note=note)


# -- the index-key defect of the release's decode ----------------------------------------------------------------


def _check_defect(model: Model, start: int, tensors: Fields, limits: ModelLimits, find: Findings) -> None:
    """The shared-slot variant, fed with the recorded tokens and, in the same steps, running free.

    Both sequences stand at the same position, so one slot serves both as it would serve each.
    """
    fed_f32, free_f32, lists = _feed_slot(model, start, tensors)
    name, n_rows = f"decode {start} defect", len(fed_f32)
    want = tensors[f"logits.{start}"][:n_rows]
    argmax = tensors[f"defect_forced_argmax.{start}"][:n_rows]
    agree = float((fed_f32.argmax(1) == argmax).double().mean())
    find.informative(f"{name} forced arg-max", "rows equal", agree)
    rms = want.square().mean(1).sqrt()
    shift = ((fed_f32 - want).abs().amax(1) - tensors[f"defect_forced_maxdiff.{start}"][:n_rows]).abs() / rms
    (median, _), (_, (row,)) = spread(shift), worst_of(shift)
    # Of a row's 512 differences the largest is about four times their root mean square.
    limit = 4 * limits.cpu.decode_median
    find.on_cpu(f"{name} forced max", "median abs / rms", median, limit, f"worst row {row}")
    ids = tensors[f"defect_ids.{start}"][:n_rows].tolist()
    _check_greedy(name, free_f32, ids, free_f32, limits.any_device.decode_p90, find)
    even = (start + torch.arange(n_rows - 1)) % 2 == 0
    for layer, selected in lists.items():
        overlap = float(jaccard(selected, tensors[f"sel.{start}.L{layer}"][: n_rows - 1])[even].mean())
        find.at_most(f"{name} sel L{layer}, even positions", "mean overlap", overlap, OVERLAP_EVEN, False)


def _feed_slot(model: Model, start: int, tensors: Fields) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Logits [n, V] fed and free, and the fed sequence's lists [n - 1, K] of the ratio-2 sources."""
    sources = [role.layer for role in model.config.text_config.layers if role.ratio == 2 and role.owns_rows]
    prompt, ids = tensors[f"prompt.{start}"].tolist(), tensors[f"ids.{start}"][:DEFECT_ROWS].tolist()
    fed, free = model.open(), model.open()
    rows = [model.extend([(handle, prompt) for handle in (fed, free)], RowKind.PREFILL).logits_f32[[start - 1, -1]]]
    recording = Recording("sel")
    for token in ids[:-1]:
        step = [(fed, token), (free, int(rows[-1][1].argmax()))]
        rows.append(model.decode(step, recording).logits_f32)
    model.close(fed)
    model.close(free)
    logits_f32 = torch.stack(rows)
    lists = {layer: torch.stack(recording.values[layer, "sel"])[:, 0] for layer in sources}
    return logits_f32[:, 0], logits_f32[:, 1], lists
