"""Verified rows as captured steps: the bits of tokens decoded one by one, in logits and in what a sequence keeps."""

import json
import shutil
from array import array
from collections import defaultdict
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hip_cases import OPTIONS
from stage_paths import Path, random_path

from rocline.engine import scratch
from rocline.engine.config import ModelConfig
from rocline.engine.engram_ahead import EngramAhead
from rocline.engine.handoff import FirstStep, RowKind, RowSpan, reach_for
from rocline.engine.layers.head import embed_rows, lookback_rows
from rocline.engine.model import Model
from rocline.engine.rope_rows import RopeTables
from rocline.engine.row_tables import TableMaker
from rocline.engine.sequence import REWIND_ROWS, SequenceState
from rocline.engine.step_tables import StepRope, StepSizes, StepTables
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import from_tiles

WIDTH = 40  # pages of a table
MOST_ROWS = 8
NEXT = 11  # the token that goes on after some of the rows were taken


def random_spans(rng, config, n_spans, most_rows=REWIND_ROWS):
    """Of sequences 0, 1 ..., each somewhere else in its own."""
    spans = []
    for sequence in range(n_spans):
        start, n_rows = int(rng.integers(0, 2_000)), int(rng.integers(1, most_rows + 1))
        reach = reach_for(config, "full", start + n_rows)
        kind = RowKind.DECODE if n_rows == 1 else RowKind.VERIFY
        spans.append(RowSpan(sequence, start, n_rows, kind, reach, start))
    return tuple(spans)


def random_states(rng, n_sequences):
    numbers = rng.permutation(n_sequences).tolist()
    return [SequenceState(number, {}, {}, rng.integers(0, 99, rng.integers(1, WIDTH)).tolist()) for number in numbers]


@pytest.mark.parametrize("n_spans", [1, 2, 5])
@pytest.mark.parametrize("n_padded", [0, 1, 3])
def test_tables_are_those_of_uncaptured_rows(micro_model, rng, n_spans, n_padded):
    """Field by field; a pair's tokens are read from the step where the step has both."""
    config = ModelConfig.load(micro_model).text_config
    spans, states, rope = random_spans(rng, config, n_spans), random_states(rng, n_spans), RopeTables(config)
    want = TableMaker(rope, config.sliding_window, True, (1, 2)).tables(spans, states)
    n = sum(span.n_rows for span in spans)
    sizes = StepSizes(n + n_padded, WIDTH, config.sliding_window, config.engram_max_ngram_size, config.hc_mult)
    tables = StepTables(sizes, StepRope(rope))
    for _ in range(2):  # what was there before does not shine through
        tables.fill(spans[::-1], states[::-1])
        tables.fill(spans, states)
    places = tables.on_device(tables.host_u8, spans, 1 << 20)
    got, from_rows = places.tables, [min(row, n - 1) for row in range(n + n_padded)]
    assert places.from_i64.tolist() == from_rows
    for name in ("plain", "compressed", "rings"):
        for got_field, want_field in zip(getattr(got, name), getattr(want, name), strict=True):
            assert torch.equal(got_field, want_field[from_rows])
    own_tables = want.page_tables_i32[want.sequence_i32.long()][from_rows]
    assert torch.equal(got.page_tables_i32[:, : own_tables.shape[1]], own_tables)
    assert not got.page_tables_i32[:, own_tables.shape[1] :].any()
    for ratio in (1, 2):
        assert torch.equal(got.visible_i32[ratio], want.visible_i32[ratio][from_rows])
    assert torch.equal(got.groups[1].positions_i32, want.groups[1].positions_i32[from_rows])
    pairs, want_pairs = got.groups[2], want.groups[2]
    assert torch.equal(pairs.slot_i32, want_pairs.slot_i32[from_rows])
    closing = (pairs.positions_i32[:n] >= 0).nonzero()[:, 0]
    assert torch.equal(pairs.positions_i32[closing], want_pairs.positions_i32)
    assert torch.equal(pairs.cos_f32[closing], want_pairs.cos_f32)
    assert torch.equal(pairs.positions_i32, pairs.positions_i32[from_rows])
    want_tokens = torch.stack(2 * [torch.arange(n, dtype=torch.int32)], 1)  # twice the row that closes nothing
    want_tokens[closing] = want_pairs.pair_i32
    assert torch.equal(pairs.pair_i32.clamp_max(n - 1), want_tokens[from_rows])  # a copy is as good as the last row


