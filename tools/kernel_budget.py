"""Holds every kernel to the gfx1100 budget that its source states.

    python -m rocline.tools.kernel_budget [--page FILE] [--accepted FILE]

Compiles each kernel that a binding lists in RELEASE_KERNELS, checks registers, LDS at the launch's size, waves per
SIMD, arguments, and that nothing spills; then prices the loops and writes the table, to stdout or as a page.
With --accepted, figures more than 3 % worse than that page's, or not on it, are failures too.
Exit status: 0 all hold, 1 some do not, 2 wrong flags, 3 the compiler is not installed.

The budget is a line for each entry point at the top of the .hip:

    // Budget on gfx1100: index_score: 64 VGPRs, 16384 bytes of LDS, 12 waves per SIMD, no scratch.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rocline.hip_kernels
from rocline.hip_kernels.compile import SOURCES
from rocline.hip_kernels.kernel import Kernel
from rocline.tools import gfx1100
from rocline.tools.gfx1100 import Loop, NoToolError, Resources, ToolError, analyse, check_tools, waves_per_simd

EXIT_BROKEN, EXIT_NO_COMPILER = 1, 3
MOST_WORSE = 1.03

_BUDGET = re.compile(
    r"^// Budget on gfx1100: (\w+): (\d+) VGPRs, (\d+) bytes of LDS, (\d+) waves per SIMD, no scratch\.$", re.MULTILINE
)
_EXPORT = re.compile(r"^RL_EXPORT\((\w+)\)", re.MULTILINE)
_ARGUMENTS = {"P": (8, True), "i": (4, False), "q": (8, False), "f": (4, False)}

_PAGE = """\
# Kernels on gfx1100

Modelled, not measured: what clang-22 makes of every kernel at the release's dimensions, and what its loops
cost if nothing waits for memory. Written by `python -m rocline.tools.kernel_budget --page docs/gfx1100.md`; CI holds
new code to within 3 % of the figures here.

A pass of a loop is priced for one wave: {wmma} SIMD cycles for a 16x16x16 WMMA, 1 for a vector instruction, {slow}
for a slow one (transcendentals, 32-bit multiplies), LDS at {lds} bytes a cycle beside them; scalar and memory
instructions have units of their own. A loop has the instructions that no loop inside it has, all paths of it,
whichever run. "Price" is the cycles of the loops that hold WMMAs over the cycles of those WMMAs alone; of a kernel
without any, the cycles of its loops.

## Resources

{resources}

## Loops

{loops}
"""


@dataclass(frozen=True)
class Budget:
    vgprs: int
    lds_bytes: int
    waves: int


@dataclass(frozen=True)
class Figures:
    """One kernel as compiled."""

    kernel: Kernel
    resources: Resources
    loops: Sequence[Loop]

    @property
    def waves(self) -> int:
        return waves_per_simd(self.resources.vgprs, self.kernel.threads, self.kernel.lds_bytes)

    @property
    def price(self) -> float:
        matrix = [loop for loop in self.loops if loop.ideal_cycles]
        ideal_cycles = sum(loop.ideal_cycles for loop in matrix)
        return sum(loop.cycles for loop in matrix or self.loops) / (ideal_cycles or 1)

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel.name, " ".join(f"{name}={value}" for name, value in self.kernel.defines) or "-"

    @property
    def row(self) -> dict[str, float]:
        """What later versions are compared by."""
        return {
            "VGPRs": self.resources.vgprs,
            "LDS bytes": self.kernel.lds_bytes,
            "waves per SIMD": self.waves,
            "price": round(self.price, 3),
        }


def release_kernels() -> list[Kernel]:
    """Every kernel of every binding's RELEASE_KERNELS."""
    kernels: list[Kernel] = []
    for module in pkgutil.iter_modules(rocline.hip_kernels.__path__):
        kernels += getattr(importlib.import_module(f"rocline.hip_kernels.{module.name}"), "RELEASE_KERNELS", ())
    return kernels


def measure(kernels: Sequence[Kernel]) -> list[Figures]:
    """Compile each source once for each set of defines. Raises ToolError, also for an entry point that is not there."""
    compiled = {key: analyse(*key) for key in dict.fromkeys((kernel.source, kernel.defines) for kernel in kernels)}
    all_figures = []
    for kernel in kernels:
        entries = compiled[kernel.source, kernel.defines]
        if kernel.name not in entries:
            raise ToolError(f"{kernel}: {kernel.source.name} has no such entry point, only {', '.join(entries)}")
        all_figures.append(Figures(kernel, *entries[kernel.name]))
    return all_figures


def budgets_of(source: Path) -> dict[str, Budget]:
    """The budget lines of a .hip file by entry point."""
    return {name: Budget(*map(int, figures)) for name, *figures in _BUDGET.findall(source.read_text())}


def unlisted(sources: Iterable[Path], kernels: Iterable[Kernel]) -> list[str]:
    """Entry points that no RELEASE_KERNELS has, so that nobody would notice what they cost, or that it has twice."""
    listed = Counter((kernel.source, kernel.name, kernel.defines) for kernel in kernels)
    named = {(source, name) for source, name, _ in listed}
    return [
        f"{source.name}: {name} is exported, but no RELEASE_KERNELS has it"
        for source in sources
        for name in _EXPORT.findall(source.read_text())
        if (source, name) not in named
    ] + [
        f"{source.name}: {name} is listed {n} times with defines {dict(defines)}; list the one with the most LDS"
        for (source, name, defines), n in listed.items()
        if n > 1
    ]


