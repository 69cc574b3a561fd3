"""Captured decode steps: the tables they read, and the bits of steps that are not captured."""

import gc
import weakref
from contextlib import closing

import numpy as np
import pytest
import torch
from hip_cases import OPTIONS, PAGE
from stage_paths import Path, random_path

from rocline.engine import scratch
from rocline.engine.config import ModelConfig
from rocline.engine.engram_ahead import EngramAhead
from rocline.engine.handoff import RowKind, RowSpan, reach_for
from rocline.engine.model import Model
from rocline.engine.rope_rows import RopeTables
from rocline.engine.row_tables import TableMaker
from rocline.engine.sequence import SequenceState
from rocline.engine.step_tables import StepRope, StepSizes, StepTables
from rocline.hip_kernels.kernel import launch_counts

WIDTH = 40  # pages of a table


def step_sizes(config, n_rows):
    return StepSizes(n_rows, WIDTH, config.sliding_window, config.engram_max_ngram_size, config.hc_mult)


def step_spans(config, positions):
    return tuple(
        RowSpan(sequence, at, 1, RowKind.DECODE, reach_for(config, "full", at + 1), at)
        for sequence, at in enumerate(positions)
    )


@pytest.mark.parametrize("n_padded", [0, 1, 3])
def test_tables_are_those_of_any_rows(micro_model, rng, n_padded):
    """Field by field, of rows that close their pairs; positions past 2^24 have no table of their own."""
    config = ModelConfig.load(micro_model).text_config
    positions = [1, 15, 17, *(2 * rng.integers(0, 500_000, 5) + 1).tolist(), 1_048_575]
    states = [
        SequenceState(int(number), {}, {}, rng.integers(0, 99, rng.integers(1, WIDTH)).tolist())
        for number in rng.permutation(len(positions))
    ]
    spans, rope = step_spans(config, positions), RopeTables(config)
    want = TableMaker(rope, config.sliding_window, True, (1, 2)).tables(spans, states)
    n = len(spans)
    tables = StepTables(step_sizes(config, n + n_padded), StepRope(rope))
    for _ in range(2):  # what was there before does not shine through
        tables.fill(spans[::-1], states[::-1])
        tables.fill(spans, states)
    places = tables.on_device(tables.host_u8, spans, 1 << 20)
    got = places.tables
    from_rows = [min(row, n - 1) for row in range(n + n_padded)]
    assert places.from_i64.tolist() == from_rows

    def same(got, want):
        assert got.dtype == want.dtype
        assert torch.equal(got, want[from_rows])

    for name in ("plain", "compressed", "rings"):
        for got_field, want_field in zip(getattr(got, name), getattr(want, name), strict=True):
            same(got_field, want_field)
    same(got.page_tables_i32[:, : want.page_tables_i32.shape[1]], want.page_tables_i32)
    assert not got.page_tables_i32[:, want.page_tables_i32.shape[1] :].any()
    for ratio in (1, 2):
        same(got.visible_i32[ratio], want.visible_i32[ratio])
        assert got.most_visible[ratio] == (1 << 20) // ratio
        for field in ("cos_f32", "sin_f32", "positions_i32"):
            same(getattr(got.groups[ratio], field), getattr(want.groups[ratio], field))
    same(got.groups[2].slot_i32, want.groups[2].slot_i32)
    same(got.groups[2].pair_i32[:, 0], want.groups[2].pair_i32[:, 0])  # held; the second is the row's own
    assert got.groups[2].pair_i32[:, 1].tolist() == list(range(n + n_padded))


def test_a_row_that_closes_no_pair_stores_none(micro_model):
    config = ModelConfig.load(micro_model).text_config
    tables = StepTables(step_sizes(config, 2), StepRope(RopeTables(config)))
    tables.fill(step_spans(config, [8, 9]), [SequenceState(n, {}, {}, [n]) for n in range(2)])
    groups = tables.on_device(tables.host_u8, step_spans(config, [8, 9]), 1 << 20).tables.groups
    assert groups[2].positions_i32.tolist() == [-1, 4]
    assert groups[2].pair_i32[0].tolist() == [0, 0]
    assert groups[1].positions_i32.tolist() == [8, 9]


@pytest.fixture(scope="module")
def model(fitting_folder):
    return Model.load(fitting_folder, device="hip", **OPTIONS)


@pytest.fixture(scope="module")
def captured(model):
    captured = Model(model.config, model.weights, home=model.home, **OPTIONS)
    captured.capture_steps(most_rows=4)
    return captured


def prompt(rng, n):
    return rng.integers(9, 500, n).tolist()


def decoded(model, prompts, n_steps):
    """Logits of steps of all sequences together."""
    handles = [model.open() for _ in prompts]
    for handle, ids in zip(handles, prompts, strict=True):
        model.prefill(handle, ids)
    out = [
        model.decode([(handle, 20 + step + at) for at, handle in enumerate(handles)]).logits_f32.clone()
        for step in range(n_steps)
    ]
    for handle in handles:
        model.close(handle)
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [(1,), (126, 33), (6, 15, 31)], ids=str)
def test_same_bits(model, captured, launched, rng, lengths):
    """One row and several, of padded steps too; over the ends of pages, of windows and of lists."""
    prompts = [prompt(rng, n) for n in lengths]
    want = decoded(model, prompts, n_steps=3)
    assert not launched
    assert torch.equal(decoded(captured, prompts, n_steps=3), want)
    assert launched["graphs"] == 3


