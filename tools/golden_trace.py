"""Golden traces: every layer by itself, and every operator by itself, from recorded inputs.

With recorded inputs a layer differs from the reference by isolated rounding flips only, so this evidence
is far sharper than logits, whose differences grow to a plateau (backbone.md section 18).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, ModelConfig, TextConfig
from rocline.engine.handoff import FreshRows, HandOff, RowKind, RowSpan, reach_for
from rocline.engine.home import Home
from rocline.engine.layers import attention, compressor, experts, indexer
from rocline.engine.layers.head import embed_rows, final_logits
from rocline.engine.model import Model
from rocline.engine.rope_rows import RopeTables
from rocline.engine.routes import Route, StageLayers
from rocline.engine.stage import Stage
from rocline.engine.weights import ModelWeights
from rocline.hip_kernels import index_score, selection
from rocline.hip_kernels.formats import RowFormat
from rocline.tools.golden_ops import block_mask
from rocline.tools.golden_report import Findings, equal_bits, relative_rms, same_bits

Fields = dict[str, Tensor]
ARENA_BYTES = 64 << 20  # of one layer, for the few rows of a trace

# Relative RMS that a field may reach in one layer; every other field 1e-3.
RMS_LIMITS = {
    "moe_out": 2.6e-2,
    "x_out": 7.5e-3,
    "attn_out": 1.5e-2,
    "o": 1.2e-2,
    "comp_kv": 4e-2,
    "index_k": 4e-2,
    "index_q": 2e-2,
    "index_score": 1e-2,
    "window_kv": 5e-3,
    "hc_ffn.comb": 2.2e-3,
    "hc_ffn.pre": 1.14e-3,
    "q": 8e-3,
    "router.w": 4.4e-3,
    "u_ffn": 2.8e-3,
}
OTHER_RMS_LIMIT = 1e-3
# Rows that may differ, as a share of all (row, layer) pairs. Integers of the token ids alone: none.
ROW_LIMITS = {"engram.rows": 0.0, "router.ids": 0.01, "sel": 0.02, "cand_keep": 0.05}
# What follows from a layer's list, and what from its choice of experts.
AFTER_SEL = ("o", "attn_out", "hc_ffn.pre", "hc_ffn.post", "hc_ffn.comb", "u_ffn", "router.s", "router.ids")
AFTER_ROUTER = ("router.w", "moe_out", "x_out")
THRESHOLDS = ("thr", "thr_next", "thr_tied", "thr_tied_taken")
EXACT_OPERATORS = ("index_score", "cand_keep", "sel")


class Layers(Protocol):
    """A model as far as single layers of it run: a whole one, or a few of its layers."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def home(self) -> Home: ...
    @property
    def placed(self) -> ModelWeights: ...


@dataclass
class Tally:
    """One field over all layers: its worst layer, or its differing rows."""

    exact: bool = True
    fp32: bool = False  # rounded to nothing shorter: the tail of a sum shows
    worst: float = 0.0
    where: str = ""
    n_rows: int = 0
    n_differ: int = 0
    left_out: int = 0

    @property
    def same(self) -> bool:
        return self.exact and not self.n_differ

    def rows(self, layer: int, differs: Tensor) -> None:
        """differs [R]: whether the row's integers are other than recorded."""
        self.n_rows += len(differs)
        self.n_differ += int(differs.sum())
        if differs.any() and not self.where:
            self.where = f"L{layer} row {int(differs.int().argmax())}"

    def values(self, layer: int, got: Tensor, want: Tensor, keep: Tensor | None = None) -> None:
        """got, want [R, ...]; keep [R] bool: rows to judge, None for all."""
        keep = torch.ones(len(want), dtype=torch.bool) if keep is None else keep
        self.left_out += int((~keep).sum())
        self.fp32 = want.dtype == torch.float32
        if same_bits(got, want):
            return
        self.exact = False
        if got.shape != want.shape:
            self.worst, self.where = float("inf"), f"L{layer}: shape {list(got.shape)}, recorded {list(want.shape)}"
            return
        got, want = got[keep], want[keep]
        rms = relative_rms(got, want)
        if rms > self.worst:
            differs = ~equal_bits(got, want).flatten(1).all(1)
            far = ((got.double() - want.double()).abs().nan_to_num(nan=0).flatten(1).amax(1) * differs).argmax()
            self.worst, self.where = rms, f"L{layer} row {int(keep.nonzero()[far])}"


