"""The rung of the first layers: real weights, each layer by itself on the host and on every card, and who is to blame.

Every layer is given what the host's run of the layer before made, so that differences do not grow from layer to layer,
and is held to the limits of golden traces (golden_trace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import LayerRole, ModelConfig
from rocline.engine.engram import load_id_map
from rocline.engine.engram_ahead import GatheredLate
from rocline.engine.handoff import HandOff
from rocline.engine.home import HipHome, Home, HostHome, Part
from rocline.engine.layers.head import embed_rows, lookback_rows
from rocline.engine.layout import expected_tensors
from rocline.engine.progress import ByteProgress
from rocline.engine.weights import NOT_LOADED, ModelWeights, StoredWeights
from rocline.hip_kernels.device_ops import KERNELS, PARTS
from rocline.hip_kernels.driver import Device
from rocline.pipeline.plan import counted
from rocline.tools.bring_up_site import Site
from rocline.tools.doctor_checks import Check
from rocline.tools.golden_ops import block_mask
from rocline.tools.golden_report import Finding, Findings
from rocline.tools.golden_trace import ARENA_BYTES, Fields, Tallies, Trace, compare_layer, run_layer

N_LAYERS = 3  # of the release: a window layer, one with Engram, one that makes compressed rows and index keys
MORE_ROWS = 32  # beyond the local window
ARENA_WIDTH = 128  # hidden channels for which ARENA_BYTES is meant
NOT_OF_LAYERS = ("embedding", "head", "rows_finite", "sample")
# Once a layer's own fields are wrong, so are those after it: the first of these that is wrong says most.
ORDER = (
    *("x_pre_engram", "engram.rows", "engram.gate", "x_in", "pre_in", "u_attn", "lat", "comp_kv", "index_k"),
    *("window_kv", "qr", "q", "index_q", "index_w", "index_score", "cand_keep", "sel", "o", "attn_out"),
    *("hc_attn.pre", "hc_attn.post", "hc_attn.comb", "u_ffn", "router.s", "router.ids", "router.w", "moe_out"),
    *("hc_ffn.pre", "hc_ffn.post", "hc_ffn.comb", "x_out"),
)


@dataclass(frozen=True)
class Placed:
    """Some layers of a model, where they run."""

    config: ModelConfig
    home: Home
    placed: ModelWeights

    @classmethod
    def on_host(cls, config: ModelConfig, weights: ModelWeights) -> Placed:
        return cls(config, HostHome(), weights)

    @classmethod
    def on_card(
        cls, config: ModelConfig, weights: ModelWeights, device: Device, reference_ops: Collection[str]
    ) -> Placed:
        home = HipHome(config.text_config, device, reference_ops, sequences_at_once=1)
        return cls(config, home, home.weights(config.text_config, weights, Part(list(weights.layers), ends=False)))

    @property
    def roles(self) -> list[LayerRole]:
        return [self.config.text_config.layers[layer] for layer in sorted(self.placed.layers)]

    @contextmanager
    def at_work(self, trace: Trace) -> Iterator[HandOff]:
        """The embedded rows; meanwhile this thread's memory is that of rows which are in no stage."""
        text, spans, ids = self.config.text_config, (trace.span,), {0: trace.ids}
        tables = self.placed.engram_tables
        engram = GatheredLate(tables, lookback_rows(text, spans, ids)) if tables and self.home.gathers_on_host else None
        ends = self.home.ends()
        if ends is None:
            yield embed_rows(text, self.placed.embed_bf16, spans, ids, engram)
            return
        with scratch.use(ends), ends.scope():
            yield embed_rows(text, self.placed.embed_bf16, spans, ids, engram)

    def run(self, trace: Trace, start: HandOff, role: LayerRole) -> tuple[Fields, HandOff]:
        wide = max(1, self.config.text_config.hidden_size // ARENA_WIDTH)
        return run_layer(self, trace, start, role, wide * ARENA_BYTES)


def n_layers(config: ModelConfig) -> int:
    return min(N_LAYERS, config.text_config.num_hidden_layers)


def n_bytes(config: ModelConfig) -> int:
    """What is read of the checkpoint: of Engram's tables only the rows that are hashed to."""
    parts = ("embed.", "norm.", *(f"layers.{layer}." for layer in range(n_layers(config))))
    return sum(
        spec.n_bytes
        for name, spec in expected_tensors(config).items()
        if name.startswith(parts) and spec.component not in NOT_LOADED and ".engram.embed." not in name
    )


def layers(site: Site) -> Check:
    """The first layers on the host and on each card."""
    it = Check("layers")
    if not site.found.devices:
        it.not_applicable("no card to compare with the host")
        return it
    weights = _weights(site)
    ids = site.prompt(min(site.config.text_config.sliding_window + MORE_ROWS, site.context))
    with torch.inference_mode():
        host = Placed.on_host(site.config, weights)
        trace, wanted = _host_run(host, ids)
        for device in site.found.devices:
            findings = _compared(host, trace, wanted, device, site.options.reference_op)
            failed = sorted((f for f in findings if f.verdict == "failed"), key=_place)
            it.values[f"card {device.index}"] = [f.row() for f in findings]
            if failed:
                _blame(it, site, host, trace, wanted, device, failed)
                return it
    nearest = max(findings, key=lambda f: (f.worst or 0.0) / (f.limit or 1.0))
    it.ok(
        f"layers 0 to {len(host.roles) - 1}, {len(ids)} rows, on {counted(len(site.found.devices), 'card')} as on the "
        f"host; of the last card's fields {nearest.item} is nearest to its limit: {nearest.worst:.2g} of "
        f"{nearest.limit:.2g}"
    )
    return it


def _weights(site: Site) -> ModelWeights:
    """Of the first layers alone; the head stays where it is, and so do tables of Engram."""
    text = site.config.text_config
    with (
        Checkpoint.open(site.folder, site.config) as checkpoint,
        ByteProgress("layers", n_bytes(site.config)) as progress,
    ):
        id_map = load_id_map(site.folder, text)
        stored = StoredWeights(checkpoint, text, id_map, "mmap", progress.advance)
        found = {layer: stored.layer(layer) for layer in range(n_layers(site.config))}
        no_head_bf16 = torch.empty((0, text.hidden_size), dtype=torch.bfloat16)
        return ModelWeights(stored.embed_bf16, stored.norm_bf16, no_head_bf16, found)


def _host_run(host: Placed, ids: list[int]) -> tuple[Trace, dict[int, Fields]]:
    """What the host computes, in the form of a golden trace, and each layer's fields."""
    tensors: dict[str, Tensor] = {"ids": torch.tensor(ids)}
    trace, wanted = Trace(host.config.text_config, tensors), dict[int, Fields]()
    with host.at_work(trace) as start:
        tensors |= _inputs(0, start)
        for role in host.roles:
            got, rows = host.run(trace, start, role)
            wanted[role.layer] = {name: _recorded(trace, role, name, value) for name, value in got.items()}
            tensors |= {f"L{role.layer}.{name}": value for name, value in wanted[role.layer].items()}
            tensors |= _inputs(role.layer + 1, rows)
    return trace, wanted


def _inputs(layer: int, rows: HandOff) -> Fields:
    return {f"L{layer}.x_in": rows.streams_bf16.clone(), f"L{layer}.pre_in": rows.pre_f32.clone()}


def _recorded(trace: Trace, role: LayerRole, name: str, value: Tensor) -> Tensor:
    if name == "cand_keep":
        n_blocks = -(-(trace.n_rows // role.ratio) // trace.config.candidate_block_size)
        return block_mask(value, n_blocks)
    return trace.as_recorded(name, value, value)


def _compared(
    host: Placed, trace: Trace, wanted: Mapping[int, Fields], device: Device, reference_ops: Collection[str]
) -> list[Finding]:
    """The fields of each layer on a card against the host's, by layer and field."""
    findings: list[Finding] = []
    card = Placed.on_card(host.config, host.placed, device, reference_ops)
    for role in card.roles:
        tallies = Tallies(Findings(f"card {device.index}", findings.append, on_host=False), f"L{role.layer}")
        with card.at_work(trace) as start:
            got, _ = card.run(trace, start, role)
            compare_layer(trace, role, got, wanted[role.layer], tallies)
        tallies.say()
    return findings


def _place(finding: Finding) -> tuple[int, int]:
    """Earlier layers first, and of one layer the fields that others follow from."""
    layer, name = finding.item.split()
    return int(layer[1:]), ORDER.index(name) if name in ORDER else len(ORDER)


def _blame(
    it: Check,
    site: Site,
    host: Placed,
    trace: Trace,
    wanted: Mapping[int, Fields],
    device: Device,
    failed: list[Finding],
) -> None:
    """Say what differs, and which operator's reference puts it right."""
    first = failed[0]
    layer = _place(first)[0]
    alone = Placed.on_host(host.config, _only(host.placed, layer))

    def is_right(reference_ops: Collection[str]) -> bool:
        findings = _compared(alone, trace, wanted, device, [*site.options.reference_op, *reference_ops])
        return not any(finding.verdict == "failed" for finding in findings)

    said = "; ".join(f"{f.item}: {f.worst:.3g} {f.measure}, limit {f.limit:.3g}, {f.where}" for f in failed[:3])
    culprit = culprit_of(is_right)
    it.values["culprit"] = culprit
    if culprit:
        users = [name for name, parts in PARTS.items() if culprit in parts]
        kernels = f"{culprit}{f', or of {chr(32).join(users)}, of which it is a part,' * bool(users)}"
        advice = (
            f"with --reference-op {culprit} layer {layer} is right: the kernel of {kernels} is wrong on {device.arch}. "
            f"Climb on with --from layers --reference-op {culprit}, slower, and send in this report"
        )
    else:
        advice = "no single operator's reference puts it right: see docs/bring-up.md, layers, on what else it can be"
    it.problem(f"card {device.index}, the first of {len(failed)} fields beyond their limits: {said}", advice)


def _only(weights: ModelWeights, layer: int) -> ModelWeights:
    return ModelWeights(weights.embed_bf16, weights.norm_bf16, weights.head_bf16, {layer: weights.layers[layer]})


def culprit_of(is_right: Callable[[Collection[str]], bool]) -> str | None:
    """The operator whose reference alone makes things right; None where no one's does.

    Halves first: all references of a half together, as long as one half puts it right.
    """
    names = [name for name in KERNELS if name not in PARTS and name not in NOT_OF_LAYERS]
    if not is_right(names):
        return None
    while len(names) > 1:
        half = names[: len(names) // 2]
        names = half if is_right(half) else names[len(names) // 2 :]
    return names[0] if is_right(names) else None