def test_no_row_reads_what_another_one_writes(micro_model, rng):
    """Of the rings, while a step runs: neither open pairs nor, of rows that are not its own, window rows."""
    config = ModelConfig.load(micro_model).text_config
    rope = StepRope(RopeTables(config))
    for _ in range(50):
        n_spans = int(rng.integers(1, 8))
        spans, states = random_spans(rng, config, n_spans), random_states(rng, n_spans)
        n = sum(span.n_rows for span in spans)
        sizes = StepSizes(n + 2, WIDTH, config.sliding_window, config.engram_max_ngram_size, config.hc_mult)
        tables = StepTables(sizes, rope)
        tables.fill(spans, states)
        got = tables.on_device(tables.host_u8, spans, 1 << 20).tables
        read = {-1 - token for token in got.groups[2].pair_i32.flatten().tolist() if token < 0}
        assert not read & set(got.groups[2].slot_i32.tolist())
        slots = config.sliding_window + REWIND_ROWS
        row = 0
        for span in spans:
            written = got.rings.slots_i32[row : row + span.n_rows].tolist()
            first, ring = int(got.rings.first_i32[row]), int(got.rings.ring_i32[row])
            n_before = int(got.rings.count_i32[row]) - 1  # the rows that its first one sees before itself
            assert not {ring * slots + (first + i) % slots for i in range(n_before)} & set(written)
            row += span.n_rows


@pytest.fixture(scope="module")
def model(fitting_folder):
    return Model.load(fitting_folder, device="hip", **OPTIONS)


@pytest.fixture(scope="module")
def captured(model):
    captured = Model(model.config, model.weights, home=model.home, **OPTIONS)
    captured.capture_steps(most_rows=MOST_ROWS)
    return captured


def prompt(rng, n):
    return rng.integers(9, 500, n).tolist()


def opened(model, ids):
    handle = model.open()
    model.prefill(handle, ids)
    return handle


def on_host(tensor):
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def kept(model, handle):
    """By name, all that later rows of a sequence may read: rows in rings, compressed rows, keys in both forms."""
    found, n, window = {}, handle.length, model.config.text_config.sliding_window
    for at, stage in enumerate(model.stages):
        windows, pairs = stage.snapshot(handle.number)
        for kind, rings, start in (("window", windows, max(0, n - window + 1)), ("pair", pairs, n - n % 2)):
            for layer, ring in rings.items():
                ring.check(start, n)
                found[at, kind, layer] = ring.data[torch.arange(start, n) % len(ring.data)]
        table = torch.tensor(handle.page_table)
        for source, rows_u8 in stage.planes.rows_u8.items():
            n_rows = n // model.config.text_config.compress_ratios[source]
            for kind, plane_u8 in (("row", rows_u8), ("key", stage.planes.keys_u8[source])):
                found[at, kind, source] = on_host(plane_u8)[table].flatten(0, 1)[:n_rows]
            if (tiles_u8 := stage.planes.prepared_u8.get(source)) is not None:
                codes, scales = from_tiles(on_host(tiles_u8)[table].flatten(0, 1)[:, None])
                found[at, "code", source], found[at, "scale", source] = codes[:n_rows], scales[:n_rows]
    return found


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name


def test_what_is_kept_would_show_a_difference(model, rng):
    """Of two sequences whose last ids differ."""
    ids = prompt(rng, 40)
    handles = [opened(model, [*ids, last]) for last in (9, 10)]
    one, other = (kept(model, handle) for handle in handles)
    differ = {name[1] for name, tensor in one.items() if not torch.equal(tensor, other[name])}
    assert {"window", "pair", "row", "key", "code"} <= differ
    for handle in handles:
        model.close(handle)


