"""The doctor on software: versions that go together, one HIP runtime, and environment variables that change it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import NamedTuple

import torch

from rocline.hip_kernels.runtime import HipError, check, check_one_runtime, hip, torch_sees_gpus
from rocline.tools.bootstrap import ROCM_TABLE, BootstrapError, RocmRow, find_rocm, pick_row
from rocline.tools.checkout import commit
from rocline.tools.doctor_checks import Cards, Check, System, text_of

TRIED_PYTHONS = ("3.11", "3.12")
ALLOCATOR_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WAITING_VARIABLES = ("HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY")
CHOOSING_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


class Installed(NamedTuple):
    """Versions; None where there is none. torch_hip: the HIP that torch is built for; hip_runtime: HIP's own number."""

    python: str
    rocline: str | None
    commit: str | None
    torch: str
    torch_hip: str | None
    hip_python: str | None
    hip_runtime: int | None


def installed(found: Cards) -> Installed:
    return Installed(
        python_version(),
        _version("rocline"),
        commit(),
        str(torch.__version__),
        torch.version.hip,
        _version("hip-python"),
        check(hip().hipRuntimeGetVersion(), "hipRuntimeGetVersion") if found.cards else None,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(system: System, found: Cards, have: Installed) -> Check:
    """Each version, and whether they are those of bootstrap's table for this ROCm."""
    it = Check("versions", values=have._asdict())
    if have.python.rpartition(".")[0] in TRIED_PYTHONS:
        it.ok(f"Python {have.python}")
    else:
        it.warning(f"Python {have.python}", f"tested with {' and '.join(TRIED_PYTHONS)}: make .venv with one of these")
    it.ok(f"rocline {have.rocline or 'not installed, run from its folder'}, commit {have.commit or 'unknown'}")
    row = _rocm(it, system, have)
    _hip_python(it, row, have, is_wanted=bool(found.cards) or row is not None)
    _torch(it, row, found, have)
    return it


def _rocm(it: Check, system: System, have: Installed) -> RocmRow | None:
    """The row of the table for this machine's ROCm."""
    file = find_rocm(system.environ)
    rocm = text_of(file) if file else None
    it.values |= {"rocm": rocm, "rocm_file": str(file) if file else None}
    if rocm is None and have.hip_runtime is None:
        it.not_applicable("no ROCm in $ROCM_PATH or /opt/rocm")
        return None
    words = [f"ROCm {rocm} ({file})" if rocm is not None else "no ROCm version file"]
    if have.hip_runtime is not None:
        words.append(f"HIP runtime {_words_of(have.hip_runtime)}")
    try:
        row = pick_row(file) if rocm is not None else _row_of(have.hip_runtime or 0)
    except BootstrapError:
        row = None
    if row:
        it.ok(", ".join(words))
    else:
        known = " or ".join(row.rocm for row in ROCM_TABLE)
        it.warning(f"{', '.join(words)}: not in the table", f"install ROCm {known}, or set ROCM_PATH to it")
    return row


def _row_of(hip_runtime: int) -> RocmRow | None:
    """Where ROCm comes without a version file, as packages of Python."""
    return next((row for row in ROCM_TABLE if _words_of(hip_runtime).startswith(f"{row.rocm}.")), None)


def _words_of(hip_runtime: int) -> str:
    """HIP counts major * 10^7 + minor * 10^5 + patch."""
    return f"{hip_runtime // 10**7}.{hip_runtime // 10**5 % 100}.{hip_runtime % 10**5}"


def _hip_python(it: Check, row: RocmRow | None, have: Installed, is_wanted: bool) -> None:
    got = have.hip_python
    install = f"pip install hip-python=={(row or ROCM_TABLE[-1]).hip_python}"
    if got is None and not is_wanted:
        it.not_applicable("no hip-python")
    elif got is None:
        it.problem("no hip-python", install)
    elif row is None or got == row.hip_python:
        it.ok(f"hip-python {got}")
    elif got.startswith(f"{row.rocm}."):
        it.warning(f"hip-python {got}: for ROCm {row.rocm} the table has {row.hip_python}", install)
    else:
        it.problem(f"hip-python {got} is not for ROCm {row.rocm}", install)


def _torch(it: Check, row: RocmRow | None, found: Cards, have: Installed) -> None:
    wanted = row.torch.partition("==")[2] if row else have.torch
    text = f"torch {have.torch}, {f'built for HIP {have.torch_hip}' if have.torch_hip else 'no ROCm build'}"
    advice = f"pip install --index-url {row.torch_index} '{row.torch}'" if row else "README.md names ROCm's builds"
    if found.cards and not torch_sees_gpus() and not all(card.is_host for card in found.cards):
        it.problem(f"{text}: it sees none of the {len(found.cards)} cards", advice)
    elif have.torch != wanted:
        it.warning(f"{text}: the table has {wanted}", advice)
    else:
        it.ok(text)


def one_runtime(system: System) -> Check:
    """Whether this process has exactly one HIP runtime: two share no pointer, stream or event."""
    it = Check("HIP runtime")
    maps = (system.proc / "self/maps").read_text()
    files = sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if "libamdhip64.so" in line})
    it.values["libraries"] = files
    if not files:
        it.not_applicable("none is loaded")
        return it
    try:
        check_one_runtime(maps)
        it.ok(f"one: {files[0]}")
    except HipError as error:
        found_text, _, advice = str(error).partition("; ")
        it.problem(found_text, advice)
    return it


