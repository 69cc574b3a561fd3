"""rocline conform: what it says of golden data, how it ends, and which folders it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocline.tools import cli, conform
from rocline.tools.golden_limits import MODEL_LIMITS
from rocline.tools.golden_ops import CHECKS
from rocline.tools.golden_report import (
    Finding,
    Findings,
    adds_like_the_data,
    bf16_ulps,
    jaccard,
    relative_rms,
    row_errors,
    worst_of,
)

DATA = Path(__file__).resolve().parent.parent / "data" / "golden"
FIELDS = {"folder", "item", "verdict", "measure", "worst", "bound", "limit", "where", "note"}


def json_rows(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def ops_folder(tmp_path):
    """A golden folder of operator tables alone, and the function that writes changed tables into it."""
    tables = load_file(DATA / "ops.safetensors")

    def write(**changed):
        save_file({name: t.contiguous() for name, t in (tables | changed).items()}, tmp_path / "ops.safetensors")
        return tmp_path

    write.tables = tables
    return write


def test_the_committed_data_passes(capsys):
    assert cli.main(["conform", str(DATA), "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json_rows(out)
    assert all(row.keys() == FIELDS for row in rows)
    assert {row["folder"] for row in rows} == {"ops", "micro"}
    assert {row["verdict"] for row in rows} == {"exact", "within", "informative", "not read"}
    assert {row["item"].split()[0] for row in rows if row["folder"] == "ops"} == CHECKS.keys()
    by_item = {row["item"]: row for row in rows}
    for item in ("index_score", "cand_keep", "sel"):
        assert by_item[f"trace operator {item}"]["verdict"] == "exact"
    if adds_like_the_data():
        assert by_item["prefill logits.15"]["note"] == "list layout: T=15 < window=16"
        assert by_item["prefill logits.130"]["note"].startswith("head: 64-row tile")
    assert "0 failed" not in err
    assert "exact" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "parts"),
    [("tiny", {"engram", "trace", "prefill", "decode", "long"}), ("tiny40", {"engram", "prefill", "decode"})],
)
def test_every_text_folder_passes(golden_or_skip, name, parts):
    found = []
    conform.conform(golden_or_skip(name), found.append)
    assert [finding for finding in found if finding.verdict == "failed"] == []
    assert {finding.item.removeprefix("cpu: ").split()[0] for finding in found} == parts


@pytest.mark.parametrize("name", MODEL_LIMITS)
def test_last_rows_may_move_as_far_as_was_measured(golden_or_skip, name):
    """Twice the README's figure up to its 140 tokens, beyond them twice what FP64 sums move."""
    limits, worst = MODEL_LIMITS[name], {"micro": 0.117, "tiny": 0.099, "tiny40": 0.115}[name]
    manifest = json.loads((golden_or_skip(name) / "manifest.json").read_text())
    for length, moved in manifest["fp64_accumulate"]["prefill"].items():
        if length != "all":
            n_rows = int(length)
            assert limits.last(n_rows) == pytest.approx(2 * (worst if n_rows <= 140 else moved["rms_rel"])), length


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_table_fails_and_is_named(ops_folder, capsys, as_json):
    ids = ops_folder.tables["topk_plain.ids"].clone()
    ids[4, 2] += 1
    folder = ops_folder(**{"topk_plain.ids": ids})
    assert cli.main(["conform", str(folder), *(["--json"] if as_json else [])]) == 1
    out, err = capsys.readouterr()
    assert "1 failed" in err
    if as_json:
        (failed,) = [row for row in json_rows(out) if row["verdict"] == "failed"]
        assert (failed["item"], failed["worst"], failed["limit"]) == ("topk_plain ids", 1, 0)
        assert failed["where"] == "first [4, 2]"
    else:
        (failed,) = [line for line in out.splitlines() if " failed " in line]
        assert failed.split()[:4] == ["ops", "failed", "topk_plain", "ids"]
        assert "1 <= 0  elements  first [4, 2]" in failed


