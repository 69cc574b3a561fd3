"""Every device's bytes are accounted for, plans that do not fit say what would, and the command prints both."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rocline.arena.replay import plan as smallest_slab
from rocline.engine.config import ModelConfig
from rocline.engine.home import PaperHome
from rocline.engine.layout import expected_tensors
from rocline.engine.model import Model
from rocline.engine.release import RELEASE_CONFIG, release_config
from rocline.engine.shapes import shape_weights
from rocline.engine.steps import STEP_ROWS
from rocline.hip_kernels.binding import shapes_only
from rocline.pipeline.placement import PlacementError
from rocline.pipeline.plan import (
    GIB,
    GRAPH_BYTES,
    HEADROOM_FLOOR_BYTES,
    MAX_SEQUENCES,
    Request,
    card_traces,
    layer_slabs,
    make_plan,
)
from rocline.tools import cli

RELEASE = release_config()
MICRO_FOLDER = Path(__file__).parents[1] / "data" / "golden" / "micro" / "model"
MICRO = ModelConfig.load(MICRO_FOLDER)
EIGHT = Request(
    n_devices=8,
    device_bytes=48 * GIB,
    n_stages=8,
    kind="folded",
    context=1 << 20,
    kv_tokens=2 << 20,
    chunk_rows=1024,
)
SEVEN = replace(EIGHT, n_devices=7, n_stages=7)


def device_weights(config, component_out=()):
    """Bytes of everything that is read on a card, straight from the tensor list."""
    out = {"vision", "unused", "gate_vl", *component_out}
    tensors = expected_tensors(config).items()
    return sum(spec.n_bytes for name, spec in tensors if spec.component not in out and ".engram.embed." not in name)


@pytest.mark.parametrize("request_", [EIGHT, SEVEN, replace(EIGHT, kind="contiguous")], ids=["8", "7", "contiguous"])
def test_the_release_fits_on_its_cards(request_):
    plan = make_plan(RELEASE, request_)
    assert plan.request.drafts == "on"
    assert sum(memory.weights for memory in plan.memory) == device_weights(RELEASE)
    for memory in plan.memory:
        assert memory.headroom >= HEADROOM_FLOOR_BYTES
        parts = (memory.weights, memory.kv, memory.prepared, memory.graphs, memory.arena, memory.runtime)
        assert sum(parts) + memory.headroom == 48 * GIB
        assert all(part >= 0 for part in parts)
        assert memory.kv_row_bytes <= 890
        assert memory.prepared_row_bytes <= 330
        assert memory.prepared == memory.prepared_row_bytes * (2 << 20)
        rings_bytes = memory.kv - memory.kv_row_bytes * (2 << 20)
        assert 0 < rings_bytes < MAX_SEQUENCES * (2_703_360 * 136 / 128 + 3 * 9 * 4096)
    assert sum(memory.kv_row_bytes for memory in plan.memory) > 890  # mirrored on all devices together


def test_a_device_mirrors_once_however_many_of_its_stages_read():
    for n_stages in (1, 3, 8):
        plan = make_plan(RELEASE, replace(EIGHT, n_devices=1, device_bytes=400 * GIB, n_stages=n_stages))
        (memory,) = plan.memory
        assert (memory.kv_row_bytes, memory.prepared_row_bytes) == (890, 330)
        assert memory.weights == device_weights(RELEASE)
        assert len(plan.placement.stages) == n_stages


def test_stages_share_devices_in_order():
    plan = make_plan(RELEASE, replace(EIGHT, n_devices=2, device_bytes=192 * GIB, n_stages=5))
    assert [stage.device for stage in plan.placement.stages] == [0, 0, 0, 1, 1]
    assert all(memory.headroom >= HEADROOM_FLOOR_BYTES for memory in plan.memory)


def test_drafts_are_left_out_where_they_do_not_fit():
    smaller = replace(EIGHT, device_bytes=40 * GIB)
    plan = make_plan(RELEASE, smaller)
    assert plan.request.drafts == "off"
    assert sum(memory.weights for memory in plan.memory) == device_weights(RELEASE, ["draft"])
    with pytest.raises(PlacementError, match="--drafts off fits"):
        make_plan(RELEASE, replace(smaller, drafts="on"))


def test_a_model_without_draft_stages_has_none():
    request = replace(EIGHT, n_devices=2, n_stages=2, context=4096, kv_tokens=65_536)
    plan = make_plan(MICRO, request)
    assert plan.request.drafts == "off"
    assert sum(memory.weights for memory in plan.memory) == device_weights(MICRO)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"n_devices": 6, "n_stages": 6}, r"--devices (7)x48GiB fits"),
        ({"kv_tokens": 16 << 20, "drafts": "off"}, r"--kv-tokens (\d+) fits"),
        ({"device_bytes": 24 * GIB}, r"--devices 8x(\d+)GiB fits"),
    ],
)
def test_a_refusal_has_the_numbers_and_a_flag_that_helps(changes, flag):
    request = replace(EIGHT, **changes)
    with pytest.raises(PlacementError) as error:
        make_plan(RELEASE, request)
    text = str(error.value)
    more_gib = float(re.search(r"cut needs ([\d.]+) GiB more than device \d has, 1.5 to be left free", text)[1])
    parts = [float(size) for size in re.findall(r"(?:weights|kv|prepared|graphs|arena|runtime) ([\d.]+)", text)]
    assert sum(parts) + 1.5 - request.device_bytes / GIB == pytest.approx(more_gib, abs=0.05)
    advised = int(re.search(flag, text)[1])
    if "n_devices" in changes:
        better = replace(request, n_devices=advised, n_stages=advised)
    elif "kv_tokens" in changes:
        better = replace(request, kv_tokens=advised)
    else:
        better = replace(request, device_bytes=advised * GIB)
    assert make_plan(RELEASE, better).memory


def test_no_more_cards_are_advised_than_there_are_layers():
    few = replace(EIGHT, n_devices=5, n_stages=5, device_bytes=GIB, context=4096, kv_tokens=4096)
    with pytest.raises(PlacementError, match=r"5 layers on 5 devices of 1.0 GiB: .* --devices 5x\d+GiB fits"):
        make_plan(MICRO, few)


def test_captured_steps_take_what_is_planned():
    """All of a card's at once: of 64 rows of as long a context as there is, on paper."""
    plan = make_plan(RELEASE, EIGHT)
    device = max(range(8), key=lambda number: len(plan.placement.stages[number].visits[0].layers))
    visits = [visit for stage in plan.placement.stages if stage.device == device for visit in stage.visits]
    with shapes_only():
        home = PaperHome(RELEASE.text_config)
        cut = [visit for stage in plan.placement.stages for visit in stage.visits]
        cut.sort(key=lambda visit: min(visit.steps))
        weights = shape_weights(RELEASE, "meta")
        model = Model(RELEASE, weights, cut, kv_tokens=EIGHT.context, arena_bytes=1 << 30, home=home)
        memory_of = home.step_memory()
        stages = [stage for stage in model.stages if stage.visits[0] in visits]
        for stage in stages:
            stage.capture_steps(memory_of, STEP_ROWS[-1], EIGHT.context)
    assert len(stages) == 2
    steps_bytes = max(stage.steps.n_bytes for stage in stages)  # both visits of one stage share it
    assert 0 < steps_bytes <= plan.memory[device].graphs - GRAPH_BYTES * len(STEP_ROWS) * len(visits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk_rows": 32_768}, "--chunk-rows 32768 needs an arena of .* lower --chunk-rows"),
        ({"context": (1 << 20) + 1, "kv_tokens": 4 << 20}, "--context 1048577: must be 1 to .* 1048576"),
        ({"kv_tokens": 4096}, "--kv-tokens 4096 holds no request of --context 1048576"),
        ({"n_stages": 9}, "9 stages on 8 devices: .* --stages"),
        ({"n_stages": 7}, "7 stages on 8 devices: .* --stages"),
        ({"n_stages": 1}, "1 stage on 8 devices: .* --stages"),
    ],
)
def test_what_cannot_be_planned_is_said_at_once(changes, words):
    with pytest.raises(PlacementError, match=words):
        make_plan(RELEASE, replace(EIGHT, **changes))


