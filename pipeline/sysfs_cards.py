"""Cards as the amdgpu driver shows them in sysfs: memory of the whole card, whoever uses it, and sensors.

Needs neither HIP nor torch, and takes no memory of a card. The files are the driver's documented ones
(docs.kernel.org, gpu/amdgpu); a kernel or card that lacks some of them is no error, their figures are None.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from errno import EIO
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

SYSFS = Path("/sys")
_MOST_BYTES, _NUMBER_BYTES = 4096, 64  # of a file of sysfs; of a number in one
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


class Sensors(NamedTuple):
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
    """One card. Its files stay open; not for two threads at once.

    pci_id  as sysfs spells it, "0000:03:00.0"
    name    of its DRM device, "card1"
    """

    def __init__(self, folder: Path, pci_id: str, name: str) -> None:
        """folder: the PCI device's."""
        self.pci_id, self.name = pci_id, name
        self._used, self._total = _File(folder / "mem_info_vram_used"), _File(folder / "mem_info_vram_total")
        self._total_bytes = 0  # while it is not known
        self._busy, self._metrics = _File(folder / "gpu_busy_percent"), _File(folder / "gpu_metrics")
        self._errors = _File(folder / "ras" / "umc_err_count")
        hwmon = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder / "hwmon")
        self._temperatures, self._clocks = _by_label(hwmon, "temp"), _by_label(hwmon, "freq")
        self._levels = {clock: _File(folder / f"pp_dpm_{clock}") for clock in ("sclk", "mclk")}
        # Which of them is up to card and kernel.
        self._powers = (_File(hwmon / "power1_average"), _File(hwmon / "power1_input"))

    def memory(self) -> CardMemory:
        """Read now, and cheap. Raises OSError where the card has gone or its driver does not answer."""
        try:
            used_bytes = self._used.whole_number()
            self._total_bytes = self._total_bytes or self._total.whole_number()  # it stays what it is
        except OSError:
            self._total_bytes = 0  # but another card may come
            raise
        return CardMemory(used_bytes, self._total_bytes)

    def sensors(self) -> Sensors:
        """Read now. The card's firmware is asked for most of it: not for every look at the memory."""
        errors = dict(re.findall(r"(\w+): *(\d+)", _text(self._errors) or ""))
        return Sensors(
            busy_percent=_number(self._busy),
            power_w=next((w for file in self._powers if (w := _number(file, 1e-6)) is not None), None),
            junction_c=_number(self._temperatures.get("junction"), 1e-3),
            memory_c=_number(self._temperatures.get("mem"), 1e-3),
            sclk_mhz=self._mhz("sclk"),
            mclk_mhz=self._mhz("mclk"),
            throttle=_throttle(_bytes(self._metrics) or b""),
            ecc_corrected=int(errors["ce"]) if "ce" in errors else None,
            ecc_uncorrected=int(errors["ue"]) if "ue" in errors else None,
        )

    def _mhz(self, clock: str) -> float | None:
        """Measured, or else the level it is at, which pp_dpm marks with a star."""
        if (mhz := _number(self._clocks.get(clock), 1e-6)) is not None:
            return mhz
        level = re.search(r"(\d+) *[Mm]hz *\*", _text(self._levels[clock]) or "")
        return float(level[1]) if level else None


def cards(sysfs: Path = SYSFS) -> list[Card]:
    """Every card of the amdgpu driver that shows its memory, by PCI id. Others' are left out."""
    found = []
    for entry in sorted((sysfs / "class" / "drm").glob("card*")):
        folder = entry / "device"
        if not re.fullmatch(r"card\d+", entry.name):  # its connectors are there too
            continue
        told = dict(line.partition("=")[::2] for line in (_text(_File(folder / "uevent")) or "").splitlines())
        if told.get("DRIVER") == "amdgpu" and "PCI_SLOT_NAME" in told and (folder / "mem_info_vram_used").exists():
            found.append(Card(folder, told["PCI_SLOT_NAME"], entry.name))
    return sorted(found, key=lambda card: card.pci_id)


def card_at(among: Sequence[AnyCard], pci_id: str) -> AnyCard | None:
    """The card at a PCI id; its function may differ, which HIP calls 0 whatever it is."""
    here = [card for card in among if _slot(card.pci_id) == _slot(pci_id)]
    return here[0] if len(here) == 1 else None


def _slot(pci_id: str) -> str:
    return pci_id.lower().rpartition(".")[0]


def _by_label(hwmon: Path, kind: str) -> dict[str, _File]:
    """Files of a kind of sensor by what they measure: {"junction": .../temp2_input}."""
    labels = ((path, _text(_File(path))) for path in hwmon.glob(f"{kind}*_label"))
    return {label: _File(path.with_name(path.name.replace("_label", "_input"))) for path, label in labels if label}


def _throttle(metrics: bytes) -> str | None:
    if len(metrics) < _METRICS_BYTES or metrics[2:4] != b"\x01\x03":
        return None
    (bits,) = struct.unpack_from("<Q", metrics, _THROTTLE_AT)
    if bits == _NOT_KNOWN:
        return None
    groups = [name for at, name in enumerate(_THROTTLE_GROUPS) if bits >> 16 * at & 0xFFFF]
    return "+".join(groups) or "none"


class _File:
    """A file of the driver's, which stays open: read from its start it says what is so now.

    Opening it for each reading took four times as long.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = str(path), -1

    def read(self, most_bytes: int = _MOST_BYTES) -> bytes:
        """Raises OSError."""
        if self._fd >= 0:
            try:
                if content := os.pread(self._fd, most_bytes, 0):
                    return content
            except OSError:  # no such device, for ever: but its card may be back, with another file of this name
                pass
            self._close()
        self._fd = os.open(self._path, os.O_RDONLY)
        try:
            return os.pread(self._fd, most_bytes, 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def whole_number(self) -> int:
        """Raises OSError, where it holds none too."""
        content = self.read(_NUMBER_BYTES)
        try:
            return int(content)
        except ValueError:
            raise OSError(EIO, f"holds {content!r}, want a number", self._path) from None

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()


def _number(file: _File | None, scale: float = 1.0) -> float | None:
    """None where there is no such file or it holds no number, as while a card sleeps."""
    try:
        return None if file is None else round(file.whole_number() * scale, 3)
    except OSError:
        return None


def _text(file: _File) -> str | None:
    content = _bytes(file)
    return None if content is None else content.decode("utf-8", "replace").strip()


def _bytes(file: _File) -> bytes | None:
    try:
        return file.read()
    except OSError:
        return None
