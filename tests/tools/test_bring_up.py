"""rocline bring-up as a climb: where it stops, what it passes over, and what its report keeps. Rungs are fakes."""

import json
import shutil
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.release import release_config
from rocline.tools import bring_up, cli
from rocline.tools.bring_up_report import ReportError, code_sha256, model_sha256, old_place, open_report
from rocline.tools.bring_up_site import Expected, Lengths, Rung
from rocline.tools.doctor_checks import Check

IDENTITY = {"build": "b", "model": "m", "device": "d"}
MICRO = Path(__file__).resolve().parent.parent / "data" / "golden" / "micro" / "model"


class Fakes:
    """Rungs a, b, c, d, of which `bad` fail; made: those that were made, in order."""

    def __init__(self, bad=(), raising=None):
        self.bad, self.raising, self.made = bad, raising or {}, []
        self.rungs = [Rung(name, f"it is {name}", lambda: Expected(90, "assumed"), self.maker(name)) for name in "abcd"]

    def maker(self, name):
        def make():
            self.made.append(name)
            if name in self.raising:
                raise self.raising[name]
            check = Check(f"the check of {name}", values={"of": name})
            if name in self.bad:
                check.problem(f"{name} is 3, want 4", f"look at {name}")
            elif name == "b":
                check.not_applicable("no b here")
            else:
                check.warning("slow", "wait") if name == "c" else check.ok("fine")
            return check

        return make


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bring-up.json"


def climb(path, fakes, start=None, **other):
    report, is_other = open_report(path, IDENTITY | other, {"folder": "f"})
    report.begin(bool(is_other))
    return bring_up.climb(fakes.rungs, report, start)


def states(path):
    return {rung["name"]: rung["state"] for rung in json.loads(path.read_text())["rungs"]}


def test_to_the_top(path, capsys):
    fakes = Fakes()
    assert climb(path, fakes) == 0
    assert fakes.made == list("abcd")
    assert states(path) == {"a": "passed", "b": "not applicable", "c": "passed", "d": "passed"}
    err = capsys.readouterr().err
    assert "rung 1 of 4, a: it is a (about 1 min 30 s, assumed)" in err
    assert "-> wait" in err
    assert "at the top: a passed, b not applicable, c passed, d passed" in err


def test_it_stops_at_the_first_that_fails_and_goes_on_there(path, capsys):
    fakes = Fakes(bad="c")
    assert climb(path, fakes) == 1
    assert fakes.made == list("abc")
    err = capsys.readouterr().err
    assert "problem: c is 3, want 4" in err
    assert "-> look at c" in err
    assert f"stopped at c; docs/bring-up.md says more, {path} has all values" in err
    again = Fakes()
    assert climb(path, again) == 0
    assert again.made == list("cd")
    assert "rung 2 of 4, b: not applicable, earlier" in capsys.readouterr().err


def test_what_the_report_holds(path):
    climb(path, Fakes(bad="c"))
    report = json.loads(path.read_text())
    assert {name: report[name] for name in IDENTITY} == IDENTITY
    assert report["about"] == {"folder": "f"}
    failed = report["rungs"][-1]
    assert failed["state"] == "failed"
    assert failed["expected_s"] == 90
    assert failed["took_s"] >= 0
    assert failed["values"] == {"of": "c"}
    assert failed["found"] == [{"verdict": "problem", "found": "c is 3, want 4", "advice": "look at c"}]
    assert [path.name] == [file.name for file in path.parent.iterdir()]  # nothing half-written beside it


def test_an_exception_fails_its_rung(path, capsys):
    assert climb(path, Fakes(raising={"b": ValueError("no such page")})) == 1
    assert states(path) == {"a": "passed", "b": "failed"}
    assert "problem: ValueError: no such page" in capsys.readouterr().err


def test_from_a_rung(path):
    climb(path, Fakes())
    fakes = Fakes()
    assert climb(path, fakes, start="c") == 0
    assert fakes.made == list("cd")


def test_from_a_rung_before_which_something_failed(path, capsys):
    """Whoever names a rung knows better; what failed below stays so in the report."""
    climb(path, Fakes(bad="b"))
    fakes = Fakes()
    assert climb(path, fakes, start="c") == 0
    assert fakes.made == list("cd")
    assert states(path)["b"] == "failed"
    assert "rung 2 of 4, b: failed" in capsys.readouterr().err


@pytest.mark.parametrize("name", IDENTITY)
def test_another_build_model_or_device_starts_over(path, name):
    climb(path, Fakes())
    _, other = open_report(path, IDENTITY, {})
    assert other == []
    _, other = open_report(path, IDENTITY | {name: "new"}, {})
    assert other == [name]
    fakes = Fakes()
    before = path.read_text()
    climb(path, fakes, **{name: "new"})
    assert fakes.made == list("abcd")
    assert old_place(path).read_text() == before


