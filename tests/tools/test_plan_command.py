"""`rocline plan`: what it says of loading is what the engine reads, and pictures show the JSON's figures."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
from rocline.engine.home import PaperHome, Part
from rocline.engine.release import release_config
from rocline.engine.weights import NOT_LOADED, StoredWeights
from rocline.hip_kernels.binding import shapes_only
from rocline.pipeline.costs import CostModel
from rocline.pipeline.placement import PlacementError, equal_cut, host_placement
from rocline.pipeline.plan import GIB, HEADROOM_FLOOR_BYTES
from rocline.tools import cli, doctor_disk, plan_load
from rocline.tools.doctor_host import SPARE_BYTES
from rocline.tools.plan_load import card_loads
from rocline.tools.plan_picture import PARTS, draw

SVG = "{http://www.w3.org/2000/svg}"
MICRO_FOLDER = Path(__file__).parents[1] / "data" / "golden" / "micro" / "model"
MICRO = ModelConfig.load(MICRO_FOLDER)
SMALL = ("--kv-tokens", "65536", "--chunk-rows", "64", "--context", "2048")


@pytest.fixture(scope="module", autouse=True)
def no_forecast():
    """Its simulations are tests/pipeline/test_plan.py's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rocline.tools.plan.reproduces_published", lambda: False)
        yield


