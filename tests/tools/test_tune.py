"""`rocline tune`: the grid over made-up cells, and once over real servers of the small checkpoint."""

import csv
import fcntl
import io
import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from tune_fakes import CELLS, OTHER_SHA256, SHA256, FakeRunner, done, failed

from rocline.tools import cli, tune
from rocline.tools.demo_checkpoint import demo_config, write_demo_checkpoint
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.tune_cells import GIB
from rocline.tools.tune_results import Results

RESULTS = "rocline-tune.jsonl"
GRID = ("--chunk-rows", "64,128", "--arena-gib", "1,2")


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
def runner(monkeypatch):
    fake = FakeRunner()

    def make(*how):
        fake.made_with = how
        return fake

    monkeypatch.setattr(tune, "CellRunner", make)
    return fake


@pytest.fixture
def run(folder, capsys):
    """run(words...): (exit status, rows of CSV or the JSON object, stderr)."""

    def main(*words, grid=GRID, prompt_tokens="8"):
        status = cli.main(["tune", "--model", str(folder), "--prompt-tokens", prompt_tokens, *grid, *words])
        captured = capsys.readouterr()
        if not captured.out:
            return status, None, captured.err
        is_json = captured.out.startswith("{")
        return (
            status,
            json.loads(captured.out) if is_json else list(csv.DictReader(io.StringIO(captured.out))),
            captured.err,
        )

    return main


def written():
    """Outcomes of the results file, and its first line."""
    first, *lines = Path(RESULTS).read_text().splitlines()
    return json.loads(first), [json.loads(line) for line in lines]


# The grid


def test_the_table_and_the_recommendation(run, runner):
    runner.outcomes = {CELLS[2]: done(CELLS[2], 200, 1.6), CELLS[3]: done(CELLS[3], 300, 1.4)}
    status, rows, err = run()
    assert status == 0
    assert runner.cells == [CELLS[0], CELLS[2], CELLS[1], CELLS[3]]  # no plan on the CPU: small arenas first
    assert [(row["chunk_rows"], row["arena_gib"]) for row in rows] == [
        ("64", "1.0"),
        ("64", "2.0"),
        ("128", "1.0"),
        ("128", "2.0"),
    ]
    assert [row["note"] for row in rows] == ["", "", "recommended", "below the floor"]
    assert rows[2]["prefill_tokens_per_s"] == "200"
    assert (rows[2]["min_headroom_bytes"], rows[2]["min_headroom_card"]) == (str(int(1.6 * GIB)), "0 0000:03:00.0")
    assert "Recommended: chunk 128, arena 1 GiB: TTFT 5.00 s, 200.00 token/s, at least 1.60 GiB free" in err
    assert "put chunk_rows = 128, arena_gib = 1 into rocline.toml; --write does that" in err
    assert not Path("rocline.toml").exists()


def test_json_says_what_is_needed_to_repeat_it(run, runner, folder):
    status, report, _ = run("--json", "--set", "context=4096", "--stages", "2")
    assert status == 0
    assert report["recommended"] in [cell._asdict() for cell in CELLS]
    assert (report["output_sha256"], report["error"]) == (SHA256, None)
    assert report["work"]["settings"] == {"context": 4096, "stages": 2}
    assert report["work"]["model"] == str(folder.resolve())
    assert report["environment"]["rocline"]
    assert report["cells"][0]["min_headroom_bytes_by_card"]["1"] == 9 * GIB
    assert runner.made_with[:2] == (str(folder), ("stages=2", "context=4096"))


def test_a_result_is_in_the_file_before_the_next_cell_starts(run, runner):
    seen = []
    runner.on_call = lambda: seen.append(len(written()[1]))
    run()
    assert seen == [0, 1, 2, 3]


def test_failing_cells_do_not_stop_the_sweep(run, runner):
    runner.outcomes = {
        CELLS[0]: failed(CELLS[0], note="the server did not start: out of memory"),
        CELLS[1]: failed(CELLS[1], "ended early", "3 of 8 rows after 9 s"),
    }
    status, rows, err = run()
    assert status == 0
    assert [row["status"] for row in rows] == ["failed", "ended early", "done", "done"]
    assert rows[0]["note"] == "failed: the server did not start: out of memory"
    assert "  ended early: 3 of 8 rows after 9 s" in err


def test_the_limit_is_a_multiple_of_the_best_ttft_so_far(run, runner):
    runner.outcomes = {CELLS[0]: done(CELLS[0], 100), CELLS[2]: done(CELLS[2], 500), CELLS[1]: done(CELLS[1], 50)}
    run()
    assert [limit for _, limit in runner.called] == [None, 30, 6, 6]  # seconds: 1,000 / rate, three times
    Path(RESULTS).unlink()
    runner.called.clear()
    run("--hopeless-factor", "0")
    assert [limit for _, limit in runner.called] == [None] * 4


