"""All stages of a model run one after another in this thread: what conformance, generation and tests call.

Prefill in chunks, decode, verify, truncate, snapshot and restore (design.md section 5; backbone.md section 9).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
from rocline.engine.engram import load_id_map
from rocline.engine.engram_ahead import GatheredLate
from rocline.engine.handoff import PrefillMode, Reach, RowKind, Rows, RowSpan, reach_for
from rocline.engine.home import DeviceKind, HipHome, Home, HostHome, Part
from rocline.engine.layers.head import Logits, embed_rows, final_logits, lookback_rows
from rocline.engine.pages import PAGE_POSITIONS, Pages, scored_sources
from rocline.engine.record import Recorder, ignore
from rocline.engine.routes import Route, StageLayers, routes
from rocline.engine.sequence import REWIND_ROWS, Rings
from rocline.engine.stage import Stage
from rocline.engine.weights import EngramHome, ModelWeights, load_weights

ARENA_BYTES = 1 << 30  # of address space; a host page is committed when it is first written
CHUNK_ROWS = 1024


class PromptError(ValueError):
    """Token ids that cannot be run: none, out of range, or past the context."""


@dataclass(eq=False)
class SequenceHandle:
    """One sequence: its number in every stage, the token ids whose rows are in, and the pages that those fill."""

    number: int
    ids: array[int]
    page_table: list[int]

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Snapshot:
    """A sequence's state after `ids`: the rings of each stage. Compressed rows stay in their pages."""

    number: int
    ids: array[int]
    rings: tuple[Rings, ...]


