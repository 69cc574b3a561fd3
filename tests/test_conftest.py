"""The random fixture makes failures repeatable: its promises are checked on real runs of pytest."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
SUITE = """
import pytest

@pytest.mark.parametrize("case", range(3))
def test_draw(rng, case):
    print(f"drew {case} {rng.integers(2**62)};")
    assert case != 1

def test_no_stream():
    assert False

def test_golden(golden, golden_or_skip):
    print(f"golden {golden.name} {golden_or_skip('micro').name};")
"""


@pytest.fixture
def run_suite(tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_suite.py").write_text(SUITE)

    def run(*args, golden=tmp_path / "absent"):
        monkeypatch.setenv("ROCLINE_GOLDEN", str(golden))
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:hypothesispytest", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout

    return run


def draws(output):
    return dict(re.findall(r"drew (\d) (\d+);", output))


def test_fresh_each_run_and_repeated_by_seed(run_suite):
    first = run_suite()
    seed = re.search(r"rocline: --seed (\d+) repeats", first)[1]
    assert len(set(draws(first).values())) == 3  # each test has its own stream
    assert draws(run_suite()) != draws(first)
    assert draws(run_suite("--seed", seed, "-n", "2")) == draws(first)
    alone = run_suite("--seed", seed, "test_suite.py::test_draw[2]")
    assert draws(alone) == {"2": draws(first)["2"]}


def test_workers_share_a_seed_and_a_failure_prints_it(run_suite):
    output = run_suite("-n", "2")
    seed = re.search(r"rocline: --seed (\d+) repeats", output)[1]
    assert re.findall(r"repeat with: .*", output) == [
        f"repeat with: pytest 'test_suite.py::test_draw[1]' --seed {seed}"  # not under test_no_stream
    ]
    assert draws(run_suite("--seed", seed)) == draws(output)


def test_golden_found_or_skipped_with_the_place_it_looked(run_suite, tmp_path):
    assert f"golden data: no {tmp_path / 'absent'}; set ROCLINE_GOLDEN" in run_suite()
    (tmp_path / "data" / "micro").mkdir(parents=True)
    assert "golden data micro;" in run_suite(golden=tmp_path / "data")
