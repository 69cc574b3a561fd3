"""A tree like /sys with cards in it, which a test may change as it likes."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
SENSORS = {
    "gpu_busy_percent": 0,
    "hwmon/hwmon4/power1_average": 17_000_000,
    "hwmon/hwmon4/temp1_label": "edge",
    "hwmon/hwmon4/temp1_input": 31_000,
    "hwmon/hwmon4/temp2_label": "junction",
    "hwmon/hwmon4/temp2_input": 34_000,
    "hwmon/hwmon4/temp3_label": "mem",
    "hwmon/hwmon4/temp3_input": 41_000,
    "hwmon/hwmon4/freq1_label": "sclk",
    "hwmon/hwmon4/freq1_input": 32_000_000,
    "hwmon/hwmon4/freq2_label": "mclk",
    "hwmon/hwmon4/freq2_input": 96_000_000,
    "ras/umc_err_count": "ue: 0\nce: 0",
}


class FakeCard:
    def __init__(self, sysfs: Path, name: str, pci_id: str, total_bytes: int, driver: str) -> None:
        """The PCI device's folder, and the DRM device that points to it."""
        self.pci_id, self.total_bytes = pci_id, total_bytes
        self.folder = sysfs / "devices" / "pci0000:00" / pci_id
        self.folder.mkdir(parents=True)
        self.write("uevent", f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_SLOT_NAME={pci_id}")
        drm = sysfs / "class" / "drm"
        (drm / name).mkdir(parents=True)
        (drm / name / "device").symlink_to(self.folder)
        (drm / f"{name}-DP-1").mkdir()  # a connector

    def write(self, file: str, content: object) -> None:
        self._put(file, f"{content}\n".encode())

    def _put(self, file: str, data: bytes) -> None:
        """In one piece, and in the same file, which readers hold open. No shorter than before: blanks fill it up."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        os.close(fd)

    def use(self, n_bytes: float) -> None:
        self.write("mem_info_vram_used", int(n_bytes))

    def throttle(self, bits: int, version: int = 3) -> None:
        """gpu_metrics of version 1.3, with these bits of why the card is slowed down."""
        metrics = struct.pack("<HBB", 120, 1, version).ljust(112, b"\xff") + struct.pack("<Q", bits)
        self._put("gpu_metrics", metrics)

    def remove(self, *files: str) -> None:
        """Files of it; without any, all of the card. Who holds one open finds nothing in it: sysfs says ENODEV."""
        paths = [self.folder / file for file in files] or [path for path in self.folder.rglob("*") if path.is_file()]
        for path in paths:
            os.truncate(path, 0)
            path.unlink()
        if not files:
            shutil.rmtree(self.folder)


class FakeSysfs:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class" / "drm").mkdir(parents=True)
        self.cards: list[FakeCard] = []

    def add(
        self,
        pci_id: str = "",
        used_bytes: float = GIB,
        total_bytes: int = 48 * GIB,
        driver: str = "amdgpu",
        without: Sequence[str] = (),
    ) -> FakeCard:
        """A card with every file but those."""
        number = len(self.cards)
        card = FakeCard(self.root, f"card{number}", pci_id or f"0000:{number + 3:02x}:00.0", total_bytes, driver)
        self.cards.append(card)
        if driver == "amdgpu":
            files = {"mem_info_vram_total": total_bytes, "mem_info_vram_used": int(used_bytes)} | SENSORS
            for file, content in files.items():
                if file not in without:
                    card.write(file, content)
        return card
