"""The doctor on the host: memory for Engram's tables, huge pages, swap, limits, processors and NUMA nodes."""

from __future__ import annotations

import os
import re
import resource
from collections import defaultdict
from functools import cache

from rocline.engine.checkpoint import MAX_STAGING_BYTES
from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.pipeline.transport import BOUNCE_BYTES
from rocline.tools.doctor_checks import GIB, Cards, Check, System, gib, listed, number_of, text_of

SPARE_BYTES = 16 * GIB  # of the host beside the tables: Python, staging, the page cache while weights are read
FILES = 4096  # shards, libraries, and a socket for each client
SWAPPED_BYTES = GIB
SELF_GOVERNED = ("intel_pstate", "amd-pstate-epp")  # their "powersave" goes by load, and is not slow


@cache
def engram_bytes(config: ModelConfig) -> int:
    """Of Engram's tables, which --engram ram holds in host memory; what little stands beside them counts too."""
    return sum(spec.n_bytes for spec in expected_tensors(config).values() if spec.component == "engram")


def host_memory(system: System, config: ModelConfig, has_cards: bool) -> Check:
    """Memory for the tables of `config`. Without cards, where nobody serves the release, only told of."""
    it = Check("host memory")
    kib = dict(re.findall(r"^(\w+):\s+(\d+)", text_of(system.proc / "meminfo") or "", re.MULTILINE))
    total, available, swap, swap_free, huge = (
        int(kib.get(name, 0)) << 10 for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Hugepagesize")
    )
    huge_pool = int(kib.get("HugePages_Total", 0)) * huge
    tables = engram_bytes(config)
    choice = re.search(r"\[(\w+)\]", text_of(system.sys / "kernel/mm/transparent_hugepage/enabled") or "")
    it.values = {"total_bytes": total, "available_bytes": available, "swap_bytes": swap, "engram_bytes": tables} | {
        "swap_used_bytes": swap - swap_free,
        "huge_page_pool_bytes": huge_pool,
        "transparent_huge_pages": choice[1] if choice else None,
    }
    text = f"{gib(available)} of {gib(total)} available; Engram's tables take {gib(tables)} of it"
    if available >= tables + SPARE_BYTES or not tables:
        it.ok(text)
    elif has_cards:
        advice = "more memory; or serve with --engram mmap, which reads rows from disk and may stall a prompt"
        it.warning(text, advice)
    else:
        it.ok(f"{gib(available)} of {gib(total)} available; enough for the demo")
    if has_cards and tables:
        _pages(it, choice[1] if choice else None, huge_pool)
    if swap - swap_free > SWAPPED_BYTES and has_cards:
        advice = "swapoff, or vm.swappiness=1: tables in swap are read slower than from the checkpoint"
        it.warning(f"{gib(swap - swap_free)} of {gib(swap)} swap in use", advice)
    return it


def _pages(it: Check, choice: str | None, huge_pool: int) -> None:
    if choice in ("always", "madvise"):
        it.ok(f"transparent huge pages: {choice}; the tables use them")
    else:
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: rows are read three times as fast"
        it.warning(f"transparent huge pages: {choice or 'not there'}", advice)
    if huge_pool > GIB:
        it.warning(
            f"{gib(huge_pool)} are set aside as a pool of huge pages, which the tables do not use",
            "vm.nr_hugepages=0, unless another program wants them",
        )


def limits(system: System, found: Cards) -> Check:
    """What a process may lock and open."""
    it = Check("limits")
    locked, _ = system.limit(resource.RLIMIT_MEMLOCK)
    files, most_files = system.limit(resource.RLIMIT_NOFILE)
    n_pairs = len(found.cards) * (len(found.cards) - 1)
    wants_locked = MAX_STAGING_BYTES + n_pairs * 2 * BOUNCE_BYTES if found.cards else 0
    it.values = {"memlock_bytes": _of(locked), "wanted_memlock_bytes": wants_locked} | {
        "open_files": _of(files),
        "open_files_at_most": _of(most_files),
    }
    if _at_least(locked, wants_locked):
        it.ok(f"locked memory: {'no limit' if locked == resource.RLIM_INFINITY else gib(locked)}")
    else:
        advice = "ulimit -l unlimited, or LimitMEMLOCK=infinity as in docs/rocline.service"
        it.warning(f"locked memory: {gib(locked)}, up to {gib(wants_locked)} are pinned for copies", advice)
    if _at_least(files, FILES) or not found.cards:
        it.ok(f"open files: {'no limit' if files == resource.RLIM_INFINITY else f'{files:,}'}")
    else:
        advice = f"ulimit -n {FILES} or more, or LimitNOFILE=65536 as in docs/rocline.service"
        it.warning(f"open files: {files:,}, each waiting client takes one", advice)
    return it


def _at_least(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _of(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def processor(system: System, found: Cards) -> Check:
    """Cores and how they are clocked; NUMA nodes, and which cards hang on each."""
    it = Check("processor")
    usable = len(os.sched_getaffinity(0))
    policies = sorted((system.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    governors = sorted({text_of(path / "scaling_governor") or "" for path in policies} - {""})
    drivers = sorted({text_of(path / "scaling_driver") or "" for path in policies} - {""})
    it.values = {"cores": os.cpu_count(), "usable_cores": usable, "governors": governors, "drivers": drivers}
    clocked = f", governor {', '.join(governors)} ({', '.join(drivers)})" if governors else ""
    text = f"{usable} of {os.cpu_count()} cores{clocked}"
    if usable <= len(found.cards):
        it.warning(text, "a thread a card, and some beside: give the process more cores (taskset, cpuset, container)")
    elif "powersave" in governors and not set(drivers) <= set(SELF_GOVERNED) and found.cards:
        it.warning(text, "cpupower frequency-set -g performance: a slow core keeps a card waiting between launches")
    else:
        it.ok(text)
    _nodes(it, system, found)
    return it


def _nodes(it: Check, system: System, found: Cards) -> None:
    nodes = sorted((system.sys / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    of_node = defaultdict(list)
    for card in found.cards:
        node = number_of(card.folder / "numa_node") if card.folder else None
        if node is not None and node >= 0:
            of_node[node].append(card.index)
    it.values["numa_nodes"] = {node.name[4:]: of_node.get(int(node.name[4:]), []) for node in nodes}
    if of_node:
        it.ok("; ".join(f"NUMA node {node}: {listed(cards)}" for node, cards in sorted(of_node.items())))
    elif nodes:
        it.ok(f"{len(nodes)} NUMA node{'s' if len(nodes) > 1 else ''}")
    if len(nodes) > 1 and found.cards and number_of(system.proc / "sys/kernel/numa_balancing"):
        advice = "sysctl kernel.numa_balancing=0: moving pages about stops threads for a while"
        it.warning("the kernel moves memory between NUMA nodes by itself", advice)
