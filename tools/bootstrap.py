"""Everything from a fresh clone to a running job, in one command. Standard library only.

    python3 tools/bootstrap.py demo [...]    make the demo checkpoint and serve it; further arguments go to rocline demo
    python3 tools/bootstrap.py test [...]    run the tests; further arguments go to pytest

Both first make .venv and install torch and rocline into it: torch's CPU build where no ROCm is found, else
the builds that ROCM_TABLE names for that ROCm. Progress goes to stderr, the job's own output to stdout.
"""

import hashlib
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036  run by whatever python3 is; older ones cannot define what follows
    sys.exit("bootstrap: needs Python 3.11 or newer, this is " + sys.version.split()[0])

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "rocline-bootstrap"  # what the last finished installation was made from

CPU_TORCH = "torch==2.13.0"
CPU_HIP_PYTHON = "10.0.0.0.1.2"  # the tests drive HIP kernels on the CPU through it, whatever release it is
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 3

DEMO_MODEL = "demo/model"


class RocmRow(NamedTuple):
    """What goes with one ROCm release. rocm is its major.minor; the others are pip's words."""

    rocm: str
    hip_python: str
    torch: str
    torch_index: str


# hip-python: the release on PyPI whose first numbers are ROCm's, AMD's rule for matching the two
# (rocm.docs.amd.com/projects/hip-python, user guide, installation).
ROCM_TABLE = (
    # torch: pytorch.org's stable ROCm index for 2.13; the release notes of 2.13.0 name this build.
    RocmRow("7.2", "7.2.2.562.43", "torch==2.13.0+rocm7.2", "https://download.pytorch.org/whl/rocm7.2"),
    # torch: the install line that public projects give for ROCm 10.0 on gfx1100; pytorch.org has no index for
    # 10.0. ROCm 7.14 is left out: there are torch wheels for it, but no hip-python.
    RocmRow(
        "10.0",
        "10.0.0.0.1.2",
        "torch[device-gfx1100]==2.13.0+rocm10.0.0",
        "https://stable.repo.amd.com/rocm/whl-next/",
    ),
)


class BootstrapError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main(argv: list[str]) -> int:
    """Set up and run the job named by argv; return its exit status."""
    usage = "usage: python3 tools/bootstrap.py demo [arguments of rocline demo] | test [arguments of pytest]"
    if argv in (["-h"], ["--help"]):
        print(usage)
        return 0
    if argv[:1] not in (["demo"], ["test"]):
        say(usage)
        return 2
    try:
        set_up(pick_row(find_rocm(os.environ)))
        if argv[0] == "test":
            return subprocess.call(pytest_command(argv[1:]), cwd=ROOT)
        return run_demo(argv[1:])
    except BootstrapError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"{error}; if {VENV} is damaged, delete it and run this again")
        return 1
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def find_rocm(environ: Mapping[str, str]) -> Path | None:
    """The version file of the ROCm at $ROCM_PATH or /opt/rocm; None where there is none."""
    roots = [environ["ROCM_PATH"]] if environ.get("ROCM_PATH") else []
    files = [Path(root) / ".info" / "version" for root in [*roots, "/opt/rocm"]]
    return next((path for path in files if path.is_file()), None)


def pick_row(version_file: Path | None) -> RocmRow | None:
    """The row for this ROCm; None without ROCm. Raises BootstrapError, with the table, if it has none."""
    if version_file is None:
        return None
    text = version_file.read_text().strip()  # "7.2.0" or "7.2.0-43"
    version = re.match(r"(\d+\.\d+)(?=[.\-]|$)", text)
    row = next((row for row in ROCM_TABLE if version and row.rocm == version[1]), None)
    if row is None:
        raise BootstrapError(
            f"{version_file} says ROCm {text!r}, which is not in the table:\n\n{format_table()}\n\n"
            "Install a listed ROCm, or set ROCM_PATH to one. To use only the CPU, set up by hand:\n"
            f"  python3 -m venv .venv && .venv/bin/pip install --index-url {CPU_INDEX} {CPU_TORCH}\n"
            "  .venv/bin/pip install -e '.[test]' && .venv/bin/pytest"
        )
    return row