def environment(system: System) -> Check:
    """Variables that switch on what does not hold here (cases B41, B42), or make cards look like others."""
    it = Check("environment")
    have = {name: system.environ[name] for name in _VARIABLES if system.environ.get(name)}
    it.values = dict(have)
    for name in ALLOCATOR_VARIABLES:
        text = have.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE):
            advice = f"unset {name}: with such segments live memory has been seen to turn to zeros"
            it.warning(f"{name}={text}: torch maps its memory piece by piece", advice)
        elif re.search(r"backend\s*:\s*\w*mallocasync", text, re.IGNORECASE):
            advice = f"unset {name}: memory of hipMallocAsync has been seen to read zeros"
            it.warning(f"{name}={text}: torch allocates by hipMallocAsync", advice)
    if override := have.get("HSA_OVERRIDE_GFX_VERSION"):
        advice = "unset it, unless you mean it: kernels are compiled for what the cards say they are"
        it.warning(f"HSA_OVERRIDE_GFX_VERSION={override}: cards call themselves something else", advice)
    for name in WAITING_VARIABLES:
        if have.get(name, "0") != "0":
            it.warning(f"{name}={have[name]}: the host waits for each call", f"unset {name} when you measure")
    for name in CHOOSING_VARIABLES:
        if name in have:
            it.ok(f"{name}={have[name]} chooses cards")
    if not it.entries:
        it.ok("nothing that changes how HIP or torch work")
    return it


def arithmetic() -> Check:
    """Whether torch on this CPU multiplies as FP32 must: the oracle, and all of --device cpu, rest on it."""
    it = Check("arithmetic")
    random = torch.Generator().manual_seed(1)
    a_i64, b_i64 = (torch.randint(-2047, 2048, shape, generator=random) for shape in ((64, 4), (4, 64)))
    wrong = int((a_i64.float() @ b_i64.float() != (a_i64 @ b_i64).float()).sum())  # every sum is below 2^24
    it.values["wrong"] = wrong
    if wrong:
        advice = "unset ONEDNN_DEFAULT_FPMATH_MODE; else install another build of torch"
        it.problem(f"torch on the CPU: {wrong} of 4,096 sums of whole numbers are rounded", advice)
    else:
        it.ok("torch on the CPU: sums of whole numbers are exact in FP32")
    return it


_VARIABLES = (*ALLOCATOR_VARIABLES, "HSA_OVERRIDE_GFX_VERSION", *WAITING_VARIABLES, *CHOOSING_VARIABLES)