class Tallies:
    """The fields of one way of comparing, and how they are said."""

    def __init__(self, find: Findings, title: str) -> None:
        self.find = find
        self.title = title
        self.fields: dict[str, Tally] = {}

    def of(self, name: str) -> Tally:
        return self.fields.setdefault(name, Tally())

    def say(self, exact_fields: tuple[str, ...] = ()) -> None:
        for name, tally in self.fields.items():
            item = f"{self.title} {name}"
            note = f"{tally.left_out} rows left out: other lists or experts" if tally.left_out else ""
            if name in ROW_LIMITS:
                share = tally.n_differ / tally.n_rows
                limit = 0.0 if name in exact_fields else ROW_LIMITS[name]
                self.find.at_most(item, "rows differ", share, limit, tally.same, tally.where, note)
            else:
                limit = 0.0 if name in exact_fields else RMS_LIMITS.get(name, OTHER_RMS_LIMIT)
                self.find.at_most(item, "rel rms", tally.worst, limit, tally.exact, tally.where, note)


class Trace:
    """The recorded tensors, L<layer>.<field>, in the shapes that operators take."""

    def __init__(self, config: TextConfig, tensors: Fields) -> None:
        self.config = config
        self.tensors = tensors
        self.ids = tensors["ids"].tolist()
        self.n_rows = len(self.ids)
        self.reach = reach_for(config, "full", self.n_rows)
        self.span = RowSpan(0, 0, self.n_rows, RowKind.PREFILL, self.reach, 0)
        self.window_format = RowFormat("window", config.head_dim)
        self.row_format = RowFormat("compressed", config.head_dim)
        self.key_format = RowFormat("index_key", config.index_head_dim)

    def layer(self, layer: int) -> Fields:
        """Its fields by name; a list is widened to index_topk entries, -1 at the end."""
        prefix = f"L{layer}."
        out = {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}
        if "sel" in out:
            out["sel"] = torch.nn.functional.pad(
                out["sel"], (0, self.config.index_topk - out["sel"].shape[1]), value=-1
            )
        return out

    def streams_after(self, layer: int) -> Tensor:
        """What layer's output is compared with: what the next one was given, or the last one's own record."""
        for name in (f"L{layer}.x_out", f"L{layer + 1}.x_pre_engram", f"L{layer + 1}.x_in"):
            if name in self.tensors:
                return self.tensors[name]
        raise KeyError(f"trace: nothing recorded after layer {layer}")

    def visible(self, ratio: int) -> Tensor:
        """[R] int32: compressed rows that each row may see."""
        return torch.div(torch.arange(1, self.n_rows + 1), ratio, rounding_mode="floor").int()

    def blocks(self) -> Tensor:
        """[R, C] int32: the producer's candidate blocks."""
        keep = self.tensors[f"L{self.config.candidate_source_layer_id}.cand_keep"]
        return selection.mask_to_list(keep != 0, self.config.candidate_topk_blocks)

    def hand_off(self, start: HandOff, role: LayerRole) -> HandOff:
        """What enters a layer, all of it recorded. start: the embedded rows, for their ids and positions."""
        t, here = self.layer(role.layer), scratch.upload
        rows = replace(start, streams_bf16=here(t.get("x_pre_engram", t["x_in"])), pre_f32=here(t["pre_in"]))
        if role.index_source is not None and not role.has_indexer:
            rows = replace(rows, selected_i32=here(self.layer(role.index_source)["sel"]))
        if role.reads_candidates:
            rows = replace(rows, blocks_i32=here(self.blocks()))
        if role.kv_source is not None and not role.owns_rows:
            source = self.layer(role.kv_source)
            packed = self.row_format.pack(source["comp_kv"]), self.key_format.pack(source["index_k"])
            rows_u8, keys_u8 = map(here, packed)
            rows = replace(rows, fresh=(FreshRows(role.kv_source, 0, 0, rows_u8, keys_u8),))
        return rows

    def as_recorded(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """A value of our hook in the form of the recorded one, `like`."""
        if value.dtype == torch.uint8 and name in ("window_kv", "comp_kv", "index_k", "index_q"):
            row_format = {"window_kv": self.window_format, "comp_kv": self.row_format}.get(name, self.key_format)
            return row_format.unpack(value)
        if name == "cand_keep":
            return block_mask(value, like.shape[1])
        if name == "index_score":
            return value.bfloat16()
        return value


def check_trace(model: Model, tensors: Fields, find: Findings) -> None:
    """Compare layer by layer, then operator by operator."""
    trace = Trace(model.config.text_config, tensors)
    with torch.inference_mode(), model.at_the_ends():
        _check_layers(model, trace, find)
        _check_operators(model, trace, find)


# -- layer by layer ----------------------------------------------------------------------------------------------


def _check_layers(model: Model, trace: Trace, find: Findings) -> None:
    config = trace.config
    tallies = Tallies(find, "trace")
    thresholds = torch.ones(0, dtype=torch.bool)
    ids = {0: trace.ids}
    start = embed_rows(config, model.placed.embed_bf16, (trace.span,), ids, model.engram_rows((trace.span,), ids))
    for role in config.layers:
        got, rows = run_layer(model, trace, start, role)
        recorded = trace.layer(role.layer)
        want = recorded | {"x_out": trace.streams_after(role.layer)}
        compare_layer(trace, role, got, want, tallies)
        if role.has_indexer:
            thresholds = torch.cat((thresholds, _same_thresholds(trace, role, got["index_score"], recorded)))
    _compare_head(model, trace, rows, tallies)
    tallies.say()
    changed = [name for name, tally in tallies.fields.items() if not tally.fp32 and not tally.same]
    find.on_cpu("trace BF16 and integer fields", "fields changed", len(changed), 0, ", ".join(changed))
    share = float(thresholds.double().mean()) if len(thresholds) else 1.0
    find.informative("trace thr*", "queries equal", share, note="score at the cut, the next one, ties")


def run_layer(
    model: Layers, trace: Trace, start: HandOff, role: LayerRole, arena_bytes: int = ARENA_BYTES
) -> tuple[Fields, HandOff]:
    """One layer as a stage of its own, all rows in one span: the fields it recorded and its output."""
    layer = role.layer
    work = StageLayers((layer,), frozenset({layer} if role.owns_rows else ()))
    page = -(-trace.n_rows // trace.config.candidate_block_size) * 2 * trace.config.candidate_block_size
    sources = frozenset(() if role.kv_source is None else (role.kv_source,))
    planes = model.home.planes(trace.config, sources, 1, page, scored=())  # scores must be seen
    memory = model.home.memory(arena_bytes, f"arena of layer {layer}")
    route, rings = Route(frozenset(), sources, frozenset()), model.home.ring_data
    stage = Stage(model.config, [work], model.placed.layers, planes, memory, [route], False, rings, 1)
    stage.open(0, page_table=[0])
    got: dict[str, Tensor] = {}

    def record(layer: int, field: str, value: Tensor) -> None:
        value = scratch.fetch(value)
        if field == "index_score":  # comes in parts, each as wide as its last row sees
            width = trace.n_rows // role.ratio
            value = torch.nn.functional.pad(value, (0, width - value.shape[1]), value=float("-inf"))
            value = torch.cat((got[field], value)) if field in got else value
        got["cand_keep" if field == "cand_blocks" else field] = value.clone()

    return got, stage.run(trace.hand_off(start, role), record=record).unpacked()


def compare_layer(trace: Trace, role: LayerRole, got: Fields, want: Fields, tallies: Tallies) -> None:
    """Rows whose list or experts came out otherwise are left out of the fields that follow from them."""
    inputs = {"x_pre_engram", "pre_in"} | (set() if role.engram is not None else {"x_in"})
    got = {name: trace.as_recorded(name, got[name], want[name]) for name in got if name in want and name not in inputs}
    ours, theirs = (_by_expert(fields) for fields in (got, want))
    same_list = torch.ones(trace.n_rows, dtype=torch.bool)
    if "sel" in want:
        same_list = (got["sel"] == want["sel"]).all(1)
    same_experts = same_list & (ours["router.ids"] == theirs["router.ids"]).all(1)
    for name, value in ours.items():
        tally = tallies.of(name)
        keep = same_experts if name in AFTER_ROUTER else same_list if name in AFTER_SEL else None
        if name in ROW_LIMITS:
            differs = (value != theirs[name]).any(1)
            tally.rows(role.layer, differs if keep is None else differs & keep)
        else:
            tally.values(role.layer, value, theirs[name], keep)


def _by_expert(fields: Fields) -> Fields:
    """Routing ordered by expert id: two nearly tied experts may come in either order."""
    ids, order = fields["router.ids"].sort(1)
    return fields | {"router.ids": ids, "router.w": fields["router.w"].gather(1, order)}


def _same_thresholds(trace: Trace, role: LayerRole, scores_bf16: Tensor, want: Fields) -> Tensor:
    """[R] bool: whether the cut through a query's scores is the recorded one, ties and next score included."""
    scores_f32 = scores_bf16.float()
    if role.reads_candidates:
        scores_f32 = selection.restrict_ref(scores_f32, trace.blocks(), trace.config.candidate_block_size)
    ordered = scores_f32.sort(1, descending=True).values
    k = min(trace.config.index_topk, scores_f32.shape[1])
    cut = ordered[:, k - 1]
    following = ordered[:, k] if scores_f32.shape[1] > k else torch.full_like(cut, float("-inf"))
    tied = (scores_f32 == cut[:, None]).sum(1)
    taken = k - (scores_f32 > cut[:, None]).sum(1)
    mine = dict(zip(THRESHOLDS, (cut, following, tied, taken), strict=True))
    return torch.stack([mine[name] == want[name] for name in THRESHOLDS]).all(0)


def _compare_head(model: Model, trace: Trace, last: HandOff, tallies: Tallies) -> None:
    """final_h and logits from the last layer's recorded output."""
    n_layers = trace.config.num_hidden_layers
    recorded, weights = trace.layer(n_layers - 1), model.placed
    streams_bf16, pre_f32 = scratch.upload(recorded["x_out"]), scratch.upload(recorded["hc_ffn.pre"])
    rows = replace(last, streams_bf16=streams_bf16, pre_f32=pre_f32)
    got: Fields = {}

    def record(layer: int, field: str, value: Tensor) -> None:
        got[field] = scratch.fetch(value)

    logits = final_logits(trace.config, weights.norm_bf16, weights.head_bf16, rows, record)
    tallies.of("final_h").values(n_layers, got["final_h"], trace.tensors["final_h"])
    tallies.of("logits").values(n_layers, scratch.fetch(logits.logits_f32), trace.tensors["logits"])


# -- operator by operator ----------------------------------------------------------------------------------------


def _check_operators(model: Model, trace: Trace, find: Findings) -> None:
    tallies, tables = Tallies(find, "trace operator"), RopeTables(trace.config)
    for role in trace.config.layers:
        want = trace.layer(role.layer)
        got = _row_operators(model, trace, role, tables, want)
        if role.has_indexer:
            got |= _selection_operators(trace, role, want)
        ours, theirs = (_by_expert(fields) for fields in (got, want))
        same_experts = (ours["router.ids"] == theirs["router.ids"]).all(1)
        for name, value in ours.items():
            if name in ROW_LIMITS:
                tallies.of(name).rows(role.layer, (value != theirs[name]).any(1))
            else:
                keep = same_experts if name in AFTER_ROUTER else None
                tallies.of(name).values(role.layer, value, theirs[name], keep)
    tallies.say(EXACT_OPERATORS)


def _row_operators(model: Model, trace: Trace, role: LayerRole, tables: RopeTables, want: Fields) -> Fields:
    """Projections, rows and experts of one layer, each from its own recorded input."""
    config, weights = trace.config, model.placed.layer(role.layer)
    want = {name: scratch.upload(value) for name, value in want.items() if name in ("u_attn", "u_ffn", "qr", "lat")}
    turn = tables.rows(torch.arange(trace.n_rows, dtype=torch.int32), role.ratio)
    out: Fields = {}

    def record(layer: int, field: str, value: Tensor) -> None:
        if field not in ("router.s", "lat"):
            out[field] = scratch.fetch(value).clone()

    record(role.layer, "window_kv", attention.window_rows(config, weights.attention, want["u_attn"], turn))
    record(role.layer, "qr", attention.low_rank_query(config, weights.attention, want["u_attn"]))
    record(role.layer, "moe_out", experts.mixture(config, weights.experts, role.layer, want["u_ffn"], record))
    if weights.indexer is not None:
        record(role.layer, "index_q", indexer.query_rows(config, weights.indexer, want["qr"], turn))
    if weights.compressor is not None:
        compressor.fresh_rows(config, weights.compressor, role, tables, trace.span, want["lat"], record)
    recorded = trace.layer(role.layer)
    return {name: trace.as_recorded(name, value, recorded[name]) for name, value in out.items()}


def _selection_operators(trace: Trace, role: LayerRole, want: Fields) -> Fields:
    """Scores, candidate blocks and lists of an index source, each from its own recorded input."""
    config = trace.config
    keys_u8 = scratch.upload(trace.key_format.pack(trace.tensors[f"L{role.kv_source}.index_k"]))
    visible = scratch.upload(trace.visible(role.ratio))
    scores_f32 = scratch.f32(trace.n_rows, len(keys_u8))
    queries_u8, weights_bf16 = scratch.upload(trace.key_format.pack(want["index_q"])), scratch.upload(want["index_w"])
    page_table = scratch.upload(torch.zeros(1, dtype=torch.int32))
    index_score.index_score(queries_u8, weights_bf16, keys_u8[None], page_table, visible, scores_f32)
    out: Fields = {"index_score": scratch.fetch(scores_f32).bfloat16()}
    recorded_f32 = scratch.upload(want["index_score"].float())
    if role.writes_candidates:
        blocks_i32 = scratch.i32(trace.n_rows, config.candidate_topk_blocks)
        selection.candidate_blocks(recorded_f32, visible, config.candidate_block_size, blocks_i32)
        out["cand_keep"] = block_mask(scratch.fetch(blocks_i32), want["cand_keep"].shape[1])
    blocks = scratch.upload(trace.blocks()) if role.reads_candidates else None
    selected_i32 = scratch.i32(trace.n_rows, config.index_topk)
    selection.top_k_list(recorded_f32, visible, blocks, config.candidate_block_size, selected_i32)
    out["sel"] = scratch.fetch(selected_i32)
    return out