def test_captured_once_for_any_length(model, captured, hip_device, launched, rng):
    """Captured where a sequence has two rows; blocks of rows on either side of what lists and candidates hold."""
    lengths = [70] if hip_device == "cpu" else [509, 1_022, 16_382, 20_000]
    context = model.pages.n_pages * PAGE
    for n in lengths:
        if n + 4 > context:
            pytest.skip(f"pages for {context} rows")
        ids = prompt(rng, n)
        assert torch.equal(decoded(captured, [ids], n_steps=4), decoded(model, [ids], n_steps=4))
    assert launched["graphs"] == 4 * len(lengths)


def test_prefill_and_larger_steps_go_on_uncaptured(model, captured, launched, rng):
    prompts = [prompt(rng, n) for n in (1, 2, 3, 4, 5)]
    assert torch.equal(decoded(captured, prompts, n_steps=1), decoded(model, prompts, n_steps=1))
    assert not launched


def test_replays_count_as_what_they_launch(model, captured, rng):
    def launches(model):
        handle = model.open()
        model.prefill(handle, ids)
        before = launch_counts()
        model.decode([(handle, 11)])
        model.close(handle)
        return launch_counts() - before

    ids = prompt(rng, 9)  # the step closes a pair
    want, got = launches(model), launches(captured)
    copies = ("", "take_rows"), ("", "copy_rows")
    assert {key: n for key, n in got.items() if key not in copies} == {
        key: n for key, n in want.items() if key not in copies
    }


def test_nothing_is_allocated_by_steps(captured, rng):
    device = captured.home.place.device
    decoded(captured, [prompt(rng, 9)], n_steps=1)
    before = device.memory()
    decoded(captured, [prompt(rng, 3), prompt(rng, 4)], n_steps=1)
    after = device.memory()
    assert (after.n_slabs_ever, after.slab_bytes) == (before.n_slabs_ever, before.slab_bytes)


def test_truncated_and_restored_sequences_go_on(model, captured, rng):
    ids = prompt(rng, 12)
    got = []
    for each in (model, captured):
        handle = each.open()
        each.prefill(handle, ids)
        for token in (20, 21, 22):
            each.decode([(handle, token)])
        each.truncate(handle, 13)
        got.append(each.decode([(handle, 23)]).logits_f32.clone())
        snapshot = each.snapshot(handle)
        each.decode([(handle, 24)])
        each.restore(handle, snapshot)
        got.append(each.decode([(handle, 25)]).logits_f32.clone())
        each.close(handle)
    assert torch.equal(got[0], got[2])
    assert torch.equal(got[1], got[3])


def test_rows_of_sources_reach_every_device(model, launched, rng):
    """Steps of two sequences, one of which closes a pair, over devices that mirror each other's rows."""
    prompts = [prompt(rng, n) for n in (17, 20)]
    want = decoded(model, prompts, n_steps=2)
    tables = {layer: w.engram.table for layer, w in model.weights.layers.items() if w.engram}
    with torch.inference_mode(), model.at_the_ends(), closing(EngramAhead(tables)) as ahead:
        path = Path(model, random_path(rng, model.config, 3, n_visits=5))
        path.ahead = ahead
        for stage in path.stages.values():
            stage.capture_steps(model.home.step_memory(), 2, 2048)
        for sequence, ids in enumerate(prompts):
            path.open(sequence)
            path.run(path.begin(sequence, ids, end=len(ids))).release()
        for step in range(2):
            rows = path.embed(*(path.add(sequence, [20 + step + sequence]) for sequence in range(2)))
            logits = np.frombuffer(path.logits(path.run(rows)), dtype=np.float32)
            assert torch.equal(torch.from_numpy(logits.copy()).view(want[step].shape), want[step])
    assert launched["graphs"] == 2 * 5


def test_a_stage_with_other_rings_fills_its_own_tables(model, launched, rng):
    """And what is of the rows themselves goes on."""
    prompts = [prompt(rng, n) for n in (17, 20)]
    want = decoded(model, prompts, n_steps=1)[0]
    tables = {layer: w.engram.table for layer, w in model.weights.layers.items() if w.engram}
    with torch.inference_mode(), model.at_the_ends(), closing(EngramAhead(tables)) as ahead:
        path = Path(model, random_path(rng, model.config, 3, n_visits=4))
        path.ahead = ahead
        for number, stage in enumerate(path.stages.values()):
            stage.capture_steps(model.home.step_memory(), 4, 2048)
            for other in range(number):
                stage.open(-10 - other, [])  # sequences to come get other rings here
        for sequence, ids in enumerate(prompts):
            path.open(sequence)
            path.run(path.begin(sequence, ids, end=len(ids))).release()
        rows = path.run(path.embed(*(path.add(sequence, [20 + sequence]) for sequence in range(2))))
        lookback_i32 = scratch.fetch(rows.unpacked().lookback_i32)
        logits = np.frombuffer(path.logits(rows), dtype=np.float32)
    assert torch.equal(torch.from_numpy(logits.copy()).view(want.shape), want)
    assert lookback_i32[:, :2].tolist() == [[20, prompts[0][-1]], [21, prompts[1][-1]]]
    assert launched["graphs"] == 4


def test_references_are_not_captured(micro_model, launched, rng):
    """Torch's operators would not run again on the double, and wait for the host elsewhere."""
    micro = Model.load(micro_model, device="hip", **OPTIONS)
    micro.capture_steps(4)
    decoded(micro, [prompt(rng, 9)], n_steps=1)
    assert not launched


def test_a_stage_goes_without_the_collector(model):
    """And its slabs with it: what captured its steps refers to nothing that refers to it."""
    captured = Model(model.config, model.weights, home=model.home, **OPTIONS)
    captured.capture_steps(most_rows=1)
    stages = [weakref.ref(stage) for stage in captured.stages]
    gc.disable()
    try:
        del captured
        assert not any(stage() for stage in stages)
    finally:
        gc.enable()
