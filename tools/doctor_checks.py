"""What `rocline doctor` is made of: a machine as files, limits and cards, and checks that say what they found there."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rocline.hip_kernels.driver import Device, devices
from rocline.hip_kernels.runtime import HipError, check, hip

GIB = 1 << 30
AMD_VENDOR = "0x1002"  # of graphics cards; PCI's numbers as /sys writes them
CARD_CLASSES = ("0x03", "0x12")  # display controllers, processing accelerators
BRIDGE_CLASSES = ("0x0604",)

Verdict = Literal["not applicable", "ok", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = ("not applicable", "ok", "warning", "problem")  # each counts before those to its left


class Entry(NamedTuple):
    """One thing that a check found, and what to do about it; empty if nothing."""

    verdict: Verdict
    found: str
    advice: str = ""


@dataclass
class Check:
    """One row of the doctor's table, filled in entry by entry; the worst entry is its verdict.

    values  JSON-ready data, sizes in bytes and rates in bytes per second unless the name says else
    """

    name: str
    entries: list[Entry] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return worst(entry.verdict for entry in self.entries)

    def not_applicable(self, found: str) -> None:
        self.entries.append(Entry("not applicable", found))

    def ok(self, found: str) -> None:
        self.entries.append(Entry("ok", found))

    def warning(self, found: str, advice: str) -> None:
        """It may work, or not well."""
        self.entries.append(Entry("warning", found, advice))

    def problem(self, found: str, advice: str) -> None:
        """It will not work."""
        self.entries.append(Entry("problem", found, advice))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": [entry._asdict() for entry in self.entries],
            "values": self.values,
        }


def worst(verdicts: Any) -> Verdict:
    """Of any number; "not applicable" of none."""
    return max(verdicts, key=VERDICTS.index, default="not applicable")


@dataclass(frozen=True)
class System:
    """A machine as the checks see it; tests give folders of their own making.

    sys, proc, dev  what Linux mounts there
    limit           (soft, hard) of a resource, as resource.getrlimit
    """

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit

    def amd_cards(self) -> list[Path]:
        """Folders of the AMD graphics cards on the PCI bus, whether or not HIP can use them."""
        return [folder for folder in sorted((self.sys / "bus/pci/devices").glob("*")) if is_amd(folder, CARD_CLASSES)]


def is_amd(folder: Path, classes: tuple[str, ...]) -> bool:
    """Whether a folder of /sys is an AMD device of one of these classes."""
    return text_of(folder / "vendor") == AMD_VENDOR and (text_of(folder / "class") or "").startswith(classes)


def text_of(path: Path) -> str | None:
    """What a file of /sys or /proc says, without blanks around; None where there is no such file, or not for us."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> int | None:
    """A file that holds one whole number, as text_of."""
    try:
        return int(text_of(path) or "", 0)
    except ValueError:
        return None


@dataclass(frozen=True)
class Card:
    """One GPU that HIP shows.

    free_bytes  of the whole card, as HIP tells it
    folder      of the AMD card in /sys; None where the runtime does not name one, as the tests' doubles of HIP do not
    ecc         whether it keeps a part of its memory for error correction
    """

    index: int
    name: str
    arch: str
    total_bytes: int
    free_bytes: int
    folder: Path | None = None
    ecc: bool = False
    is_host: bool = False

    def __str__(self) -> str:
        return f"card {self.index}"


@dataclass(frozen=True)
class Cards:
    """What HIP shows. why_none: why there is no card; empty if there is one."""

    cards: tuple[Card, ...] = ()
    devices: tuple[Device, ...] = ()
    why_none: str = ""


def find_cards(system: System) -> Cards:
    """Loads HIP."""
    try:
        found = devices()
        return Cards(tuple(_card(system, device) for device in found), found)
    except HipError as error:
        return Cards(why_none=str(error))


def _card(system: System, device: Device) -> Card:
    properties = check(hip().hipGetDeviceProperties(device.index), f"hipGetDeviceProperties of {device}")
    address = f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0"
    folder = system.sys / "bus/pci/devices" / address
    return Card(
        device.index,
        device.name,
        device.arch,
        device.total_bytes,
        device.memory().free_bytes,
        folder if is_amd(folder, CARD_CLASSES) else None,
        bool(properties.ECCEnabled),
        device.is_host,
    )


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB or not n_bytes else f"{n_bytes / (1 << 20):.4g} MiB"


def gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def listed(cards: Any) -> str:
    """As "card 3" or "cards 0-2, 5"."""
    numbers = sorted(card if isinstance(card, int) else card.index for card in cards)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"card{'s' if len(numbers) > 1 else ''} {words}"