def test_nan_fails_and_stays_valid_json(ops_folder, capsys):
    y = ops_folder.tables["rmsnorm.y"].clone()
    y[0, 0] = float("nan")
    assert cli.main(["conform", str(ops_folder(**{"rmsnorm.y": y})), "--json"]) == 1
    (failed,) = [row for row in json_rows(capsys.readouterr().out) if row["verdict"] == "failed"]
    assert (failed["item"], failed["worst"]) == ("rmsnorm y", None)


def test_tables_that_are_foreign_or_missing_fail(ops_folder, capsys):
    folder = ops_folder(**{"novel.x": torch.zeros(2)})
    tables = {name: t.contiguous() for name, t in load_file(folder / "ops.safetensors").items()}
    save_file({name: t for name, t in tables.items() if not name.startswith("swiglu.")}, folder / "ops.safetensors")
    assert cli.main(["conform", str(folder), "--json"]) == 1
    failed = {row["item"]: row["note"] for row in json_rows(capsys.readouterr().out) if row["verdict"] == "failed"}
    assert failed == {
        "novel": "no operator of this build means this table",
        "swiglu": "missing from ops.safetensors",
    }


def test_drafts_and_images_are_named_as_not_read(ops_folder, capsys):
    folder = ops_folder()
    for name, file in (("dspark", "rounds.safetensors"), ("vision", "tower.safetensors")):
        (folder / name / "model").mkdir(parents=True)
        (folder / name / file).touch()
    assert cli.main(["conform", str(folder), "--json"]) == 0
    rows = [row for row in json_rows(capsys.readouterr().out) if row["verdict"] == "not read"]
    assert {row["folder"]: row["note"] for row in rows} == {
        "dspark": "this build has no draft head",
        "vision": "this build has no vision tower",
    }
    assert cli.main(["conform", str(folder / "dspark")]) == 2
    assert capsys.readouterr().err == f"conform: {folder / 'dspark'}: not read, this build has no draft head\n"


@pytest.fixture
def micro(tmp_path):
    """A copy of the micro folder to damage."""
    return shutil.copytree(DATA / "micro", tmp_path / "micro")


def without_trace(micro):
    (micro / "trace.safetensors").unlink()


def without_manifest(micro):
    (micro / "manifest.json").write_text("[]")


def of_another_configuration(micro):
    manifest = json.loads((micro / "manifest.json").read_text())
    (micro / "manifest.json").write_text(json.dumps(manifest | {"config": "huge"}))


def without_weights(micro):
    (micro / "model" / "model.safetensors").unlink()


