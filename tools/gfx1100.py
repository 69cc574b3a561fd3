"""What gfx1100 machine code costs, without a GPU: resources, occupancy, and cycles of its loops from disassembly.

The cycle model is coarse on purpose, and good for comparing two versions of a kernel: each instruction class has a
fixed price (issue_cycles, lds_cycles), memory latency is taken as hidden, and a loop costs what its busiest unit
does. A loop has the instructions that no loop inside it has; all its paths are counted, whichever run.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rocline.hip_kernels.compile import OPTIONS, SOURCES

COMPILER, READER, DISASSEMBLER = TOOLS = ("clang++-22", "llvm-readelf-22", "llvm-objdump-22")

# A workgroup runs on a work-group processor: two compute units, four SIMDs.
SIMDS, MOST_WAVES, WAVE_LANES = 4, 16, 32
VGPRS, VGPR_GRANULE = 1536, 24
LDS_BYTES, LDS_GRANULE = 131072, 1024

WMMA_CYCLES = 32  # 8,192 operations, of which a SIMD does 256 a clock
SLOW_CYCLES = 4  # quarter rate: transcendentals and 32-bit multiplies
LDS_BYTES_A_CYCLE = 64  # 128 a clock, shared by the two SIMDs of a compute unit

_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos|mul_lo|mul_hi|mad_u64|mad_i64)_")
_INSTRUCTION = re.compile(r"^\t(\S+).*// ([0-9A-F]+):")
_TARGET = re.compile(r"<[^>+]+\+0x([0-9a-f]+)>\s*$")
_FUNCTION = re.compile(r"^([0-9a-f]+) <([^>]+)>:$")


class ToolError(Exception):
    """The compiler or a binary tool failed; the message has its output."""


class NoToolError(ToolError):
    """The compiler or a binary tool is not installed; the message says which and what to do."""


@dataclass(frozen=True)
class Resources:
    """What the code object says of one entry point. arguments: (bytes, whether a pointer) in order."""

    vgprs: int
    spilled: int
    scratch_bytes: int
    static_lds_bytes: int
    threads: int
    arguments: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Loop:
    """One pass of a loop: how often each class of instruction stands in it."""

    start: int  # bytes from the entry point; -1: the code outside every loop
    counts: Counter[str]
    lds_bytes: int  # a lane moves per pass

    @property
    def ideal_cycles(self) -> int:
        """The matrix work alone."""
        return WMMA_CYCLES * self.counts["wmma"]

    @property
    def issue_cycles(self) -> int:
        return self.ideal_cycles + self.counts["vector"] + SLOW_CYCLES * self.counts["slow"]

    @property
    def lds_cycles(self) -> int:
        return math.ceil(self.lds_bytes * WAVE_LANES / LDS_BYTES_A_CYCLE)

    @property
    def cycles(self) -> int:
        """SIMD cycles of one wave's pass."""
        return max(self.issue_cycles, self.lds_cycles)