# Going on


def test_a_second_run_does_what_is_left(run, runner):
    runner.outcomes = {CELLS[2]: failed(CELLS[2])}
    first = run(grid=("--chunk-rows", "64,128", "--arena-gib", "1"))
    runner.called.clear()
    status, rows, err = run()
    assert runner.cells == [CELLS[1], CELLS[3]]
    assert "2 of 4 cells are in rocline-tune.jsonl" in err
    assert [row["status"] for row in rows] == ["done", "done", "failed", "done"]
    assert rows[0] | {"note": ""} == first[1][0] | {"note": ""}
    runner.called.clear()
    assert run()[:2] == (status, rows)
    assert runner.cells == []


def test_failed_cells_are_run_again_when_asked(run, runner):
    runner.outcomes = {CELLS[2]: failed(CELLS[2])}
    run()
    runner.called.clear()
    runner.outcomes = {CELLS[2]: done(CELLS[2], 300)}
    status, rows, _ = run("--retry-failed")
    assert runner.cells == [CELLS[2]]
    assert (status, rows[2]["note"]) == (0, "recommended")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--output-tokens", "3"), "output_tokens is 16 there and 3 here"),
        (("--seed", "3"), "seed is 42 there and 3 here"),
        (("--stages", "2"), "settings is {} there and {'stages': 2} here"),
    ],
)
def test_results_of_other_work_are_refused(run, runner, words, told):
    run()
    before = Path(RESULTS).read_bytes()
    runner.called.clear()
    status, rows, err = run(*words)
    assert (status, rows, runner.cells) == (tune.EXIT_WRONG_INPUT, None, [])
    assert told in err
    assert "name another file with --results, or delete this one" in err
    assert Path(RESULTS).read_bytes() == before


def test_results_of_another_commit_or_environment_are_refused(run, runner, monkeypatch):
    run()
    monkeypatch.setenv("ROCLINE_RUNNING", "3")
    assert "settings is {} there and {'running': 3} here" in run()[2]
    monkeypatch.delenv("ROCLINE_RUNNING")
    monkeypatch.setattr(tune, "environment", lambda: {"rocline": "9", "commit": "c0ffee"})
    status, _, err = run()
    assert status == tune.EXIT_WRONG_INPUT
    assert f"rocline is {version('rocline')} there and 9 here; commit is " in err


def test_what_is_tuned_may_stand_in_the_settings_already(run, runner):
    run("--write")
    assert Path("rocline.toml").exists()
    runner.called.clear()
    assert run()[0] == 0
    assert runner.cells == []


def test_a_line_that_was_not_written_to_its_end(run, runner):
    run()
    whole = Path(RESULTS).read_bytes()
    Path(RESULTS).write_bytes(whole[:-20])
    runner.called.clear()
    status, _, err = run()
    assert (status, runner.cells) == (0, [CELLS[3]])
    assert "of a line that was not written to its end" in err
    assert Path(RESULTS).read_bytes() == whole


@pytest.mark.parametrize(
    "text", ["notes of mine", "notes of mine\n", "[1]\n", '{"rocline_tune": 1}\n', '{"rocline_tune": 0, "work": {}}\n']
)
def test_a_file_of_something_else_is_left_alone(run, runner, text):
    Path(RESULTS).write_text(text)
    status, _, err = run()
    assert (status, runner.cells) == (tune.EXIT_WRONG_INPUT, [])
    assert "no results of rocline tune" in err
    assert Path(RESULTS).read_text() == text


def test_a_broken_line_in_the_middle(run, runner):
    run()
    lines = Path(RESULTS).read_text().splitlines(keepends=True)
    Path(RESULTS).write_text("".join([lines[0], '{"chunk_rows": "x"}\n', *lines[1:]]))
    assert run()[0] == tune.EXIT_WRONG_INPUT


def test_two_sweeps_do_not_share_a_file(run, runner):
    run()
    with open(RESULTS) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, _, err = run()
    assert status == tune.EXIT_WRONG_INPUT
    assert "another sweep writes to it" in err


def test_an_interrupt_keeps_what_is_there(run, runner):
    runner.outcomes = {CELLS[1]: KeyboardInterrupt()}
    status, rows, err = run("--html", "page.html", "--write")
    assert status == tune.EXIT_INTERRUPTED
    assert [row["chunk_rows"] for row in rows] == ["64", "128"]
    assert [(line["chunk_rows"], line["arena_gib"]) for line in written()[1]] == [(64, 1.0), (128, 1.0)]
    assert "interrupted; the same command goes on from here" in err
    assert "Recommended" not in err + Path("page.html").read_text()
    assert not Path("rocline.toml").exists()
    runner.called.clear()
    runner.outcomes = {}
    assert run()[0] == 0
    assert runner.cells == [CELLS[1], CELLS[3]]


