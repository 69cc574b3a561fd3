"""The doctor on the PCI bus, as /sys tells of it: each card's link, and set-up that breaks or slows copies."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rocline.tools.doctor_checks import (
    BRIDGE_CLASSES,
    Card,
    Cards,
    Check,
    System,
    gib,
    is_amd,
    listed,
    number_of,
    text_of,
)

PLAIN_BYTES = 256  # of a device's registers; what is beyond, only root may read
ACS_CAPABILITY, ACS_REQUEST_REDIRECT = 0x0D, 1 << 2


class Link(NamedTuple):
    width: int
    gt_per_s: float

    def __str__(self) -> str:
        return f"x{self.width} at {self.gt_per_s:g} GT/s"


def links(found: Cards) -> Check:
    """Each card's PCIe link now, and the most that the card can do."""
    it = Check("PCIe links")
    ports = [(card, _port(card.folder)) for card in found.cards if card.folder]
    both = [(card, _link(port, "current"), _link(port, "max")) for card, port in ports]
    it.values["cards"] = [{"card": c.index, "now": n._asdict(), "most": m._asdict()} for c, n, m in both]
    for card, now, most in both:
        if now.width < most.width:
            advice = "seat the card anew; look at the slot's lanes, its riser, and at bifurcation in the BIOS"
            it.warning(f"{card}: {now}, it can do {most}", advice)
        elif now.gt_per_s < most.gt_per_s:
            advice = "an idle card may slow its link: if `peer copies` is slow too, see the slot's speed in the BIOS"
            it.warning(f"{card}: {now}, it can do {most}", advice)
    good = [(card, now) for card, now, most in both if now == most]
    for link in dict.fromkeys(now for _, now in good):
        it.ok(f"{listed(card for card, now in good if now == link)}: {link}, the most that they can do")
    if not both:
        it.not_applicable("no AMD card in /sys")
    return it


def _port(folder: Path) -> Path:
    """Where the card meets the slot: the uppermost of the bridges that AMD's larger cards bring along, or the card.

    The link between such a bridge and its GPU is inside the card, and always wide.
    """
    port = folder.resolve()
    while is_amd(port.parent, BRIDGE_CLASSES):
        port = port.parent
    return port


def _link(port: Path, when: str) -> Link:
    """A speed reads "16.0 GT/s PCIe", or "Unknown"; 0 is what is not known."""
    speed = (text_of(port / f"{when}_link_speed") or "").partition(" ")[0]
    is_number = speed.replace(".", "", 1).isdigit()
    return Link(number_of(port / f"{when}_link_width") or 0, float(speed) if is_number else 0.0)


def settings(system: System, found: Cards) -> Check:
    """What of the machine's set-up is known to break or slow copies between cards: BAR size, IOMMU, ACS."""
    it = Check("PCIe settings")
    folders = {card: card.folder for card in found.cards if card.folder}
    if not folders:
        it.not_applicable("no AMD card in /sys")
        return it
    _bars(it, folders)
    _iommu(it, system, folders)
    _acs(it, folders)
    return it


def _bars(it: Check, folders: dict[Card, Path]) -> None:
    bars = {card: _bar_bytes(folder) for card, folder in folders.items()}
    it.values["bar_bytes"] = {str(card.index): n_bytes for card, n_bytes in bars.items()}
    if small := [card for card, n_bytes in bars.items() if n_bytes < card.total_bytes]:
        text = f"{listed(small)}: the bus shows {gib(bars[small[0]])} of {gib(small[0].total_bytes)}"
        it.warning(text, "switch on Above 4G Decoding and Resizable BAR in the BIOS: direct copies want all of it")
    else:
        it.ok("the bus shows all of each card's memory (large BAR)")


def _bar_bytes(folder: Path) -> int:
    """Size of the card's first region: its memory, as far as others see it."""
    words = (text_of(folder / "resource") or "").split()[:2]
    start, end = (int(word, 16) for word in words) if len(words) == 2 else (0, 0)
    return end - start + 1 if end > start else 0


def _iommu(it: Check, system: System, folders: dict[Card, Path]) -> None:
    units = sorted(path.name for path in (system.sys / "class/iommu").glob("*"))
    words = [w for w in (text_of(system.proc / "cmdline") or "").split() if w.partition("=")[0].endswith("iommu")]
    kinds = {card: text_of(folder / "iommu_group/type") for card, folder in folders.items()}
    it.values |= {"iommu": units, "iommu_words": words, "iommu_types": {str(c.index): k for c, k in kinds.items()}}
    asked = " ".join(words) or "nothing about it in the kernel's command line"
    if not units:
        it.ok("no IOMMU in use")
    elif translated := [card for card, kind in kinds.items() if kind and kind != "identity"]:
        text = f"{listed(translated)}: addresses go through the IOMMU ({asked})"
        it.warning(text, "boot with iommu=pt: without, copies between cards may be slow, or wrong")
    else:
        it.ok(f"the IOMMU passes the cards' addresses as they are ({asked})")


def _acs(it: Check, folders: dict[Card, Path]) -> None:
    """Bridges that send up to the processor what one card tells another."""
    above = {parent for folder in folders.values() for parent in folder.resolve().parents}
    states = {bridge.name: _redirects(bridge / "config") for bridge in above if (bridge / "config").is_file()}
    it.values["acs_redirects"] = dict(sorted(states.items()))
    if redirecting := sorted(name for name, state in states.items() if state):
        advice = "if `peer copies` is slow and no virtual machine needs it, switch ACS off in the BIOS"
        it.warning(f"ACS redirects copies between cards at {', '.join(redirecting)}", advice)
    elif states and None not in states.values():
        it.ok("no bridge redirects copies between cards (ACS)")
    else:
        it.not_applicable("ACS: only root may read it")


def _redirects(config: Path) -> bool | None:
    """Whether a bridge's ACS sends requests upwards; None where its registers may not be read."""
    try:
        space = config.read_bytes()
    except OSError:
        return None
    if len(space) <= PLAIN_BYTES:
        return None
    at = PLAIN_BYTES
    while at:  # a list: number of the capability in 16 bits, place of the next in the uppermost 12
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return bool(int.from_bytes(space[at + 6 : at + 8], "little") & ACS_REQUEST_REDIRECT)
        following = header >> 20
        at = following if following > at else 0
    return False
