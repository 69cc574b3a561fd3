"""Machines made of folders, for the doctor to look at."""

import resource

from rocline.tools.doctor_checks import GIB, Card, Cards, Check, System

NAME, ARCH = "AMD Radeon PRO W7900D", "gfx1100"
USED_BYTES = 64 << 20  # of each card, by its driver


class Machine:
    """A /sys and a /proc with eight good cards, each behind its own bridges, which tests then spoil."""

    def __init__(self, root):
        self.root, self.limits = root, {}
        self.write("proc/meminfo", "MemTotal: 400000000 kB\nMemAvailable: 390000000 kB\nSwapTotal: 0 kB\n")
        self.write("proc/cmdline", "root=/dev/sda1 iommu=pt quiet secret=42")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        self.write("sys/class/iommu/ivhd0/name", "")
        for node in range(2):
            self.write(f"sys/devices/system/node/node{node}/cpulist", "")
        for index in range(8):
            self.add_card(index)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text) if isinstance(text, bytes) else file.write_text(f"{text}\n")

    def folder(self, index):
        bus = 16 * index + 3
        parts = (
            f"0000:00:{index:02x}.1",
            f"0000:{bus - 2:02x}:00.0",
            f"0000:{bus - 1:02x}:00.0",
            f"0000:{bus:02x}:00.0",
        )
        return "sys/devices/pci0000:00/" + "/".join(parts)

    def slot(self, index):
        """The bridge of the card that sits in the slot."""
        return self.folder(index).rsplit("/", 2)[0]

    def add_card(self, index, total=48 * GIB):
        card = self.folder(index)
        downstream, upstream, root_port = (card.rsplit("/", n)[0] for n in (1, 2, 3))
        for folder, vendor, kind in (
            (root_port, "0x1022", "0x060400"),  # the processor's, not the card's
            (upstream, "0x1002", "0x060400"),
            (downstream, "0x1002", "0x060400"),
            (card, "0x1002", "0x030000"),
        ):
            self.write(f"{folder}/vendor", vendor)
            self.write(f"{folder}/class", kind)
            self.write(f"{folder}/config", bytes(256))
            for when in ("current", "max"):
                self.write(f"{folder}/{when}_link_width", "16")
                self.write(f"{folder}/{when}_link_speed", "16.0 GT/s PCIe")
        self.write(f"{card}/mem_info_vram_total", total)
        self.write(f"{card}/mem_info_vram_used", USED_BYTES)
        self.write(f"{card}/resource", f"{1 << 40:#018x} {(1 << 40) + 64 * GIB - 1:#018x} 0x14220c")
        self.write(f"{card}/numa_node", index // 4)
        self.write(f"{card}/iommu_group/type", "identity")
        link = self.root / "sys/bus/pci/devices" / card.rsplit("/", 1)[1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / card)

    @property
    def system(self):
        def limit(which):
            return self.limits.get(which, (resource.RLIM_INFINITY,) * 2)

        return System(self.root / "sys", self.root / "proc", self.root / "dev", {}, limit)

    def cards(self, **changed):
        """As HIP shows them; changed: by index, what is other than it should be."""
        return Cards(
            tuple(
                Card(
                    **{
                        "index": index,
                        "name": NAME,
                        "arch": ARCH,
                        "total_bytes": 48 * GIB,
                        "free_bytes": 48 * GIB - USED_BYTES,
                        "folder": self.root / "sys/bus/pci/devices" / self.folder(index).rsplit("/", 1)[1],
                    }
                    | changed.get(f"c{index}", {})
                )
                for index in range(8)
            )
        )


def said(check: Check, verdict):
    """All that a check says with this verdict, and that it is the check's."""
    assert check.verdict == verdict, check.entries
    return " | ".join(f"{entry.found} -> {entry.advice}" for entry in check.entries if entry.verdict == verdict)