@pytest.mark.parametrize("n_before", [37, 38], ids=["odd", "even"])
def test_the_bits_of_tokens_one_by_one(model, captured, launched, rng, n_before):
    """Every number of rows; the sequence is taken back after each, so rows that were rejected leave no trace."""
    ids, tokens = prompt(rng, n_before), prompt(rng, REWIND_ROWS)
    alone, logits, states = opened(model, ids), [], []
    for token in tokens:
        logits.append(model.decode([(alone, token)]).logits_f32[0])
        states.append(kept(model, alone))
    model.close(alone)
    assert not launched
    handle = opened(captured, ids)
    counts = [1, 2, 3, 4, 5, 6, 8]
    for n_rows in rng.permutation(counts).tolist():
        got = captured.verify(handle, tokens[:n_rows])
        assert [position for _, position in got.rows] == list(range(n_before, n_before + n_rows))
        assert torch.equal(got.logits_f32, torch.stack(logits[:n_rows]))
        assert_same(kept(captured, handle), states[n_rows - 1])
        captured.truncate(handle, n_before)
    captured.close(handle)
    assert launched["graphs"] == len(counts)
    uncaptured = opened(model, ids)
    assert torch.equal(model.verify(uncaptured, tokens).logits_f32, torch.stack(logits))
    model.close(uncaptured)


@pytest.mark.parametrize("n_before", [44, 45], ids=["even", "odd"])
def test_after_any_number_of_accepted_rows(model, captured, launched, rng, n_before):
    ids, tokens = prompt(rng, n_before), prompt(rng, 6)
    alone, wanted = opened(model, ids), []
    for n_accepted in range(len(tokens) + 1):
        wanted.append(model.decode([(alone, NEXT)]).logits_f32)
        model.truncate(alone, n_before + n_accepted)
        if n_accepted < len(tokens):
            model.decode([(alone, tokens[n_accepted])])
    model.close(alone)
    handle = opened(captured, ids)
    for n_accepted, want in enumerate(wanted):
        captured.verify(handle, tokens)
        captured.truncate(handle, n_before + n_accepted)
        assert torch.equal(captured.decode([(handle, NEXT)]).logits_f32, want)
        captured.truncate(handle, n_before)
    captured.close(handle)
    assert launched["graphs"] == 2 * len(wanted)


def test_a_rejected_draft_leaves_no_trace(model, captured, launched, rng):
    """Beside a sequence that has never verified anything."""
    ids, tokens, more = prompt(rng, 30), prompt(rng, 6), prompt(rng, 4)
    alone = opened(model, ids)
    want = [model.decode([(alone, token)]).logits_f32 for token in (*tokens[:2], *more)]
    handle = opened(captured, ids)
    got = [captured.verify(handle, tokens).logits_f32[:2]]
    captured.truncate(handle, len(ids) + 2)
    got.append(captured.verify(handle, [*more[:3], 9, 9]).logits_f32[:3])
    captured.truncate(handle, len(ids) + 5)
    got.append(captured.decode([(handle, more[3])]).logits_f32)
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert_same(kept(captured, handle), kept(model, alone))
    assert launched["graphs"] == 3
    model.close(alone)
    captured.close(handle)


class Sequences:
    """The same sequences in both models: one of them steps several rows at once, the other one row after the other."""

    def __init__(self, model, captured, prompts):
        self.model, self.captured = model, captured
        self.alone = [opened(model, ids) for ids in prompts]
        self.handles = [opened(captured, ids) for ids in prompts]

    def step(self, rows):
        """Verify rows {sequence: ids} in one step, and compare."""
        want = defaultdict(list)
        for at in range(max(map(len, rows.values()))):
            of_row = [(sequence, ids[at]) for sequence, ids in rows.items() if at < len(ids)]
            logits = self.model.decode([(self.alone[sequence], token) for sequence, token in of_row]).logits_f32
            for (sequence, _), row_f32 in zip(of_row, logits, strict=True):
                want[sequence].append(row_f32.clone())
        given = [(self.handles[sequence], ids) for sequence, ids in rows.items()]
        got = self.captured.extend(given, RowKind.VERIFY)
        assert torch.equal(got.logits_f32, torch.stack([row for sequence in rows for row in want[sequence]]))

    def drop(self, sequence, n_rows):
        for model, handles in ((self.model, self.alone), (self.captured, self.handles)):
            model.truncate(handles[sequence], handles[sequence].length - n_rows)

    def close(self):
        for handle, alone in zip(self.handles, self.alone, strict=True):
            assert_same(kept(self.captured, handle), kept(self.model, alone))
            self.captured.close(handle)
            self.model.close(alone)


