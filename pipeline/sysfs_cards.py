"""Cards as the amdgpu driver shows them in sysfs: memory of the whole card, whoever uses it, and sensors.

Needs neither HIP nor torch, and takes no memory of a card. The files are the driver's documented ones
(docs.kernel.org, gpu/amdgpu); a kernel or card that lacks some of them is no error, their figures are None.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

SYSFS = Path("/sys")
# Of gpu_metrics, version 1.3, which RDNA 3 has: its size, and where the 64 throttle bits are that mean the same on
# every card. They come in groups of 16.
_METRICS_BYTES, _THROTTLE_AT = 120, 112
_THROTTLE_GROUPS = ("power", "current", "temperature", "other")
_NOT_KNOWN = (1 << 64) - 1


class HasPciId(Protocol):
    pci_id: str


AnyCard = TypeVar("AnyCard", bound=HasPciId)


class CardMemory(NamedTuple):
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Sensors:
    """What a card says of itself; None where it has no such file.

    throttle         groups of reasons for which it is slowed down, "power+temperature"; "none"
    ecc_corrected    errors of its memory since the driver was loaded, and those it could not correct
    """

    busy_percent: float | None
    power_w: float | None
    junction_c: float | None
    memory_c: float | None
    sclk_mhz: float | None
    mclk_mhz: float | None
    throttle: str | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None


class Card:
    """One card.

    pci_id  as sysfs spells it, "0000:03:00.0"
    name    of its DRM device, "card1"
    """

    def __init__(self, folder: Path, pci_id: str, name: str) -> None:
        """folder: the PCI device's."""
        self.pci_id, self.name = pci_id, name
        self._folder, self._used, self._total = folder, folder / "mem_info_vram_used", folder / "mem_info_vram_total"
        hwmon = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder / "hwmon")
        self._temperatures, self._clocks = _by_label(hwmon, "temp"), _by_label(hwmon, "freq")
        self._powers = (hwmon / "power1_average", hwmon / "power1_input")  # which of them is up to card and kernel

    def memory(self) -> CardMemory:
        """Read now, and cheap. Raises OSError where the card has gone or its driver does not answer."""
        return CardMemory(_whole_number(self._used), _whole_number(self._total))

    def sensors(self) -> Sensors:
        """Read now. The card's firmware is asked for most of it: not for every look at the memory."""
        errors = dict(re.findall(r"(\w+): *(\d+)", _text(self._folder / "ras" / "umc_err_count") or ""))
        return Sensors(
            busy_percent=_number(self._folder / "gpu_busy_percent"),
            power_w=next((w for path in self._powers if (w := _number(path, 1e-6)) is not None), None),
            junction_c=_number(self._temperatures.get("junction"), 1e-3),
            memory_c=_number(self._temperatures.get("mem"), 1e-3),
            sclk_mhz=self._mhz("sclk"),
            mclk_mhz=self._mhz("mclk"),
            throttle=_throttle(_bytes(self._folder / "gpu_metrics") or b""),
            ecc_corrected=int(errors["ce"]) if "ce" in errors else None,
            ecc_uncorrected=int(errors["ue"]) if "ue" in errors else None,
        )

    def _mhz(self, clock: str) -> float | None:
        """Measured, or else the level it is at, which pp_dpm marks with a star."""
        if (mhz := _number(self._clocks.get(clock), 1e-6)) is not None:
            return mhz
        level = re.search(r"(\d+) *[Mm]hz *\*", _text(self._folder / f"pp_dpm_{clock}") or "")
        return float(level[1]) if level else None


def cards(sysfs: Path = SYSFS) -> list[Card]:
    """Every card of the amdgpu driver that shows its memory, by PCI id. Others' are left out."""
    found = []
    for entry in sorted((sysfs / "class" / "drm").glob("card*")):
        folder = entry / "device"
        if not re.fullmatch(r"card\d+", entry.name):  # its connectors are there too
            continue
        told = dict(line.partition("=")[::2] for line in (_text(folder / "uevent") or "").splitlines())
        if told.get("DRIVER") == "amdgpu" and "PCI_SLOT_NAME" in told and (folder / "mem_info_vram_used").exists():
            found.append(Card(folder, told["PCI_SLOT_NAME"], entry.name))
    return sorted(found, key=lambda card: card.pci_id)


def card_at(among: Sequence[AnyCard], pci_id: str) -> AnyCard | None:
    """The card at a PCI id; its function may differ, which HIP calls 0 whatever it is."""
    here = [card for card in among if _slot(card.pci_id) == _slot(pci_id)]
    return here[0] if len(here) == 1 else None


def _slot(pci_id: str) -> str:
    return pci_id.lower().rpartition(".")[0]


def _by_label(hwmon: Path, kind: str) -> dict[str, Path]:
    """Files of a kind of sensor by what they measure: {"junction": .../temp2_input}."""
    labels = ((path, _text(path)) for path in hwmon.glob(f"{kind}*_label"))
    return {label: path.with_name(path.name.replace("_label", "_input")) for path, label in labels if label}


def _throttle(metrics: bytes) -> str | None:
    if len(metrics) < _METRICS_BYTES or metrics[2:4] != b"\x01\x03":
        return None
    (bits,) = struct.unpack_from("<Q", metrics, _THROTTLE_AT)
    if bits == _NOT_KNOWN:
        return None
    groups = [name for at, name in enumerate(_THROTTLE_GROUPS) if bits >> 16 * at & 0xFFFF]
    return "+".join(groups) or "none"


def _whole_number(path: Path) -> int:
    with open(path, "rb", buffering=0) as file:
        content = file.read(64)
    try:
        return int(content)
    except ValueError:
        raise OSError(EIO, f"holds {content!r}, want a number", str(path)) from None


def _number(path: Path | None, scale: float = 1.0) -> float | None:
    """None where there is no such file or it holds no number, as while a card sleeps."""
    try:
        return None if path is None else round(_whole_number(path) * scale, 3)
    except OSError:
        return None


def _text(path: Path) -> str | None:
    content = _bytes(path)
    return None if content is None else content.decode("utf-8", "replace").strip()


def _bytes(path: Path) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096)  # sysfs's longest
    except OSError:
        return None