def with_a_cut_trace(micro):
    data = (micro / "trace.safetensors").read_bytes()
    (micro / "trace.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_trace, "lists files that are missing: trace.safetensors"),
        (without_manifest, "not a manifest of golden data"),
        (of_another_configuration, "no limits are known for configuration 'huge', only for micro, tiny, tiny40"),
        (without_weights, "model.safetensors"),
        (with_a_cut_trace, "trace.safetensors: Error while deserializing: incomplete metadata"),
    ],
)
def test_a_damaged_folder_is_refused(micro, capsys, damage, message):
    damage(micro)
    assert cli.main(["conform", str(micro)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [("absent", "no such folder"), (".", "no golden data")])
def test_a_folder_of_something_else_is_refused(tmp_path, capsys, name, message):
    assert cli.main(["conform", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def with_few_decode_rows(micro, n_rows=14):
    """The recorded decode runs from 5 and 33 tokens, cut short: steps are what takes long on the double."""
    cut = {}
    for name, tensor in load_file(micro / "decode.safetensors").items():
        if ".64" not in name:
            whole = name.startswith("prompt.")
            cut[name] = tensor if whole else tensor[: n_rows - name.startswith("sel.")].contiguous()
    save_file(cut, micro / "decode.safetensors")


def test_micro_passes_by_kernels(hip_device, micro, capsys):
    if hip_device == "cpu":
        with_few_decode_rows(micro)
    assert cli.main(["conform", str(micro), "--device", "hip", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = {row["item"]: row for row in json_rows(out)}
    assert {item.split()[0] for item in rows if not item.startswith("cpu:")} == {"engram", *conform.PARTS}
    # A card agrees with the host within roundings, with itself to the bit.
    for item in ("prefill 130, halo in chunks of 37", *(f"decode {n} against our own prefill" for n in (5, 33))):
        assert rows[item]["verdict"] == "exact"
    for item in ("index_score", "cand_keep", "sel"):
        assert rows[f"trace operator {item}"]["verdict"] == "exact"
    assert "operators by kernels" in err
    assert "torch reference of index_select: its kernel wants 128 index channels" in err


def test_tables_are_of_the_references_and_no_device_runs_them(hip_device, ops_folder, capsys):
    assert cli.main(["conform", str(ops_folder()), "--device", "hip", "--json"]) == 0
    (row,) = json_rows(capsys.readouterr().out)
    assert (row["item"], row["verdict"]) == ("all", "not read")


def test_wrong_devices_and_operators_are_refused(hip_device, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["conform", str(DATA), "--device", "cuda"])
    assert stop.value.code == 2
    assert "invalid choice: 'cuda'" in capsys.readouterr().err
    assert cli.main(["conform", str(DATA / "micro"), "--device", "hip", "--reference-op", "rope,ruter"]) == 2
    assert "conform: reference operator 'ruter'; did you mean router?" in capsys.readouterr().err
    assert cli.main(["conform", str(DATA / "micro"), "--reference-op", "rope"]) == 2
    assert "conform: --reference-op is for --device hip: on the host every operator is its reference" in (
        capsys.readouterr().err
    )


def verdicts(call):
    found = []
    call(Findings("x", found.append))
    return [finding.verdict for finding in found]


def test_verdicts():
    nan = float("nan")
    assert verdicts(lambda find: find.at_most("i", "m", 0.5, 0.5, False)) == ["within"]
    assert verdicts(lambda find: find.at_most("i", "m", 0.6, 0.5, False)) == ["failed"]
    assert verdicts(lambda find: find.at_most("i", "m", nan, 0.5, False)) == ["failed"]
    assert verdicts(lambda find: find.at_most("i", "m", 0.0, 0.5, True)) == ["exact"]
    assert verdicts(lambda find: find.at_least("i", "m", 0.5, 0.6)) == ["failed"]
    assert verdicts(lambda find: find.at_least("i", "m", nan, 0.6)) == ["failed"]
    assert verdicts(lambda find: find.at_least("i", "m", 1.0, 0.6)) == ["exact"]
    assert verdicts(lambda find: find.same("i", torch.zeros(2), torch.tensor([0.0, -0.0]))) == ["failed"]
    assert verdicts(lambda find: find.same("i", torch.zeros(2), torch.zeros(3))) == ["failed"]


def test_a_cpu_that_adds_otherwise_is_not_judged_by_the_sharp_limits(monkeypatch):
    for capability, verdict in (("AVX512", "failed"), ("AVX2", "informative")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert verdicts(lambda find: find.on_cpu("i", "m", 0.6, 0.5)) == [verdict]


def test_measures():
    inf, nan = float("inf"), float("nan")
    assert worst_of(torch.tensor([[1.0, nan], [7.0, 2.0]])) == (inf, [0, 1])
    one = torch.tensor([1.0, -0.0, nan, 1.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0078125, 0.0, nan, nan], dtype=torch.bfloat16)
    assert bf16_ulps(one, other).tolist() == [1, 0, 0, inf]
    want = torch.tensor([3.0, 4.0, -inf])
    assert relative_rms(torch.tensor([3.0, 4.5, -inf]), want) == pytest.approx(0.1)
    assert relative_rms(torch.tensor([3.0, -inf, -inf]), want) == inf
    assert relative_rms(torch.tensor([3.0, nan, -inf]), want) == inf
    assert row_errors(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]])).tolist() == [pytest.approx(0.1)]
    lists = torch.tensor([[1, 2, -1], [-1, -1, -1]]), torch.tensor([[2, 3, 4], [-1, -1, -1]])
    assert jaccard(*lists).tolist() == [0.25, 1.0]


def test_a_finding_as_a_row():
    assert Finding("ops", "x", "failed", worst=float("inf")).row()["worst"] is None
    assert Finding("ops", "x", "within", worst=0.5).row()["worst"] == 0.5
