"""Fixtures shared by every test: a repeatable random stream and the golden data."""

import hashlib
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat the random tests of the run that printed this seed")
    parser.addoption(
        "--hip",
        choices=("cpu", "cuda", "rocm"),
        default="cpu",
        help="where HIP kernels run: this CPU, an NVIDIA card (both through a double of HIP), or a ROCm machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        shared = getattr(config, "workerinput", {"seed": secrets.randbits(32)})
        config.option.seed = shared["seed"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the seed to a pytest-xdist worker: of a conftest's options it gets only the typed ones."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"rocline: --seed {config.option.seed} repeats the random tests of this run"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        report.sections.append(("random seed", f"repeat with: pytest '{item.nodeid}' --seed {item.config.option.seed}"))
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A fresh random stream a run; --seed repeats it, whichever tests run beside it and in what order."""
    name = hashlib.sha256(request.node.nodeid.encode()).digest()
    return np.random.default_rng([request.config.option.seed, int.from_bytes(name[:8])])


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """SIGINT as a terminal's process has it, here and in children: workers of tests and background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def hip_device(request: pytest.FixtureRequest) -> str:
    """HIP, started in this process: the double that --hip names, or the installed one. Returns --hip's word."""
    from hip_start import start

    kind: str = request.config.option.hip
    if kind != "rocm" and not shutil.which("g++"):
        pytest.skip("HIP double: needs g++")
    start(kind, request.config.cache.mkdir("hip-doubles"))  # type: ignore[arg-type]
    return kind


@pytest.fixture(scope="session")
def golden_or_skip() -> Callable[[str], Path]:
    """golden_or_skip(name): the path of that golden file or folder; skips the test where it is absent."""
    root = Path(os.environ.get("ROCLINE_GOLDEN", ROOT.parent / "shared" / "golden"))

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"golden data: no {path}; set ROCLINE_GOLDEN to the folder that holds it")
        return path

    return find


@pytest.fixture(scope="session")
def golden(golden_or_skip: Callable[[str], Path]) -> Path:
    """The folder of the golden data; skips the test where it is absent."""
    return golden_or_skip(".")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The committed part of the golden data: operator tables and `micro`."""
    return ROOT / "tests" / "data" / "golden"