def format_table() -> str:
    rows = [RocmRow("ROCm", "hip-python", "torch", "torch wheel index"), *ROCM_TABLE]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def set_up(row: RocmRow | None) -> None:
    """Make .venv hold torch and rocline; at once when the last run finished from the same inputs."""
    key = stamp_key((ROOT / "pyproject.toml").read_bytes(), row)
    if STAMP.is_file() and STAMP.read_text() == key:
        return
    if not (VENV / "bin" / "pip").exists():
        say(f"1/3 making {VENV}")
        hint = "on Debian and Ubuntu: apt-get install python3-venv"
        install([sys.executable, "-m", "venv", str(VENV)], f"cannot make a virtual environment; {hint}")
    torch = row.torch if row else CPU_TORCH
    say(f"2/3 installing {torch} ({f'for ROCm {row.rocm}' if row else 'no ROCm found: CPU build'})")
    install(
        torch_command(row, cpu_index_answers=row is None and answers(CPU_INDEX)),
        f"cannot install {torch}. If pip found no matching distribution, there is none for {venv_python()}: "
        "delete .venv and start this script with Python 3.11 or 3.12",
    )
    say("3/3 installing rocline and what it needs")
    install(project_command(row), "cannot install rocline from pyproject.toml")
    STAMP.write_text(key)


def stamp_key(pyproject: bytes, row: RocmRow | None) -> str:
    """Changes with whatever the installation depends on; the root, because the venv and -e hold its path."""
    return hashlib.sha256(repr((pyproject, row, CPU_TORCH, CPU_HIP_PYTHON, str(ROOT))).encode()).hexdigest()


def answers(index: str) -> bool:
    """Whether a wheel index can be reached from here, known within seconds."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=PROBE_S):
            return True
    except OSError as error:
        say(f"{index} does not answer ({error}); pip chooses the build, on some machines one of gigabytes")
        return False


def torch_command(row: RocmRow | None, cpu_index_answers: bool) -> list[str]:
    """The pip command for torch. PyPI's build for Linux is a CUDA one, so its CPU index comes first."""
    if row:
        return pip_install("--index-url", row.torch_index, row.torch)
    return pip_install(*(["--index-url", CPU_INDEX] if cpu_index_answers else []), CPU_TORCH)


def project_command(row: RocmRow | None) -> list[str]:
    hip_python = row.hip_python if row else CPU_HIP_PYTHON
    return pip_install(f"hip-python=={hip_python}", "--editable", f"{ROOT}[test]")


def pip_install(*words: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *words]


def install(command: list[str], problem: str) -> None:
    status = subprocess.call(command, stdout=sys.stderr)
    if status:
        raise BootstrapError(f"{problem} ({' '.join(command)}: exit status {status})")


def venv_python() -> str:
    """For example "CPython 3.11.7"."""
    code = "import platform; print(platform.python_implementation(), platform.python_version())"
    return subprocess.check_output([str(VENV / "bin" / "python"), "-c", code], text=True).strip()


def pytest_command(words: list[str]) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pytest", "-n", "2", *words]


def demo_commands(has_model: bool, words: list[str]) -> list[list[str]]:
    """The commands of the demo, in order; `words` go to the last."""
    rocline = str(VENV / "bin" / "rocline")
    # --force: what an interrupted run left in the folder is written over.
    make = [rocline, "demo-checkpoint", DEMO_MODEL, "--force"]
    demo = [rocline, "demo", DEMO_MODEL, *words]
    return [demo] if has_model else [make, demo]


def run_demo(words: list[str]) -> int:
    has_model = (ROOT / DEMO_MODEL / "config.json").is_file()  # demo-checkpoint writes it last
    for command in demo_commands(has_model, words):
        say(" ".join(["rocline", *command[1:]]))
        status = subprocess.call(command, cwd=ROOT)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