def test_sequences_of_different_numbers_of_rows(model, captured, launched, rng):
    """6 rows in a step of 8, whose copies are of a row that closes a pair with the one before it, of one that closes
    none, and of one that closes it with a held one; over the end of a page."""
    pair = Sequences(model, captured, [prompt(rng, n) for n in (126, 17, 20)])
    for n_rows in ({0: 3, 1: 1, 2: 2}, {2: 3, 0: 2, 1: 1}, {2: 2, 0: 3, 1: 1}):
        pair.step({sequence: prompt(rng, n) for sequence, n in n_rows.items()})
    pair.close()
    assert launched["graphs"] == 3


def test_random_steps(model, captured, launched, rng):
    lengths = rng.integers(1, 60, 3).tolist()
    pair = Sequences(model, captured, [prompt(rng, n) for n in lengths])
    for _ in range(4):
        rows, left = {}, MOST_ROWS
        for sequence in rng.permutation(3)[: rng.integers(1, 4)].tolist():
            if left:
                rows[sequence] = prompt(rng, int(rng.integers(1, min(6, left) + 1)))
                left -= len(rows[sequence])
        pair.step(rows)
        for sequence, ids in rows.items():
            pair.drop(sequence, int(rng.integers(0, len(ids))))
    pair.close()
    assert launched["graphs"] == 4


def test_more_rows_than_are_captured_go_on_uncaptured(model, captured, launched, rng):
    pair = Sequences(model, captured, [prompt(rng, n) for n in (5, 6)])
    pair.step({0: prompt(rng, 6), 1: prompt(rng, 3)})
    pair.close()
    assert not launched


def test_which_rows_are_steps(captured):
    config, steps = captured.config.text_config, captured.stages[0].steps

    def span(n_rows, sequence=0, kind=RowKind.VERIFY, **more):
        return RowSpan(sequence, 10, n_rows, kind, reach_for(config, "full", 10 + n_rows), 10, **more)

    assert steps.has([span(REWIND_ROWS)])
    assert steps.has([span(5), span(3, 1)])
    assert steps.has([span(1, 2, RowKind.DECODE), span(6, 1)])
    assert not steps.has([span(REWIND_ROWS + 1)])
    assert not steps.has([span(5), span(4, 1)])
    assert not steps.has([span(3), span(3)])  # the second would read what the first one writes
    assert not steps.has([span(3, kind=RowKind.PREFILL)])
    assert not steps.has([span(3, keeps_rows=False)])
    assert not steps.has([span(0)])
    assert not steps.has([])


@pytest.mark.parametrize(("length", "kind"), [(40, "windows"), (41, "windows"), (41, "pairs")])
def test_a_ring_that_lacks_what_rows_read_is_refused(captured, launched, rng, length, kind):
    """Before anything is launched, and written."""
    handle, other = opened(captured, prompt(rng, length)), opened(captured, prompt(rng, 9))
    stage = captured.stages[0]
    rings = getattr(stage.sequences[handle.number], kind)
    ring = rings[min(rings)]
    ring.first = ring.end - (10 if kind == "windows" else 0)
    before = on_host(ring.data)
    with pytest.raises(RuntimeError, match=rf"ring holds positions {ring.first}\.\.{length}, asked for"):
        captured.extend([(other, prompt(rng, 2)), (handle, prompt(rng, 4))], RowKind.VERIFY)
    assert not launched
    assert torch.equal(on_host(ring.data), before)
    captured.close(other)
    captured.close(handle)