def broken(figures: Figures) -> list[str]:
    """Where a kernel breaks its budget or its declaration."""
    kernel, has = figures.kernel, figures.resources
    budget = budgets_of(kernel.source).get(kernel.name)
    if budget is None:
        return [f"{kernel}: {kernel.source.name} states no budget for it, want a line like the one in --help"]
    letters = [_ARGUMENTS[letter] for letter in kernel.arguments]
    checks = [
        (has.vgprs <= budget.vgprs, f"{has.vgprs} VGPRs, budget {budget.vgprs}"),
        (kernel.lds_bytes <= budget.lds_bytes, f"{kernel.lds_bytes} bytes of LDS, budget {budget.lds_bytes}"),
        (figures.waves >= budget.waves, f"{figures.waves} waves per SIMD, budget {budget.waves}"),
        (has.scratch_bytes == 0, f"{has.scratch_bytes} bytes of scratch a lane, want none"),
        (has.spilled == 0, f"{has.spilled} registers spilled, want none"),
        (has.static_lds_bytes == 0, f"{has.static_lds_bytes} bytes of static LDS, want all of it RL_DYN_SHARED"),
        (has.threads == kernel.threads, f"RL_KERNEL({has.threads}), the binding launches {kernel.threads} threads"),
        (
            list(has.arguments) == letters,
            f"arguments are {_spell(has.arguments)} in the source, {kernel.arguments!r} in the binding",
        ),
    ]
    return [f"{kernel}: {problem}" for holds, problem in checks if not holds]


def _spell(arguments: Iterable[tuple[int, bool]]) -> str:
    return repr("".join("P" if pointer else {4: "i", 8: "q"}.get(size, "?") for size, pointer in arguments))


def worse(figures: Figures, accepted: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """Where a kernel is more than 3 % worse than the accepted page says, or not on it."""
    before = accepted.get(figures.key)
    if before is None:
        return [f"{figures.kernel}: is not on the accepted page; write it anew with --page"]
    return [
        f"{figures.kernel}: {name} {before[name]:g} -> {now:g}, worse by more than 3 %"
        for name, now in figures.row.items()
        if (before[name] > MOST_WORSE * now if name == "waves per SIMD" else now > MOST_WORSE * before[name])
    ]


def page(all_figures: Iterable[Figures]) -> str:
    """The table as Markdown."""
    rows = sorted(all_figures, key=lambda figures: (figures.kernel.source.name, figures.key))
    return _PAGE.format(
        wmma=gfx1100.WMMA_CYCLES,
        slow=gfx1100.SLOW_CYCLES,
        lds=gfx1100.LDS_BYTES_A_CYCLE,
        resources=_table([_resource_cells(figures) for figures in rows]),
        loops=_table([_loop_cells(figures, loop) for figures in rows for loop in figures.loops]),
    )


def _resource_cells(figures: Figures) -> dict[str, object]:
    kernel, defines = figures.key
    return {"kernel": kernel, "defines": defines, **figures.row}


def _loop_cells(figures: Figures, loop: Loop) -> dict[str, object]:
    kernel, defines = figures.key
    counts = {name: loop.counts[name] for name in ("wmma", "vector", "slow", "lds", "memory", "scalar")}
    cycles = {"issue cycles": loop.issue_cycles, "LDS cycles": loop.lds_cycles, "ideal": loop.ideal_cycles}
    at = "no loop" if loop.start < 0 else f"+{loop.start:#x}"
    return {"kernel": kernel, "defines": defines, "at": at, **counts, **cycles}


def _table(rows: Sequence[dict[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_page(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """The first table of a page again: {(kernel, defines): {column: figure}}."""
    lines = [line.strip("| ").split(" | ") for line in text.partition("## Loops")[0].splitlines() if "|" in line]
    return {(cells[0], cells[1]): dict(zip(lines[0][2:], map(float, cells[2:]), strict=True)) for cells in lines[2:]}


def main(argv: Sequence[str] | None = None) -> int:
    """Check everything; print problems to stderr and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="kernel_budget", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table here instead of to stdout")
    parser.add_argument("--accepted", type=Path, metavar="FILE", help="compare with the table of this page")
    args = parser.parse_args(argv)
    try:
        accepted = read_page(args.accepted.read_text()) if args.accepted else None
    except OSError as error:
        parser.error(f"--accepted: {error}")
    try:
        check_tools()
        kernels = release_kernels()
        all_figures = measure(kernels)
    except ToolError as error:
        print(f"kernel_budget: {error}", file=sys.stderr)
        return EXIT_NO_COMPILER if isinstance(error, NoToolError) else EXIT_BROKEN
    problems = unlisted(sorted(SOURCES.glob("*.hip")), kernels)
    problems += [problem for figures in all_figures for problem in broken(figures)]
    if accepted is not None:
        problems += [problem for figures in all_figures for problem in worse(figures, accepted)]
    text = page(all_figures)
    if args.page:
        args.page.write_text(text)
    else:
        print(text)
    for problem in problems:
        print(f"kernel_budget: {problem}", file=sys.stderr)
    return EXIT_BROKEN if problems else 0


if __name__ == "__main__":
    sys.exit(main())
