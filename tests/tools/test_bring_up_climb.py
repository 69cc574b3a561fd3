"""rocline bring-up, whole: every rung in a child process, over the CPU double of HIP and a small checkpoint."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocline.hip_kernels.kernel import compiler

ROOT = Path(__file__).resolve().parents[2]
# Room for the longest prompt that is of a context of so many tokens, on two of the double's cards.
SETTINGS = ("context=160", "stages=2", "running=2", "arena_gib=0.06")
NOT_APPLICABLE = {"perplexity"}  # scored, but not to be judged: the weights are random
RUNGS = {
    *("kernel", "operators", "golden", "copies", "shards", "layers"),
    *("load", "request", "perplexity", "past-candidates", "quarter", "whole"),
}


@pytest.fixture
def bring_up(hip_device, hears_interrupts, data_folder, tmp_path):
    """bring_up(): (exit status, stderr, report) of a climb in a child. until: interrupted once that is said."""
    shutil.copytree(data_folder / "micro" / "model", tmp_path / "model")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "rocline").symlink_to(compiler().folder)  # kernels that the tests have compiled
    environ = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environ.pop("ROCLINE_GOLDEN", None)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "rocline.tools.cli", "bring-up", "--model", "model", "--device", "hip", *settings]

    def climb(until=None):
        lines = []
        with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                lines.append(line)
                if until and until in line:
                    process.send_signal(signal.SIGINT)
        return process.returncode, "".join(lines), json.loads((tmp_path / "bring-up.json").read_text())

    return climb


def states(report):
    return {rung["name"]: rung["state"] for rung in report["rungs"]}


def test_every_rung(hip_device, bring_up):
    status, err, report = bring_up(until="micro: trace")  # said by the rung of golden data
    assert status == 130, err
    assert states(report) == {"kernel": "passed", "operators": "passed", "golden": "interrupted"}

    status, err, report = bring_up()
    assert status == 0, err
    assert err.count(": passed, earlier") == 2
    assert states(report) == {name: "not applicable" if name in NOT_APPLICABLE else "passed" for name in RUNGS}
    assert "prompts are of 32, 34, 39, 152 tokens: what the release's are in a context of 160" in err
    rungs = {rung["name"]: rung for rung in report["rungs"]}
    assert [run["chunk_rows"] for run in rungs["request"]["values"]["runs"]] == [16, 16, 8]
    assert len(report["device"]["cards"]) == 2
    assert len(rungs["copies"]["values"]["pairs"]) == 2

    status, err, same = bring_up()
    assert status == 0
    assert same["rungs"] == report["rungs"]
    assert err.count(", earlier") == len(RUNGS)
