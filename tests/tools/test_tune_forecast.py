"""What is said of a grid's cells before any server starts: the plan, recorded traces, the cost model."""

import csv
import io
import json
import os
from pathlib import Path

import pytest
from tune_fakes import CELLS, FakeRunner

from rocline.engine.config import ModelConfig
from rocline.pipeline.options import Options
from rocline.pipeline.plan import HEADROOM_FLOOR_BYTES
from rocline.tools import cli, tune
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.tune_cells import GIB, Cell
from rocline.tools.tune_forecast import Forecast, Forecaster, by_promise
from rocline.tools.tune_results import Results
from rocline.tools.tune_sweep import sweep

ON_CARDS = ("--device", "hip", "--stages", "2", "--set", "context=4096")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(demo_config()))
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    return path


@pytest.fixture(autouse=True)
def _empty_folder_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ROCLINE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def dry_run(folder, capsys, monkeypatch):
    """dry_run(chunk sizes, arena sizes, words...): (exit status, rows of CSV, stderr). Nothing may be started."""
    monkeypatch.setattr(tune, "CellRunner", None)

    def main(chunk_rows, arena_gib, *words):
        grid = ("--prompt-tokens", "8", "--chunk-rows", chunk_rows, "--arena-gib", arena_gib)
        status = cli.main(["tune", "--dry-run", "--model", str(folder), *grid, *words])
        captured = capsys.readouterr()
        return status, list(csv.DictReader(io.StringIO(captured.out))), captured.err

    return main


def test_a_dry_run_starts_nothing_and_says_what_would_be(dry_run):
    status, rows, err = dry_run("256", "47,0.001,2,1", *ON_CARDS)
    assert status == 0
    assert os.listdir() == []
    assert [row["arena_gib"] for row in rows] == ["1.0", "2.0", "0.001", "47.0"]  # likely-bad ones last
    assert (rows[2]["is_too_small"], rows[2]["note"]) == ("True", "the plan wants an arena of 0.02 GiB")
    assert "a server wants 1.5; lower the arena" in rows[3]["refused"]
    for row in rows[:2]:
        assert int(row["planned_arena_bytes"]) < GIB
        assert HEADROOM_FLOOR_BYTES < int(row["headroom_bytes"]) < 47 * GIB
        assert float(row["modelled_tokens_per_s"]) > 0
    assert "Nothing here is measured. Planned for cards of 48 GiB; rates are modelled" in err


def test_a_dry_run_of_cards_that_are_too_small(dry_run):
    status, rows, err = dry_run("64", "1", *ON_CARDS, "--card-gib", "2")
    assert status == tune.EXIT_NONE
    assert "more than device" in rows[0]["refused"]
    assert "refused: " in err


def test_a_dry_run_on_the_cpu(dry_run):
    status, rows, err = dry_run("64", "1")
    assert (status, rows[0]["headroom_bytes"], rows[0]["refused"]) == (0, "", "")
    assert "Nothing is planned for the CPU" in err


def test_recorded_traces_speak_against_an_arena(dry_run, folder, capsys):
    words = ["--chunk-rows", "256", "--stages", "2", "--prompt-tokens", "768", "--device", "cpu"]
    assert cli.main(["trace", "record", "--model", str(folder), "--out", "traces", *words]) == 0
    capsys.readouterr()
    status, rows, _ = dry_run("256,128", "0.001,1", "--traces", "traces")
    assert status == 0
    notes = {(row["chunk_rows"], row["arena_gib"]): (row["is_too_small"], row["note"]) for row in rows}
    assert notes["256", "0.001"] == ("True", "recorded traces of stages 0, 1 do not fit the arena")
    assert notes["256", "1.0"] == ("False", "")
    assert notes["128", "1.0"] == ("False", "no trace of chunks of 128 rows in traces")
    Path("traces/cpu-shapes-chunk256-stage0.csv").write_text("x\n")
    assert dry_run("256", "1", "--traces", "traces")[0] == tune.EXIT_WRONG_INPUT
    assert "--traces missing: not a folder" in dry_run("256", "1", "--traces", "missing")[2]


def test_the_headroom_of_a_cell_is_the_plans_with_other_arenas(folder):
    options = Options(device="hip", stages=3, devices=2, context=4096)
    forecaster = Forecaster(ModelConfig.load(folder), options, 256, 48 * GIB)
    small, large = forecaster.of(Cell(64, 1.0)), forecaster.of(Cell(64, 3.0))
    assert small.modelled_tokens_per_s is None  # nobody asked
    assert small.headroom_bytes - large.headroom_bytes in (2 * GIB, 4 * GIB)  # one stage or two on the fullest card
    assert by_promise([Cell(64, 3.0), Cell(64, 1.0)], {Cell(64, 3.0): large, Cell(64, 1.0): small})[0] == Cell(64, 1.0)


def test_likely_bad_cells_come_last_and_refused_ones_are_never_started(tmp_path):
    forecasts = {
        CELLS[0]: Forecast(refused="no room"),
        CELLS[1]: Forecast(headroom_bytes=2 * GIB),
        CELLS[2]: Forecast(headroom_bytes=9 * GIB, is_too_small=True, note="the plan wants more"),
        CELLS[3]: Forecast(headroom_bytes=3 * GIB),
    }
    said, runner = [], FakeRunner()

    class Talk:
        say = staticmethod(said.append)

    with Results(tmp_path / "r", {}) as results:
        sweep(CELLS, results, runner, forecasts.__getitem__, Talk())
        assert runner.cells == [CELLS[3], CELLS[1], CELLS[2]]
        assert list(results.outcomes) == [*runner.cells, CELLS[0]]
        refused = results.outcomes[CELLS[0]]
    assert (refused.status, refused.note) == ("refused", "no room")
    assert "cell 3 of 4: chunk 128, arena 1 GiB (the plan wants more; 9.00 GiB free by the plan)" in said


def test_a_dry_run_as_json(folder, capsys):
    words = ["--prompt-tokens", "8", "--chunk-rows", "64", "--arena-gib", "1", "--json"]
    assert cli.main(["tune", "--dry-run", "--model", str(folder), *words]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert (cell["chunk_rows"], cell["arena_gib"], cell["headroom_bytes"]) == (64, 1.0, None)