def test_ctrl_c_keeps_the_report(path, capsys):
    with pytest.raises(KeyboardInterrupt):
        climb(path, Fakes(raising={"c": KeyboardInterrupt()}))
    assert states(path) == {"a": "passed", "b": "not applicable", "c": "interrupted"}
    assert "interrupted in c" in capsys.readouterr().err
    again = Fakes()
    climb(path, again)
    assert again.made == list("cd")


def test_a_climb_that_died_says_where(path, capsys):
    climb(path, Fakes(bad="c"))
    report = json.loads(path.read_text())
    report["rungs"][-1]["state"] = "running"
    path.write_text(json.dumps(report))
    again = Fakes()
    climb(path, again)
    assert again.made == list("cd")
    assert "the last climb ended inside c without a word" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(tmp_path):
    fakes = Fakes()
    with pytest.raises(ReportError, match="No such file or directory; name another place"):
        climb(tmp_path / "none" / "r.json", fakes)
    assert fakes.made == []


def test_a_report_that_cannot_be_written_any_more(tmp_path, capsys):
    """The climb ends: what cannot be kept would be climbed again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    fakes = Fakes()
    fakes.rungs[1].make = lambda: shutil.rmtree(folder) or Check("b")
    assert climb(folder / "r.json", fakes) == 1
    assert fakes.made == ["a"]
    assert "name another place with --report" in capsys.readouterr().err


def test_a_report_whose_place_goes_between_two_rungs(path, capsys):
    report, _ = open_report(path.parent / "folder" / "r.json", IDENTITY, {})
    fakes = Fakes()
    assert bring_up.climb(fakes.rungs, report) == 1
    assert fakes.made == []
    assert "name another place with --report" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"rungs": []}'])
def test_another_file_is_not_overwritten(path, content):
    path.write_text(content)
    with pytest.raises(ReportError, match="no report of this command"):
        open_report(path, IDENTITY, {})
    assert path.read_text() == content


def test_lengths_of_the_release():
    assert Lengths.of(release_config(), 1 << 20) == Lengths(4096, 17_000, 261_933, 1_000_411)


def test_lengths_of_a_small_model():
    lengths = Lengths.of(ModelConfig.load(MICRO), 512)
    assert lengths == Lengths(request=32, past_candidates=34, quarter=127, whole=488)


def test_the_list_climbs_nothing(path, capsys):
    words = ["bring-up", "--model", str(MICRO), "--report", str(path)]
    assert cli.main([*words, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = "kernel operators golden copies shards layers load request perplexity past-candidates quarter whole"
    assert [line.split()[:2] for line in lines] == [[name, "-"] for name in names.split()]
    assert not path.exists()
    assert "no model of this processor's speed" in lines[-1]
    assert "at 2.0 GB/s, assumed of a local NVMe disk" in lines[6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "summit"], "--from summit: no rung; there are kernel, operators,"),
        (["--report", "/"], "name another place with --report"),
        (["--model", "/nowhere"], "No such file"),
        (["--set", "stages=99"], "--set stages=99: must be 1 to 8"),
        (["--reference-op", "rope"], "--reference-op is for --device hip"),
    ],
)
def test_wrong_input(path, capsys, words, said):
    assert cli.main(["bring-up", "--model", str(MICRO), "--report", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_one_number_for_code(tmp_path):
    (tmp_path / "engine" / "layers").mkdir(parents=True)
    (tmp_path / "engine" / "layers" / "a.hip").write_text("1")
    (tmp_path / "engine" / "b.py").write_text("2")
    one = code_sha256(tmp_path)
    (tmp_path / "engine" / "note.txt").write_text("3")
    assert code_sha256(tmp_path) == one
    (tmp_path / "engine" / "layers" / "a.hip").write_text("4")
    assert code_sha256(tmp_path) != one


def test_one_number_for_a_model(tmp_path):
    folder = shutil.copytree(MICRO, tmp_path / "model")
    one = model_sha256(folder)
    assert model_sha256(folder) == one
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000", "20000"))
    other = model_sha256(folder)
    assert other != one
    (folder / "model.safetensors").touch()
    assert model_sha256(folder) != other


def test_the_package_is_what_is_hashed():
    assert {folder.name for folder in bring_up.PACKAGE.iterdir()} >= {"engine", "hip_kernels", "pipeline", "tools"}
    assert "engine" in {path.relative_to(bring_up.PACKAGE).parts[0] for path in bring_up.PACKAGE.glob("*/**/*.py")}
