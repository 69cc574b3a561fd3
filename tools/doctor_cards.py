"""The doctor on cards as HIP and Linux tell of them: kinds, memory, who else uses them. Nothing runs on them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocline.tools.doctor_checks import GIB, Card, Cards, Check, System, gib, listed, number_of, text_of

ARCH = "gfx1100"
WANTED_CARDS = 8
CARD_BYTES = 48 * GIB
ECC_CARD_BYTES = CARD_BYTES * 15 // 16  # what inline error correction leaves of it
SLACK_BYTES = GIB // 2  # two readings of the same memory may differ by so much
OTHERS_BYTES = 256 << 20  # less is a desktop's, or a runtime's own
SERVING_BYTES = 16 * GIB  # a card with as much is for work, and no part of a processor


def cards(system: System, found: Cards, must_serve: bool) -> Check:
    """How many cards of which kind; none is a problem for whoever wants to serve from them."""
    it = Check("cards")
    it.values["cards"] = [_values(card) for card in found.cards]
    if not found.cards:
        there = [folder.name for folder in system.amd_cards()]
        it.values |= {"why_none": found.why_none, "amd_cards_on_the_bus": there}
        _none(it, system, found.why_none, there, must_serve)
        return it
    for (name, arch, total), n_cards in Counter((c.name, c.arch, gib(c.total_bytes)) for c in found.cards).items():
        alike = listed(c for c in found.cards if (c.name, c.arch, gib(c.total_bytes)) == (name, arch, total))
        it.ok(f"{n_cards} x {name or 'no name'}, {arch}, {total} each: {alike}")
    _kinds(it, found.cards)
    if len(found.cards) < WANTED_CARDS:
        it.ok(f"{len(found.cards)} of the {WANTED_CARDS} that rocline is written for; `plan` below says what fits")
    return it


def _values(card: Card) -> dict[str, Any]:
    return {
        "index": card.index,
        "name": card.name,
        "arch": card.arch,
        "total_bytes": card.total_bytes,
        "free_bytes": card.free_bytes,
        "ecc": card.ecc,
        "pci": card.folder.name if card.folder else None,
    }


def _none(it: Check, system: System, why: str, there: list[str], must_serve: bool) -> None:
    if not must_serve:
        it.not_applicable("no GPU: rocline serves on the CPU here (`rocline demo`), and not with --device hip")
        return
    seen = f"; on the PCI bus: {', '.join(there)}" if there else ""
    what, _, cure = why.partition("; ")
    kfd = system.dev / "kfd"
    if "exactly one libamdhip64" in why:
        advice = "see `HIP runtime`"
    elif there and not kfd.exists():
        advice = f"load the amdgpu driver; in a container, pass {kfd} and /dev/dri to it"
    elif there and not os.access(kfd, os.R_OK | os.W_OK):
        advice = f"add this user to the groups that own {kfd} (render, video), and log in again"
    else:
        advice = cure or "see what rocminfo says, or use the CPU"
    it.problem(f"{what}{seen}", advice)


def _kinds(it: Check, found: tuple[Card, ...]) -> None:
    if others := [card for card in found if card.arch != ARCH]:
        archs = ", ".join(sorted({card.arch for card in others}))
        it.warning(
            f"{listed(others)}: {archs}, not {ARCH}",
            f"nothing was tuned or budgeted for {archs}; let `kernel` below say whether it is right there",
        )
    ours = [card for card in found if card.arch == ARCH]
    if small := [card for card in ours if card.total_bytes < ECC_CARD_BYTES - SLACK_BYTES]:
        it.warning(
            f"{listed(small)}: {ARCH} of less than {gib(CARD_BYTES)}, so no W7900D",
            "`plan` below says what fits; the release wants seven cards of 48 GiB or more",
        )
    if reserved := [c for c in ours if c not in small and c.total_bytes < CARD_BYTES - GIB]:
        ecc = "on" if reserved[0].ecc else "not told of"
        left = f"{gib(reserved[0].total_bytes)} of {gib(CARD_BYTES)}"
        it.ok(f"{listed(reserved)}: {left}; inline error correction keeps a sixteenth (ECC is {ecc})")
    kinds = {(card.arch, card.name) for card in found}
    totals = [card.total_bytes for card in found]
    if len(kinds) > 1 or max(totals) - min(totals) > GIB:
        it.warning(
            "not all cards are alike",
            "the first ones serve, and the plan gives each as much as the smallest has: choose cards, and their order, "
            "with HIP_VISIBLE_DEVICES",
        )


def free_memory(found: Cards) -> Check:
    """What is free on each card, by HIP and by the kernel: the plan counts on HIP's word."""
    it = Check("free memory")
    if not found.cards:
        it.not_applicable("no card")
        return it
    readings: list[dict[str, int | None]] = []
    for card in found.cards:
        total, used = (_vram(card, name) for name in ("total", "used"))
        kernel_free = total - used if total is not None and used is not None else None
        reading = {"card": card.index, "hip_free_bytes": card.free_bytes, "kernel_free_bytes": kernel_free}
        readings.append(reading | {"hip_total_bytes": card.total_bytes, "kernel_total_bytes": total})
        if kernel_free is None:
            continue
        both = f"{card}: free {gib(card.free_bytes)} by HIP, {gib(kernel_free)} by the kernel"
        if card.free_bytes > kernel_free + SLACK_BYTES:
            it.problem(both, "the plan would count on memory that is taken: end what else uses the card")
        elif card.free_bytes < kernel_free - SLACK_BYTES:
            it.warning(both, "something was freed just now, or HIP hides some: run this again")
    it.values["cards"] = readings
    least = min(found.cards, key=lambda card: card.free_bytes)
    agreed = [reading["card"] for reading in readings if reading["kernel_free_bytes"] is not None]
    beside = f"the kernel's word beside HIP's on {listed(agreed)}" if agreed and not it.entries else "by HIP alone"
    it.ok(f"least {gib(least.free_bytes)} of {gib(least.total_bytes)}, on {least}; {beside}")
    return it


