"""The bootstrap's decisions: which ROCm, which row, which commands, when to stop. No network."""

import subprocess
import sys

import pytest

from rocline.tools import bootstrap
from rocline.tools.bootstrap import BootstrapError, RocmRow

ROW = RocmRow("9.9", "9.9.0.1", "torch==9.9+rocm9.9", "https://wheels.example/rocm9.9")


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A made .venv, and the commands that set_up would run in it; each succeeds."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    commands = []
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "answers", lambda index: True)
    monkeypatch.setattr(subprocess, "call", lambda command, **kwargs: commands.append(command) or 0)
    return commands


@pytest.fixture
def rocm(tmp_path):
    """Write the version file of a ROCm under tmp_path; returns the file."""

    def write(text):
        (tmp_path / ".info").mkdir(exist_ok=True)
        path = tmp_path / ".info" / "version"
        path.write_text(text)
        return path

    return write


def test_rocm_path_is_looked_at_first(rocm, tmp_path):
    path = rocm("7.2.0\n")
    assert bootstrap.find_rocm({"ROCM_PATH": str(tmp_path)}) == path


@pytest.mark.parametrize("environ", [{}, {"ROCM_PATH": ""}, {"ROCM_PATH": "/nowhere"}])
def test_opt_rocm_is_the_default(environ, monkeypatch):
    monkeypatch.setattr(bootstrap.Path, "is_file", lambda path: str(path) == "/opt/rocm/.info/version")
    assert str(bootstrap.find_rocm(environ)) == "/opt/rocm/.info/version"
    monkeypatch.setattr(bootstrap.Path, "is_file", lambda path: False)
    assert bootstrap.find_rocm(environ) is None


@pytest.mark.parametrize(
    ("text", "rocm_version"),
    [("7.2.0", "7.2"), ("7.2.4-43\n", "7.2"), ("7.2", "7.2"), ("10.0.0", "10.0"), ("10.0.1-7", "10.0")],
)
def test_row_of_a_listed_rocm(rocm, text, rocm_version):
    assert bootstrap.pick_row(rocm(text)).rocm == rocm_version


@pytest.mark.parametrize("text", ["7.20.0", "17.2.0", "7.1.1", "7.2x", "6.4.1-83", "10.1.0", "", "unknown"])
def test_any_other_rocm_stops_with_the_table(rocm, text):
    path = rocm(text)
    with pytest.raises(BootstrapError) as stop:
        bootstrap.pick_row(path)
    message = str(stop.value)
    assert f"{path} says ROCm {text!r}" in message
    for row in bootstrap.ROCM_TABLE:
        assert all(word in message for word in row)


def test_no_rocm_is_the_cpu():
    assert bootstrap.pick_row(None) is None


def test_table_is_consistent_and_in_the_readme():
    readme = (bootstrap.ROOT / "README.md").read_text("utf-8")
    assert len({row.rocm for row in bootstrap.ROCM_TABLE}) == len(bootstrap.ROCM_TABLE)
    for row in bootstrap.ROCM_TABLE:
        assert row.hip_python.startswith(f"{row.rocm}.")  # AMD's rule
        assert f"+rocm{row.rocm}" in row.torch
        assert f"| {row.rocm} | {row.hip_python} | `{row.torch}` | {row.torch_index} |" in readme


def test_cpu_torch_first_and_from_its_own_index(venv):
    bootstrap.set_up(None)
    torch, project = venv
    assert torch[-3:] == ["--index-url", bootstrap.CPU_INDEX, "torch==2.13.0"]
    assert project[-2:] == ["--editable", f"{bootstrap.ROOT}[test]"]
    assert f"hip-python=={bootstrap.ROCM_TABLE[-1].hip_python}" in project  # for the tests' double of HIP


def test_cpu_torch_from_the_default_index_when_its_own_does_not_answer(venv, monkeypatch):
    monkeypatch.setattr(bootstrap, "answers", lambda index: False)
    bootstrap.set_up(None)
    assert "--index-url" not in venv[0]
    assert venv[0][-1] == "torch==2.13.0"


def test_rocm_builds_from_the_row(venv):
    bootstrap.set_up(ROW)
    torch, project = venv
    assert torch[-3:] == ["--index-url", "https://wheels.example/rocm9.9", "torch==9.9+rocm9.9"]
    assert "hip-python==9.9.0.1" in project


def test_a_second_run_installs_nothing_until_an_input_changes(venv):
    bootstrap.set_up(None)
    bootstrap.set_up(None)
    assert len(venv) == 2
    bootstrap.set_up(ROW)
    assert len(venv) == 4
    assert bootstrap.stamp_key(b"a", None) != bootstrap.stamp_key(b"b", None)


def test_a_failed_installation_stops_and_is_tried_again(venv, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "call", lambda command, **kwargs: 3)
    monkeypatch.setattr(bootstrap, "find_rocm", lambda environ: None)
    assert bootstrap.main(["test"]) == 1
    err = capsys.readouterr().err
    assert "cannot install torch==2.13.0" in err
    assert "exit status 3" in err
    assert f"there is none for CPython {sys.version.split()[0]}" in err
    assert not bootstrap.STAMP.exists()


def test_venv_is_made_where_pip_is_missing(venv):
    (bootstrap.VENV / "bin" / "pip").unlink()
    bootstrap.set_up(None)
    assert venv[0] == [sys.executable, "-m", "venv", str(bootstrap.VENV)]


def test_the_jobs(venv, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "find_rocm", lambda environ: None)
    bootstrap.set_up(None)
    venv.clear()
    assert bootstrap.main(["test", "-k", "name"]) == 0
    assert venv[-1][1:] == ["-m", "pytest", "-n", "2", "-k", "name"]

    make, demo = bootstrap.demo_commands(has_model=False, words=["--once"])
    assert make[1:3] == ["demo-checkpoint", bootstrap.DEMO_MODEL]
    assert bootstrap.demo_commands(has_model=True, words=["--once"]) == [demo]
    assert demo[1:] == ["demo", bootstrap.DEMO_MODEL, "--once"]


def test_the_demo_ends_with_its_first_failure(venv, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bootstrap, "find_rocm", lambda environ: None)
    monkeypatch.setattr(bootstrap, "set_up", lambda row: None)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "call", lambda command, **kwargs: calls.append(command) or 4)
    assert bootstrap.main(["demo"]) == 4
    assert len(calls) == 1


@pytest.mark.parametrize("argv", [[], ["serve"], ["Test"]])
def test_unknown_words_show_the_usage(argv, capsys):
    assert bootstrap.main(argv) == 2
    assert "usage:" in capsys.readouterr().err


def test_an_index_that_refuses_is_known_at_once(capsys):
    assert not bootstrap.answers("http://127.0.0.1:9")  # the discard port: nothing listens
    assert "does not answer" in capsys.readouterr().err


def test_runs_without_a_venv_or_the_package():
    script = bootstrap.ROOT / "tools" / "bootstrap.py"
    done = subprocess.run([sys.executable, "-S", str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "tools/bootstrap.py demo" in done.stdout