def check_tools() -> None:
    """Raise NoToolError if one of TOOLS is not there."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise NoToolError(f"no {', '.join(missing)}; install them: apt-get install clang-22 lld-22 llvm-22")


def waves_per_simd(vgprs: int, threads: int, lds_bytes: int) -> int:
    """Waves that a SIMD can hold of workgroups with so many threads and bytes of LDS (dynamic included)."""
    waves = math.ceil(threads / WAVE_LANES)
    by_vgprs = min(MOST_WAVES, VGPRS // (math.ceil(vgprs / VGPR_GRANULE) * VGPR_GRANULE))
    groups = by_vgprs * SIMDS // waves
    if lds_bytes:
        groups = min(groups, LDS_BYTES // (math.ceil(lds_bytes / LDS_GRANULE) * LDS_GRANULE))
    return groups * waves // SIMDS


def analyse(source: Path, defines: Iterable[tuple[str, int]]) -> dict[str, tuple[Resources, list[Loop]]]:
    """Compile a .hip; per entry point its resources and loops. Raises ToolError, warnings of the compiler included."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        command = [COMPILER, "-x", "hip", "--offload-arch=gfx1100", "--cuda-device-only", "--no-gpu-bundle-output"]
        command += ["-nogpuinc", "-nogpulib", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", *OPTIONS]
        command += [*(f"-D{name}={value}" for name, value in defines), f"-I{SOURCES}"]
        _run([*command, "-c", str(source), "-o", str(code)])
        resources = parse_notes(_run([READER, "--notes", str(code)]))
        loops = parse_loops(_run([DISASSEMBLER, "-d", "--mcpu=gfx1100", str(code)]))
    return {name: (resources[name], loops[name]) for name in resources}


def parse_notes(text: str) -> dict[str, Resources]:
    """Per entry point, from what llvm-readelf --notes prints: YAML, of which a few regular lines are wanted."""
    found = {}
    for part in re.split(r"^  - \.args:", text, flags=re.MULTILINE)[1:]:
        values = dict(re.findall(r"^    \.(\w+):\s+(\S+)$", part, re.MULTILINE))
        arguments = re.findall(r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", part)
        found[values["name"]] = Resources(
            vgprs=int(values["vgpr_count"]),
            spilled=int(values["vgpr_spill_count"]) + int(values["sgpr_spill_count"]),
            scratch_bytes=int(values["private_segment_fixed_size"]),
            static_lds_bytes=int(values["group_segment_fixed_size"]),
            threads=int(values["max_flat_workgroup_size"]),
            arguments=tuple(
                (int(size), kind == "global_buffer") for size, kind in arguments if not kind.startswith("hidden")
            ),
        )
    return found


def parse_loops(text: str) -> dict[str, list[Loop]]:
    """Per entry point, its loops in the order of their code, from what llvm-objdump -d prints."""
    found: dict[str, list[_Instruction]] = {}
    start, code = 0, []
    for line in text.splitlines():
        if function := _FUNCTION.match(line):
            start, code = int(function[1], 16), found.setdefault(function[2], [])
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1] != "s_code_end":
            target = _TARGET.search(line) if "branch" in instruction[1] else None
            offset = int(instruction[2], 16) - start
            code.append(_Instruction(offset, instruction[1], int(target[1], 16) if target else None))
    return {name: _loops_of(code) for name, code in found.items()}


class _Instruction(NamedTuple):
    offset: int
    mnemonic: str
    branches_to: int | None


def _loops_of(code: Sequence[_Instruction]) -> list[Loop]:
    """Each instruction counts for the smallest loop round it; code outside loops only if that has the matrix work."""
    last_of: dict[int, int] = {-1: code[-1].offset}  # by first offset: a loop is what lies behind a branch back
    for offset, _, target in code:
        if target is not None and target <= offset:
            last_of[target] = offset
    bodies: dict[int, list[str]] = {first: [] for first in sorted(last_of)}
    for offset, mnemonic, _ in code:
        around = (first for first, last in last_of.items() if first <= offset <= last)
        bodies[min(around, key=lambda first: last_of[first] - first)].append(mnemonic)
    loops = [Loop(first, Counter(map(_class_of, body)), sum(map(_lds_bytes, body))) for first, body in bodies.items()]
    return [loop for loop in loops if loop.start >= 0 or loop.ideal_cycles or len(loops) == 1]


def _class_of(mnemonic: str) -> str:
    if mnemonic.startswith("v_wmma"):
        return "wmma"
    if mnemonic.startswith("v_"):
        return "slow" if _SLOW.match(mnemonic) else "vector"
    if mnemonic.startswith("ds_"):
        return "lds"
    return "scalar" if mnemonic.startswith("s_") else "memory"


def _lds_bytes(mnemonic: str) -> int:
    """Bytes a lane moves: ds_load_b128 16, ds_load_2addr_b64 16; narrower ones cost a whole bank's four."""
    if not mnemonic.startswith("ds_"):
        return 0
    width = re.search(r"_[biuf](\d+)", mnemonic)
    words = max(1, int(width[1]) // 32) if width else 1
    return 4 * words * (2 if "2addr" in mnemonic else 1)


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise NoToolError(f"no {command[0]}; install clang-22, lld-22 and llvm-22") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"{' '.join(command)} failed:\n{error.stderr}") from error