def test_any_budget_is_kept_or_refused(rng):
    for _ in range(3):
        n_devices = int(rng.integers(2, 9))
        request = replace(
            EIGHT,
            n_devices=n_devices,
            n_stages=n_devices,
            device_bytes=int(rng.integers(250, 500) * GIB / n_devices),
            kv_tokens=int(rng.integers(1, 8)) << 20,
            kind=("folded", "contiguous")[int(rng.integers(2))],
        )
        try:
            headroom = min(memory.headroom for memory in make_plan(RELEASE, request).memory)
        except PlacementError as error:
            refusal = str(error)
        else:
            refusal = ""
        assert (headroom >= HEADROOM_FLOOR_BYTES) if not refusal else refusal.endswith(("fits", "devices"))


@pytest.mark.parametrize("kind", ["folded", "contiguous"])
def test_the_arena_serves_whole_visits_wherever_the_halo_begins(rng, kind):
    """It is planned from single layers and one prompt; visits of several layers, at any length, need no more."""
    plan = make_plan(RELEASE, replace(EIGHT, kind=kind))
    prompt_tokens = int(rng.integers(2600, 3600))
    visits = [visit for _, visit in plan.placement.path]
    traces = card_traces(RELEASE, visits, prompt_tokens, EIGHT.chunk_rows, EIGHT.context)
    waiting = EIGHT.chunk_rows * plan.model.hop_row_bytes
    for (stage, _), events in zip(plan.placement.path, traces, strict=True):
        slab_bytes = smallest_slab(events).slab_bytes
        placed = plan.placement.stages[stage]
        arena_bytes = plan.memory[placed.device].arena
        assert slab_bytes + waiting * len(placed.visits) <= arena_bytes