def test_an_interrupt_before_the_first_result(run, runner):
    runner.outcomes = {CELLS[0]: KeyboardInterrupt()}
    assert run("--html", "page.html")[:2] == (tune.EXIT_INTERRUPTED, None)
    assert written()[1] == []


def test_a_full_disk_keeps_the_table(run, runner, monkeypatch):
    write = Results._write

    def full(self, line):
        if line.get("arena_gib") == 2.0:
            raise OSError(28, "No space left on device")
        write(self, line)

    monkeypatch.setattr(Results, "_write", full)
    status, rows, err = run()
    assert (status, len(rows)) == (tune.EXIT_NONE, 3)
    assert "rocline-tune.jsonl: No space left on device" in err


# The answer before the speed


def test_other_hashes_are_a_loud_failure(run, runner):
    runner.outcomes = {CELLS[3]: done(CELLS[3], 777.25, sha256=OTHER_SHA256)}
    Path("rocline.toml").write_text("port = 1\n")
    status, report, err = run("--json", "--write", "--html", "page.html")
    assert status == tune.EXIT_ANOTHER_HASH
    page = Path("page.html").read_text()
    for text in (report["error"], err, page):
        assert f"{SHA256} of chunk 64, arena 1 GiB and chunk 128, arena 1 GiB and chunk 64, arena 2 GiB" in text
        assert f"{OTHER_SHA256} of chunk 128, arena 2 GiB" in text
    assert f"ANOTHER OUTPUT than before: {OTHER_SHA256}" in err
    assert (report["recommended"], report["output_sha256"]) == (None, None)
    assert {cell["ttft_s"] for cell in report["cells"]} == {cell["prefill_tokens_per_s"] for cell in report["cells"]}
    assert "777.25" not in err + page
    assert "svg" not in page.partition("</style>")[2]
    assert Path("rocline.toml").read_text() == "port = 1\n"
    status, _, err = run()  # from the file
    assert status == tune.EXIT_ANOTHER_HASH


def test_nothing_above_the_floor(run, runner):
    status, rows, err = run("--min-headroom-gib", "2.5", "--write")
    assert status == tune.EXIT_NONE
    assert {row["note"] for row in rows} == {"below the floor"}
    assert "no cell leaves 2.50 GiB free (most 2.00); add a smaller --chunk-rows or --arena-gib" in err
    assert not Path("rocline.toml").exists()


def test_nothing_done(run, runner):
    runner.outcomes = {cell: failed(cell) for cell in CELLS}
    status, rows, err = run("--html", "page.html")
    assert (status, len(rows)) == (tune.EXIT_NONE, 4)
    assert "no cell is done, the notes say why" in err
    assert "no cell is done" in Path("page.html").read_text()


def test_only_edges_are_left(run, runner):
    runner.outcomes = {cell: done(cell, share=0.97) for cell in CELLS}
    status, _, err = run(grid=("--chunk-rows", "64", "--arena-gib", "1"))
    assert status == tune.EXIT_NONE
    assert "its arena was 97% full, and no smaller one worked); add a larger --arena-gib" in err


# rocline.toml


def test_write_leaves_the_rest_of_the_file(run, runner):
    Path("rocline.toml").write_text("# mine\nport = 8001\nchunk_rows = 4096 # too much\n")
    runner.outcomes = {CELLS[2]: done(CELLS[2], 500)}
    status, _, err = run("--write")
    assert status == 0
    assert Path("rocline.toml").read_text() == "# mine\nport = 8001\nchunk_rows = 128 # too much\narena_gib = 1\n"
    assert "Written to rocline.toml: chunk_rows = 128, arena_gib = 1" in err