def test_rows_past_their_pages_are_refused(captured, launched, rng):
    """Before anything is launched: a table's end is zeros, and page 0 is somebody's."""
    n_positions = captured.pages.page_positions
    handle = opened(captured, prompt(rng, n_positions - 3))
    stage = captured.stages[0]
    with torch.inference_mode(), captured.at_the_ends():
        reach = reach_for(captured.config.text_config, "full", n_positions + 1)
        span = RowSpan(handle.number, n_positions - 3, 4, RowKind.VERIFY, reach, n_positions - 3)
        ids = {handle.number: [*handle.ids, *prompt(rng, 4)]}
        rows = embed_rows(captured.config.text_config, captured.placed.embed_bf16, (span,), ids)
        with pytest.raises(RuntimeError, match=rf"in pages of {n_positions} positions; grow its page table"):
            stage.run(rows)
    assert not launched
    planes, rows_u8 = stage.planes, torch.zeros((2, 1), dtype=torch.uint8)
    source, table_i32 = min(planes.rows_u8), torch.tensor(handle.page_table, dtype=torch.int32)
    n_slots = planes.rows_u8[source].shape[1]
    with pytest.raises(ValueError, match=rf"rows {n_slots - 1} to {n_slots + 1} of source {source} in 1 pages"):
        planes.write(source, table_i32, n_slots - 1, rows_u8, rows_u8)
    captured.close(handle)


def test_a_first_row_that_closes_nothing_reads_no_pair(model, captured, launched, rng):
    """The ring of open pairs may be empty; what closes later in the step is the step's own."""
    ids, tokens = prompt(rng, 40), prompt(rng, 5)
    alone, handle = opened(model, ids), opened(captured, ids)
    for ring in captured.stages[0].sequences[handle.number].pairs.values():
        ring.first = ring.end
        ring.data.fill_(float("nan"))
    want = [model.decode([(alone, token)]).logits_f32[0] for token in tokens]
    assert torch.equal(captured.verify(handle, tokens).logits_f32, torch.stack(want))
    assert launched["graphs"] == 1
    model.close(alone)
    captured.close(handle)


def run_from_first_step(path, spans):
    """As a pipeline's engine begins."""
    lookback_i32 = lookback_rows(path.config, spans, path.ids)
    first = FirstStep(tuple(spans), lookback_i32, path.weights.embed_bf16, path.ahead.start(lookback_i32))
    rows = None
    for device, visit in path.order:
        sent, rows = rows, path.stages[device].run(rows or (lambda: first), visit)
        if sent:
            sent.release()
    return rows


def test_rows_of_sources_reach_every_device(model, launched, rng):
    """Decoded and verified rows of several sequences, over devices that mirror each other's rows, two steps."""
    prompts = [prompt(rng, n) for n in (17, 20, 31)]
    steps = [[prompt(rng, n) for n in n_rows] for n_rows in ((3, 1, 2), (1, 4, 3))]
    alone, want = [opened(model, ids) for ids in prompts], []
    for tokens in steps:
        for handle, ids in zip(alone, tokens, strict=True):
            want += [model.decode([(handle, token)]).logits_f32[0] for token in ids]
    for handle in alone:
        model.close(handle)
    tables = {layer: w.engram.table for layer, w in model.weights.layers.items() if w.engram}
    with torch.inference_mode(), model.at_the_ends(), closing(EngramAhead(tables)) as ahead:
        path = Path(model, random_path(rng, model.config, 3, n_visits=5))
        path.ahead = ahead
        for number, stage in enumerate(path.stages.values()):
            stage.capture_steps(model.home.step_memory(), MOST_ROWS, 2048)
            for other in range(number):
                stage.open(-10 - other, [])  # sequences to come get other rings here
        for sequence, ids in enumerate(prompts):
            path.open(sequence)
            path.run(path.begin(sequence, ids, end=len(ids))).release()
        got = []
        for tokens in steps:
            added = [path.add(sequence, ids) for sequence, ids in enumerate(tokens)]
            spans = [
                replace(span, kind=RowKind.VERIFY, logits_from=span.start) if span.n_rows > 1 else span
                for span in added
            ]
            rows = path.run(path.embed(*spans)) if tokens is steps[0] else run_from_first_step(path, spans)
            assert rows.n_rows == sum(map(len, tokens))
            lookback_i32 = scratch.fetch(rows.unpacked().lookback_i32)
            assert lookback_i32[:, 0].tolist() == [token for ids in tokens for token in ids]
            got.append(np.frombuffer(path.logits(rows), dtype=np.float32).copy())
    assert torch.equal(torch.from_numpy(np.concatenate(got)).view(-1, want[0].shape[0]), torch.stack(want))
    assert launched["graphs"] == 2 * 5