def test_history_grows_the_arena_only_up_to_the_workspace():
    index_layer, other = RELEASE.text_config.kv_source_layer_ids[0], 3
    short, long = (layer_slabs(RELEASE, 64, context) for context in (8192, 1 << 20))
    assert short[index_layer] < long[index_layer] < short[index_layer] + (150 << 20)
    assert short[other] == long[other]


def run_plan(capsys, *words):
    code = cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_what_is_planned_and_labels_what_is_modelled(capsys):
    code, out, err = run_plan(capsys, "--release")
    assert (code, err) == (0, "")
    assert "19 + kv 20" in out
    assert out.count("modelled and not measured") == 2
    forecast = out[out.index("Forecast") :]
    assert all(f" {rate} " in forecast for rate in ("7", "17", "30"))
    assert all(f"G={groups}" in forecast for groups in range(1, 9))
    assert "1,553.9" in out
    assert "732.6" in out


def test_json_holds_the_same_figures(capsys):
    flags = ("--devices", "3x48GiB", "--context", "2048", "--kv-tokens", "65536", "--chunk-rows", "64")
    code, out, err = run_plan(capsys, "--model", str(MICRO_FOLDER), *flags, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    layers = [visit["layers"] for stage in report["stages"] for visit in stage["visits"]]
    assert sorted(layer for run in layers for layer in run) == list(range(MICRO.text_config.num_hidden_layers))
    for device in report["devices"]:
        parts = ("weights", "kv", "prepared", "graphs", "arena", "runtime", "headroom")
        assert sum(device[f"{part}_bytes"] for part in parts) == device["capacity_bytes"] == 48 * GIB
    assert sum(stage["modelled"]["prefill_share"] for stage in report["stages"]) == pytest.approx(1)
    assert [row["requests"] for row in report["modelled"]["decode"]] == [1, 8, 64]
    assert [len(row["tokens_per_s_by_groups"]) for row in report["modelled"]["decode"]] == [1, 8, 8]


def test_no_forecast_from_a_model_that_misses_the_published_run(capsys, monkeypatch):
    monkeypatch.setattr("rocline.tools.plan.reproduces_published", lambda: False)
    flags = ("--devices", "1x4GiB", "--kv-tokens", "65536")
    code, out, _ = run_plan(capsys, "--model", str(MICRO_FOLDER), *flags)
    assert code == 0
    assert "No forecast" in out
    assert "G=1" not in out


def test_wrong_input(capsys, tmp_path):
    code, out, err = run_plan(capsys, "--release", "--devices", "6x48GiB")
    assert (code, out) == (1, "")
    assert err.startswith("plan: 40 layers on 6 devices")
    code, out, err = run_plan(capsys, "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert "config.json" in err
    (tmp_path / "config.json").write_text(json.dumps(RELEASE_CONFIG)[:-1])
    assert run_plan(capsys, "--model", str(tmp_path))[0] == 2
    for words in (
        ["--release", "--devices", "8x48GB"],
        ["--release", "--model", "x"],
        [],
        ["--release", "--stages", "0"],
    ):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["plan", *words])
        assert exit_.value.code == 2