def test_write_goes_where_the_server_reads(run, runner, monkeypatch):
    Path("box.toml").write_text("running = 4\n")
    assert run("--write", "--config", "box.toml")[0] == 0
    assert "chunk_rows" in Path("box.toml").read_text()
    assert "config=box.toml" in runner.made_with[1]
    Path("env.toml").write_text("running = 4\n")
    monkeypatch.setenv("ROCLINE_CONFIG", "env.toml")
    monkeypatch.setenv("ROCLINE_CHUNK_ROWS", "7")
    _, _, err = run("--write")
    assert "chunk_rows" in Path("env.toml").read_text()
    assert "ROCLINE_CHUNK_ROWS is set in the environment, and counts before the file" in err
    assert not Path("rocline.toml").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--html", "missing/page.html"), "missing/page.html: No such file or directory"),
        (("--html", "."), "Is a directory"),
        (("--results", "missing/r"), "missing/r: No such file or directory"),
        (("--results", "."), "Is a directory"),
        (("--write",), "cannot be put there safely; write `chunk_rows = 64` and `arena_gib = 1` yourself"),
        (("--config", "missing.toml"), "missing.toml: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_first_cell(run, runner, words, told):
    Path("rocline.toml").write_text('aliases = ["""\nchunk_rows = 7\n"""]\nchunk_rows = 9\n')
    status, rows, err = run(*words)
    assert (status, rows, runner.cells) == (tune.EXIT_WRONG_INPUT, None, [])
    assert told in err
    assert not Path("page.html").exists()


# Wrong words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--chunk-rows", "64,many"), "--chunk-rows: 64,many: must be whole numbers with commas between"),
        (("--chunk-rows", "64.5"), "must be whole numbers"),
        (("--chunk-rows", ","), "--chunk-rows: is empty; name one size at least"),
        (("--arena-gib", ""), "--arena-gib: is empty"),
        (("--arena-gib", "2,x"), "must be numbers with commas between"),
        (("--arena-gib", "2,2.0"), "2 is there twice"),
        (("--min-headroom-gib", "-1"), "--min-headroom-gib: -1: must be 0 or more"),
        (("--min-headroom-gib", "nan"), "must be 0 or more"),
        (("--hopeless-factor", "x"), "x: must be a number"),
        (("--hopeless-factor", "0.5"), "0.5: must be 1 or more, or 0 for none"),
        (("--cell-timeout-s", "0"), "0: must be more than 0"),
        (("--set", "contxt=1"), "no setting contxt"),
        (("--set", "context"), "write NAME=VALUE"),
        (("--set", "chunk_rows=7"), "rocline tune sets chunk_rows itself"),
        (("--release",), "not allowed with argument --model"),
    ],
)
def test_wrong_flags(run, runner, capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--chunk-rows", "0,64"), "chunk 0, arena 1 GiB: chunk_rows = 0: must be 1 to 65536"),
        (("--arena-gib", "100"), "arena_gib = 100.0: must be 0.001 to 64"),
        (("--set", "context=20"), "--prompt-tokens 8 and --output-tokens 16 are 24 tokens; the context holds 20"),
        (("--set", "context=65537"), "--set context=65537: must be 1 to 65536, the model's limit"),
        (("--set", "context=many"), "--set context=many: must be a whole number"),
        (("--stages", "99"), "--stages 99: must be 1 to"),
    ],
)
def test_wrong_values(run, runner, words, told):
    status, rows, err = run(*words)
    assert (status, rows, runner.cells) == (tune.EXIT_WRONG_INPUT, None, [])
    assert told in err
    assert not Path(RESULTS).exists()


def test_a_prompt_longer_than_the_models_context(run, runner):
    status, _, err = run(prompt_tokens="65530")
    assert status == tune.EXIT_WRONG_INPUT
    assert "the context holds 65536" in err


def test_the_release_has_no_weights(capsys):
    assert cli.main(["tune", "--release", "--prompt-tokens", "8"]) == tune.EXIT_WRONG_INPUT
    assert "say --dry-run" in capsys.readouterr().err


# Servers of their own


def test_a_small_grid_over_real_servers(tmp_path, capsys):
    write_demo_checkpoint(tmp_path / "demo", seed=0)
    words = ["--prompt-tokens", "48", "--output-tokens", "2", "--chunk-rows", "16,48", "--arena-gib", "0.25"]
    settings = ["--stages", "1", "--set", "context=2048", "--set", "workers=1", "--min-headroom-gib", "0"]
    status = cli.main(["tune", "--model", "demo", *words, *settings, "--json", "--write", "--html", "page.html"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    report = json.loads(captured.out)
    assert [cell["chunk_rows"] for cell in report["cells"]] == [16, 48]
    for cell in report["cells"]:
        assert (cell["status"], cell["device_allocs"]) == ("done", 0)
        assert cell["ttft_s"] > 0
        assert set(cell["min_headroom_bytes_by_card"]) == {"host"}
        assert cell["arena_share"] == pytest.approx(cell["arena_high_water_bytes"] / (GIB / 4))  # the cell's own
    assert len({cell["output_sha256"] for cell in report["cells"]}) == 1
    assert report["cells"][0]["arena_high_water_bytes"] < report["cells"][1]["arena_high_water_bytes"]
    chunk_rows = report["recommended"]["chunk_rows"]
    assert re.fullmatch(rf"chunk_rows = {chunk_rows}\narena_gib = 0\.25\n", Path("rocline.toml").read_text())
    assert f"Recommended: chunk {chunk_rows}, arena 0.25 GiB" in Path("page.html").read_text()