def split_layers(config: ModelConfig, n_stages: int, early_kv_side: bool = False) -> list[StageLayers]:
    """Contiguous stages of nearly equal length; optionally the last source's key/value side goes one layer early."""
    text = config.text_config
    bounds = [text.num_hidden_layers * i // n_stages for i in range(n_stages + 1)]
    stages = []
    for first, stop in pairwise(bounds):
        sides = {layer for layer in text.kv_source_layer_ids if first <= layer < stop}
        if early_kv_side:
            last = text.kv_source_layer_ids[-1]
            sides = (sides - {last}) | ({last} if first <= last - 1 < stop else set())
        stages.append(StageLayers(tuple(range(first, stop)), frozenset(sides)))
    return stages


class Model:
    """A loaded model and its open sequences, on the host or on one GPU.

    weights      on the host; `placed` are those that run, which `home` makes of them
    stages       each runs as on a device of its own
    kv_tokens    positions that all sequences together may hold, in whole pages
    arena_bytes  of each stage; poison as in StageMemory, shared_key_slot as in Stage
    home         where all of it lives; of this model's thread
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        stages: Sequence[StageLayers] | None = None,
        kv_tokens: int | None = None,
        page_positions: int = PAGE_POSITIONS,
        arena_bytes: int = ARENA_BYTES,
        poison: bool = False,
        shared_key_slot: bool = False,
        home: Home | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.home: Home = home or HostHome()
        self.placed = self.home.weights(config.text_config, weights, Part.whole(config.text_config))
        self._ends = self.home.ends()
        tokens = kv_tokens or config.text_config.max_position_embeddings
        self.pages = Pages(-(-tokens // page_positions), page_positions)

        def stage(work: StageLayers, route: Route) -> Stage:
            scored = () if shared_key_slot else scored_sources(config.text_config, work.layers)
            planes = self.home.planes(config.text_config, route.stores, self.pages.n_pages, page_positions, scored)
            memory = self.home.memory(arena_bytes, f"arena of layers {min(work.steps)}..{max(work.steps)}", poison)
            return Stage(
                config,
                [work],
                self.placed.layers,
                planes,
                memory,
                [route],
                shared_key_slot,
                self.home.ring_data,
                self.home.sequences_at_once,
            )

        works = stages or split_layers(config, 1)
        self.stages = [stage(*visit) for visit in zip(works, routes(config, list(enumerate(works))), strict=True)]
        self.sequences: dict[int, SequenceHandle] = {}
        self._numbers = count()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        engram: EngramHome = "ram",
        advance: Callable[[int], None] = lambda n_bytes: None,
        device: DeviceKind = "cpu",
        reference_ops: Collection[str] = (),
        **options: object,
    ) -> Model:
        """Open, check and read a checkpoint folder. Raises ConfigError or CheckpointError, before memory is used.

        device         "hip": the first GPU; raises HipError where there is none that can be used
        reference_ops  operators that run their torch reference there; raises DispatchError for an unknown one
        """
        config = ModelConfig.load(folder)
        home = HipHome(config.text_config, reference_ops=reference_ops) if device == "hip" else HostHome()
        with Checkpoint.open(folder, config) as checkpoint:
            id_map = load_id_map(folder, config.text_config)
            weights = load_weights(checkpoint, config.text_config, id_map, engram, advance)
        return cls(config, weights, home=home, **options)  # type: ignore[arg-type]

    def capture_steps(self, most_rows: int) -> None:
        """Capture steps of up to most_rows rows as in Stage, where the home does so. No sequence may be open."""
        context = min(self.config.text_config.max_position_embeddings, self.pages.n_pages * self.pages.page_positions)
        if memory_of := self.home.step_memory():
            for stage in self.stages:
                stage.capture_steps(memory_of, most_rows, context)

    def open(self) -> SequenceHandle:
        """A new, empty sequence."""
        handle = SequenceHandle(next(self._numbers), array("i"), [])
        self.sequences[handle.number] = handle
        for stage in self.stages:
            stage.open(handle.number, handle.page_table)
        return handle

    def close(self, handle: SequenceHandle) -> None:
        """Forget a sequence and free its pages. Harmless on one that is closed already."""
        if self.sequences.pop(handle.number, None):
            for stage in self.stages:
                stage.close(handle.number)
            self.pages.give_back(handle.page_table)

    def prefill(
        self,
        handle: SequenceHandle,
        ids: Sequence[int],
        *,
        mode: PrefillMode = "halo",
        chunk_rows: int = CHUNK_ROWS,
        all_logits: bool = False,
        progress: Callable[[int], None] = lambda n_rows: None,
        record: Recorder = ignore,
    ) -> list[Logits]:
        """Append `ids` to the sequence; logits of the last row, or of all new rows (which needs mode "full").

        chunk_rows changes no bit of the answer. progress is called with the rows of each chunk done.
        """
        if all_logits and mode != "full":
            raise ValueError(f"all_logits with mode = {mode!r}: only 'full' runs every row to the end")
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows = {chunk_rows}: must be at least 1")
        self._check_ids(handle, ids)
        begin, end = handle.length, handle.length + len(ids)
        reach = reach_for(self.config.text_config, mode, end)
        out = []
        for start in range(begin, end, chunk_rows):
            part = ids[start - begin : start - begin + chunk_rows]
            span = RowSpan(handle.number, start, len(part), RowKind.PREFILL, reach, begin if all_logits else end - 1)
            logits = self._forward([span], [part], record)
            if logits.rows:
                out.append(logits)
            progress(len(part))
        return out

    def decode(self, tokens: Sequence[tuple[SequenceHandle, int]], record: Recorder = ignore) -> Logits:
        """Append one token to each of several sequences; one row of logits each, in that order."""
        return self.extend([(handle, (token,)) for handle, token in tokens], RowKind.DECODE, record)

    def verify(self, handle: SequenceHandle, ids: Sequence[int]) -> Logits:
        """Append up to REWIND_ROWS draft tokens in one step; logits of every row."""
        if len(ids) > REWIND_ROWS:
            raise PromptError(f"{len(ids)} rows to verify: at most {REWIND_ROWS} can be taken back")
        return self.extend([(handle, ids)], RowKind.VERIFY)

    def extend(
        self,
        tokens: Sequence[tuple[SequenceHandle, Sequence[int]]],
        kind: RowKind,
        record: Recorder = ignore,
    ) -> Logits:
        """Append rows that run all layers, to several sequences at once; logits of every row."""
        spans = []
        for handle, ids in tokens:
            self._check_ids(handle, ids)
            reach = reach_for(self.config.text_config, "full", handle.length + len(ids))
            spans.append(RowSpan(handle.number, handle.length, len(ids), kind, reach, handle.length))
        return self._forward(spans, [ids for _, ids in tokens], record)

    def truncate(self, handle: SequenceHandle, length: int) -> None:
        """Go back to the first `length` rows, exactly as if the others had never run.

        Rows of the last verify step are dropped. Farther back, where the rings no longer reach, the last
        window + (layers - 1)(window - 1) rows run again from their ids against the kept compressed rows.
        """
        if not 0 <= length <= handle.length:
            raise ValueError(f"truncate to {length}: the sequence has {handle.length} rows")
        exact = all(stage.can_rewind(handle.number, length) for stage in self.stages)
        for stage in self.stages:
            stage.truncate(handle.number, length)
        self.pages.give_back(handle.page_table, length)
        del handle.ids[length:]
        if exact:
            return
        text = self.config.text_config
        reach = Reach(length, text.sliding_window, text.num_hidden_layers, first_layer=0)
        for start in range(reach.floor(0), length, CHUNK_ROWS):
            n_rows = min(CHUNK_ROWS, length - start)
            span = RowSpan(handle.number, start, n_rows, RowKind.PREFILL, reach, length, keeps_rows=False)
            self._run([span], ignore)

    def snapshot(self, handle: SequenceHandle) -> Snapshot:
        """Everything that appending more rows would overwrite."""
        rings = tuple(stage.snapshot(handle.number) for stage in self.stages)
        return Snapshot(handle.number, handle.ids[:], rings)

    def restore(self, handle: SequenceHandle, snapshot: Snapshot) -> None:
        """Back to a snapshot of this sequence, of which the present rows must be a continuation."""
        length = len(snapshot.ids)
        if snapshot.number != handle.number or handle.ids[:length] != snapshot.ids:
            raise ValueError(f"sequence {handle.number} does not continue the snapshot's {length} ids")
        for stage, rings in zip(self.stages, snapshot.rings, strict=True):
            stage.truncate(handle.number, length)
            stage.restore(handle.number, rings)
        self.pages.give_back(handle.page_table, length)
        del handle.ids[length:]

    def _check_ids(self, handle: SequenceHandle, ids: Sequence[int]) -> None:
        text = self.config.text_config
        if handle.number not in self.sequences:
            raise PromptError(f"sequence {handle.number} is closed; open a new one")
        if not len(ids):
            raise PromptError("empty prompt: at least one token id is needed")
        if (end := handle.length + len(ids)) > text.max_position_embeddings:
            raise PromptError(
                f"{end} tokens: the model's context is max_position_embeddings = {text.max_position_embeddings}; "
                "shorten the prompt"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= text.vocab_size:
            raise PromptError(f"token id {low if low < 0 else high}: must be 0..{text.vocab_size - 1}")

    def _forward(self, spans: Sequence[RowSpan], new_ids: Sequence[Sequence[int]], record: Recorder) -> Logits:
        self.pages.grow([(self.sequences[span.sequence].page_table, span.end) for span in spans])
        for span, ids in zip(spans, new_ids, strict=True):
            self.sequences[span.sequence].ids.extend(ids)
        try:
            return self._run(spans, record)
        except BaseException:  # layers have gone different ways: no state of these sequences can be trusted
            for span in spans:
                self.close(self.sequences[span.sequence])
            raise

    def _run(self, spans: Sequence[RowSpan], record: Recorder) -> Logits:
        ids = {number: handle.ids for number, handle in self.sequences.items()}
        text, weights = self.config.text_config, self.placed

        def fetched(layer: int, field: str, value: Tensor) -> None:
            record(layer, field, scratch.fetch(value))

        watched = ignore if record is ignore else fetched
        with torch.inference_mode(), self.at_the_ends():
            rows: Rows = embed_rows(text, weights.embed_bf16, tuple(spans), ids, self.engram_rows(spans, ids))
            try:
                for stage in self.stages:
                    if rows.is_spent:
                        break
                    sent, rows = rows, stage.run(rows, record=watched)
                    sent.release()
                logits = final_logits(text, weights.norm_bf16, weights.head_bf16, rows, watched)
                return replace(
                    logits, logits_f32=scratch.fetch(logits.logits_f32), finite_u8=scratch.fetch(logits.finite_u8)
                )
            finally:
                rows.release()

    @contextmanager
    def at_the_ends(self) -> Iterator[None]:
        """Meanwhile this thread's memory is that of rows which are in no stage."""
        if self._ends is None:
            yield
        else:
            with scratch.use(self._ends), self._ends.scope():
                yield

    def engram_rows(self, spans: Sequence[RowSpan], ids: Mapping[int, Sequence[int]]) -> GatheredLate | None:
        """Table rows for embed_rows of these; None where the layers gather their own."""
        tables = self.weights.engram_tables
        if not (tables and self.home.gathers_on_host):
            return None
        return GatheredLate(tables, lookback_rows(self.config.text_config, spans, ids))