def _vram(card: Card, what: str) -> int | None:
    return number_of(card.folder / f"mem_info_vram_{what}") if card.folder else None


def other_processes(system: System, found: Cards) -> Check:
    """Processes that hold memory of a card, as the kernel's compute driver lists them."""
    it = Check("other processes")
    root = system.sys / "class/kfd/kfd"
    if not found.cards or not (root / "proc").is_dir():
        it.not_applicable("no card" if not found.cards else f"no {root / 'proc'}")
        return it
    of_gpu = {f"vram_{gpu_id}": address for gpu_id, address in _gpu_ids(root / "topology/nodes")}
    by_address = {card.folder.name: card for card in found.cards if card.folder}
    held: list[dict[str, Any]] = []
    for folder in sorted((root / "proc").iterdir()):
        for file in sorted(folder.glob("vram_*")):
            n_bytes, card = number_of(file) or 0, by_address.get(of_gpu.get(file.name, ""))
            if n_bytes >= OTHERS_BYTES and card and folder.name != str(os.getpid()):
                name = text_of(system.proc / folder.name / "comm")
                held.append({"pid": int(folder.name), "name": name, "card": card.index, "bytes": n_bytes})
    it.values["processes"] = held
    for line in held:
        text = f"{line['name'] or 'a process'} ({line['pid']}) holds {gib(line['bytes'])} of card {line['card']}"
        it.warning(text, "end it, or leave its card out: serving wants whole cards")
    if not held:
        it.ok("none")
    return it


def _gpu_ids(nodes: Path) -> Iterator[tuple[int, str]]:
    """(the driver's number of a GPU, its PCI address)."""
    for node in sorted(nodes.glob("*")):
        gpu_id = number_of(node / "gpu_id")
        lines = (line.split() for line in (text_of(node / "properties") or "").splitlines())
        properties = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
        if gpu_id:
            where = properties.get("location_id", 0)  # bus, device, function: 8, 5 and 3 bits
            bus, device, function = where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7
            yield gpu_id, f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


def can_serve(system: System, found: Cards, has_rocm: bool) -> bool:
    """Whether this machine looks as if it was to serve from cards: then having none that work is a problem."""
    there = system.amd_cards()
    return bool(found.cards or (has_rocm and there) or any(map(_is_large, there)))


def _is_large(folder: Path) -> bool:
    return (number_of(folder / "mem_info_vram_total") or 0) >= SERVING_BYTES