def run_plan(capsys, *words):
    code = cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def micro_plan(capsys, *words):
    code, out, err = run_plan(capsys, "--model", str(MICRO_FOLDER), *SMALL, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# Loading


def placements():
    for kind in ("folded", "contiguous"):
        for stage_devices in ([0], [0, 1, 2], [0, 0, 1]):
            yield pytest.param(kind, stage_devices, id=f"{kind}-{len(stage_devices)}-on-{stage_devices[-1] + 1}")


@pytest.mark.parametrize(("kind", "stage_devices"), list(placements()))
@pytest.mark.parametrize("engram", ["ram", "mmap"])
def test_a_card_is_read_what_the_plan_says(kind, stage_devices, engram):
    """By the engine's own loading of each card's part, for kernels on paper."""
    placement = host_placement(CostModel(MICRO), kind, stage_devices, 4096, 64)
    text, taken = MICRO.text_config, []
    with Checkpoint.open(MICRO_FOLDER, MICRO) as checkpoint:
        id_map = np.zeros(text.vocab_size, dtype=np.int32)
        source = StoredWeights(checkpoint, text, id_map, engram, taken.append)
        (first, _), (last, _) = placement.path[0], placement.path[-1]
        for device, load in enumerate(card_loads(MICRO, placement)):
            visits = [visit for stage in placement.stages if stage.device == device for visit in stage.visits]
            layers = {layer for visit in visits for layer in visit.layers}
            sides = {side for visit in visits for side in visit.kv_sides} - layers
            begins, ends = (placement.stages[stage].device == device for stage in (first, last))
            taken.clear()
            with shapes_only():
                PaperHome(text).weights(text, source, Part(sorted(layers), sorted(sides), begins, ends))
            assert sum(taken) == load.card_bytes + (load.engram_bytes if engram == "ram" else 0)
        assert checkpoint.unread() == [n for n, s in checkpoint.tensors.items() if s.spec.component in NOT_LOADED]


def test_the_release_is_read_once_but_for_the_last_norm():
    config = release_config()
    loads = card_loads(config, equal_cut(config, 8))
    tables = sum(load.engram_bytes for load in loads)
    assert tables == sum(rows * (256 + 8) for rows in config.text_config.engram_num_embeddings)
    model = CostModel(config)
    weights = sum(cost.weight_bytes for cost in (*model.layers, *model.sides.values(), model.head)) + model.embed_bytes
    sides = config.text_config.kv_source_layer_ids  # one of them is read on two cards
    twice = sum(load.card_bytes for load in loads) - weights - 7 * 2 * config.text_config.hidden_size
    assert 0 < twice < sum(model.sides[side].weight_bytes for side in sides)


@pytest.mark.parametrize("rate_gib_s", [0.25, 100])
def test_time_is_that_of_the_slower_of_reading_and_copying(capsys, rate_gib_s):
    load = micro_plan(capsys, "--devices", "2x4GiB", "--disk-gib-s", str(rate_gib_s))["load"]
    rate = rate_gib_s * GIB
    assert load["disk"] == {"bytes_per_s": rate, "source": "given", "found": None}
    for device in load["devices"]:
        moved_s = device["card_bytes"] / min(rate, load["copy_bytes_per_s"])
        assert device["seconds"] == pytest.approx(moved_s + device["engram_bytes"] / rate)
    ram, mmap = load["engram"]["ram"], load["engram"]["mmap"]
    assert ram["seconds"] == pytest.approx(sum(device["seconds"] for device in load["devices"]))
    assert ram["seconds"] - mmap["seconds"] == pytest.approx(load["engram_bytes"] / rate)
    assert ram["read_bytes"] - mmap["read_bytes"] == ram["host_bytes"] - mmap["host_bytes"] == load["engram_bytes"] > 0
    assert mmap["host_bytes"] == SPARE_BYTES
    assert mmap["read_bytes"] == sum(device["card_bytes"] for device in load["devices"])


def test_the_disk_is_measured_as_the_doctor_does(capsys, tmp_path, monkeypatch):
    shutil.copy(MICRO_FOLDER / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    told = []
    monkeypatch.setattr(plan_load, "disk", lambda folder: told.append(doctor_disk.disk(folder)) or told[-1])
    monkeypatch.setattr(plan_load, "LEAST_BYTES", 2 << 20)
    words = ("--model", str(tmp_path), *SMALL, "--devices", "2x4GiB", "--measure-disk", "--json")
    disk = json.loads(run_plan(capsys, *words)[1])["load"]["disk"]
    (check,) = told
    assert disk == {
        "bytes_per_s": check.values["bytes_per_s"],
        "source": "measured",
        "found": check.entries[0].found,
    }
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 << 20)  # all hole: no disk is read
    load = json.loads(run_plan(capsys, *words)[1])["load"]
    assert load["disk"]["bytes_per_s"] is None
    assert "holes" in load["disk"]["found"]
    assert load["engram"]["ram"]["seconds"] is None


def test_without_a_rate_there_are_no_seconds(capsys):
    code, out, _ = run_plan(capsys, "--model", str(MICRO_FOLDER), *SMALL, "--devices", "2x4GiB")
    assert code == 0
    assert "No seconds without the disk's rate: give --disk-gib-s" in out
    code, out, _ = run_plan(capsys, "--model", str(MICRO_FOLDER), *SMALL, "--devices", "2x4GiB", "--measure-disk")
    assert code == 0
    assert re.search(r"No seconds: .*too little to time\. Give --disk-gib-s X\.\n", out)  # two files of a few MB


# Verdicts


def test_what_fits_is_said_with_the_least_headroom(capsys):
    words = ("--model", str(MICRO_FOLDER), *SMALL, "--devices", "3x4GiB")
    report = micro_plan(capsys, "--devices", "3x4GiB")
    headrooms = [device["headroom_bytes"] for device in report["devices"]]
    assert report["fits"] is True
    assert headrooms[report["least_headroom_device"]] == min(headrooms) >= report["headroom_floor_bytes"]
    assert report["headroom_floor_bytes"] == HEADROOM_FLOOR_BYTES
    (verdict,) = [line for line in run_plan(capsys, *words)[1].splitlines() if line.startswith("Fits")]
    assert f"device {report['least_headroom_device']} has the least headroom, {min(headrooms) / GIB:.2f} GiB" in verdict


def test_what_does_not_fit_is_said_with_the_flag_that_helps(capsys, tmp_path):
    words = ["--model", str(MICRO_FOLDER), *SMALL, "--devices", "2x2GiB", "--kv-tokens", "8388608"]
    code, out, err = run_plan(capsys, *words, "--json", "--svg", str(tmp_path / "plan.svg"))
    assert code == 1
    report = json.loads(out)
    assert report["fits"] is False
    assert err == f"plan: {report['why']}; {report['advice']}\n"
    flag, value = re.fullmatch(r"(--[a-z-]+) (\S+) fits", report["advice"]).groups()
    assert not (tmp_path / "plan.svg").exists()
    assert run_plan(capsys, *words, flag, value)[0] == 0


def test_a_refusal_without_advice_is_all_reason(capsys, monkeypatch):
    def refuse(config, request):
        raise PlacementError("no cut")

    monkeypatch.setattr("rocline.tools.plan.make_plan", refuse)
    code, out, _ = run_plan(capsys, "--model", str(MICRO_FOLDER), "--json")
    assert (code, json.loads(out)) == (1, {"fits": False, "why": "no cut", "advice": None})


def test_cards_may_be_listed_if_they_are_alike(capsys):
    report = micro_plan(capsys, "--devices", "1x44.7GiB,2x44.7GiB")
    assert [device["capacity_bytes"] for device in report["devices"]] == [round(44.7 * GIB)] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--release", "--devices", "4x48GiB,4x24GiB"], "cards of different sizes; .* 8x24GiB"),
        (["--release", "--devices", "4x48GiB,"], "write it as 8x48GiB"),
        (["--release", "--disk-gib-s", "0"], "0: must be a number above 0"),
        (["--release", "--disk-gib-s", "inf"], "inf: must be a number above 0"),
        (["--release", "--disk-gib-s", "fast"], "fast: must be a number above 0"),
        (["--model", "x", "--disk-gib-s", "3", "--measure-disk"], "not allowed with"),
    ],
)
def test_wrong_flags(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", *flags])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_wrong_input(capsys, tmp_path):
    assert run_plan(capsys, "--release", "--measure-disk")[::2] == (
        2,
        "plan: --measure-disk reads a checkpoint: name its folder with --model\n",
    )
    for words, told in (
        (("--devices", "9x48GiB"), "--devices: 9 cards; must be 1 to 8, as every card has a stage"),
        (("--stages", "50"), "--stages 50: must be 8 to 8, one a card at least"),
        (("--devices", "3x48GiB", "--stages", "2"), "--stages 2: must be 3 to 8, one a card at least"),
        (("--context", "1048577"), "--context 1048577: must be 1 to 1048576, the model's limit"),
    ):
        assert run_plan(capsys, "--release", "--json", *words) == (2, "", f"plan: {told}\n")
    missing = tmp_path / "no" / "plan.svg"
    words = ("--model", str(MICRO_FOLDER), *SMALL, "--devices", "1x4GiB", "--svg", str(missing))
    assert run_plan(capsys, *words) == (2, "", f"plan: {missing}: No such file or directory\n")


# Pictures


def figures_in(root):
    """By part, of each bar: (bytes in its tip, left end, width)."""
    bars = {}
    for part in PARTS:
        for rect in root.iter(f"{SVG}rect"):
            if rect.get("class") == part:
                n_bytes = int(re.search(r"([\d,]+) bytes", rect.find(f"{SVG}title").text)[1].replace(",", ""))
                bars.setdefault(part, []).append((n_bytes, float(rect.get("x")), float(rect.get("width"))))
    return bars


def test_the_picture_has_the_figures_of_the_json(capsys, tmp_path):
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    report = micro_plan(capsys, "--devices", "3x4GiB", "--svg", str(svg), "--html", str(html))
    root = ET.parse(svg).getroot()
    bars, devices = figures_in(root), report["devices"]
    for part, pieces in bars.items():
        assert [n_bytes for n_bytes, _, _ in pieces] == [device[f"{part}_bytes"] for device in devices]
    ends = [x + width for _, x, width in bars["headroom"]]
    (left,) = {x for _, x, _ in bars["weights"]}
    floors = [float(path.get("d")[1:].split()[0]) for path in root.iter(f"{SVG}path") if path.get("class") == "floor"]
    for number, device in enumerate(devices):
        px = (ends[number] - left) / device["capacity_bytes"]
        x = left
        for part in PARTS:
            _, begins, width = bars[part][number]
            assert (begins, width) == pytest.approx((x, device[f"{part}_bytes"] * px), abs=0.05)
            x += width
        assert floors[number + 1] == pytest.approx(ends[number] - HEADROOM_FLOOR_BYTES * px, abs=0.05)  # 0: the legend
    shown = sorted(tip.text for tip in root.iter(f"{SVG}title") if "layer" in tip.text)
    runs = [(stage["stage"], visit) for stage in report["stages"] for visit in stage["visits"]]
    layers = [f"stage {stage}, layer {layer}" for stage, visit in runs for layer in visit["layers"]]
    sides = [(stage, side) for stage, visit in runs for side in visit["kv_sides"] if side not in visit["layers"]]
    assert shown == sorted(layers + [f"stage {stage}, key/value side of layer {side}" for stage, side in sides])
    page = html.read_text()
    assert draw(report) in page
    assert "src=" not in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")  # nothing is loaded
    assert "Fits: device" in page


@pytest.mark.parametrize("n_stages", [1, 8])
def test_a_full_card_of_many_stages_is_drawn_whole(capsys, n_stages):
    """The release's forty layers on one card, as cells in one line within the picture."""
    report = micro_plan(capsys, "--devices", "1x4GiB")
    (stage,) = report["stages"]
    layers = list(range(40))
    cut = [layers[40 * n // n_stages : 40 * (n + 1) // n_stages] for n in range(n_stages)]
    halves = [(run[: len(run) // 2], run[len(run) // 2 :]) for run in cut]
    report["stages"] = [
        {**stage, "stage": n, "visits": [{"layers": half, "kv_sides": []} for half in both]}
        for n, both in enumerate(halves)
    ]
    root = ET.fromstring(draw(report))
    cells = [rect for rect in root.iter(f"{SVG}rect") if "layer" in rect.findtext(f"{SVG}title", "")]
    assert len(cells) == 40
    ends = [float(cell.get("x")) + float(cell.get("width")) for cell in cells]
    assert ends == sorted(ends)
    assert ends[-1] < float(root.get("width"))