# Of the release: 512 best, of the positions in 2,048 candidate blocks.
FAR = {"max_position_embeddings": 65_536, "index_topk": 512, "candidate_topk_blocks": 2_048}
# Before a step of 6 rows that straddles, of one ratio or the other, 511 and 512 visible rows, 1,023 and 1,024, 16,383
# and 16,384, or none of them.
STARTS = [100, 508, 1_020, 2_045, 16_380, 20_001, 32_765]


@pytest.fixture(scope="module")
def far_models(fitting_folder, tmp_path_factory):
    """The model, not captured and captured, with lists of the release's lengths and room for 33,000 positions."""
    far = tmp_path_factory.mktemp("far") / "model"
    shutil.copytree(fitting_folder, far)
    config = json.loads((far / "config.json").read_text())
    config["text_config"] |= FAR
    (far / "config.json").write_text(json.dumps(config))
    plain = Model.load(far, device="hip", **OPTIONS | {"kv_tokens": 33_024})
    captured = Model(plain.config, plain.weights, home=plain.home, **OPTIONS | {"kv_tokens": 33_024})
    captured.capture_steps(most_rows=MOST_ROWS)
    return plain, captured


def history(rng, text, n_positions):
    """Made up rows and keys of a sequence's positions, by source."""
    found = {}
    for source in text.kv_source_layer_ids:
        n_rows = n_positions // text.compress_ratios[source]
        rows_u8 = rng.integers(0, 256, (n_rows, RowFormat("compressed", text.head_dim).row_bytes), dtype=np.uint8)
        keys_u8 = rng.integers(0, 256, (n_rows, RowFormat("index_key", text.index_head_dim).row_bytes), dtype=np.uint8)
        rows_u8[:, text.head_dim // 2 :] = rng.integers(0x28, 0x40, rows_u8[:, text.head_dim // 2 :].shape)  # E4M3
        keys_u8[:, text.index_head_dim // 2 :] = rng.integers(122, 130, keys_u8[:, text.index_head_dim // 2 :].shape)
        found[source] = torch.from_numpy(rows_u8), torch.from_numpy(keys_u8)
    return found


def far_out(model, ids, rows):
    """A sequence of which the first rows have run, with other rows' bytes in the pages of all positions to come."""
    handle, (stage,) = opened(model, ids[: STARTS[0]]), model.stages
    model.pages.grow([(handle.page_table, len(ids))])
    table_i32 = torch.tensor(handle.page_table, dtype=torch.int32)
    with torch.inference_mode(), scratch.use(stage.memory), stage.memory.scope():
        for source, (rows_u8, keys_u8) in rows.items():
            first = STARTS[0] // model.config.text_config.compress_ratios[source]
            new = scratch.upload(rows_u8[first:]), scratch.upload(keys_u8[first:])
            stage.planes.write(source, table_i32, first, *new)
    return handle


def set_to(model, handle, ids):
    """As if all of ids had run, and had left in the rings what is in them."""
    handle.ids[:] = array("i", ids)
    state = model.stages[0].sequences[handle.number]
    for ring in (*state.windows.values(), *state.pairs.values()):
        ring.first, ring.end = len(ids) - len(ring.data), len(ids)


def test_captured_once_for_any_length(far_models, launched, rng):
    """The same graphs after 100 rows, which have run, and after as many as 32,765, most of which are made up."""
    text = far_models[0].config.text_config
    ids, tokens, rows = prompt(rng, STARTS[-1] + 8), prompt(rng, 6), history(rng, text, STARTS[-1] + 9)
    plain, captured = far_models
    alone, handle = (far_out(model, ids, rows) for model in far_models)
    seen = []
    for start in STARTS:
        for model, of_model in ((plain, alone), (captured, handle)):
            set_to(model, of_model, ids[:start])
        want = [plain.decode([(alone, token)]).logits_f32[0] for token in tokens]
        got = captured.verify(handle, tokens).logits_f32
        assert torch.equal(got, torch.stack(want)), start
        seen.append(got)
        set_to(captured, handle, ids[:start])
        assert torch.equal(captured.decode([(handle, tokens[0])]).logits_f32[0], want[0]), start
    assert launched["graphs"] == 2 * len(STARTS)
    assert len({logits_f32.numpy().tobytes() for logits_f32 in seen}) == len(STARTS)
    plain.close(alone)
    captured.close(handle)
