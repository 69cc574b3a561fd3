"""What `rocline vram` takes of a core, by its own account, over eight cards made of files and of the CPU double.

PYTHONPATH=.:tests/doubles python tests/doubles/vram_cost.py [SECONDS]
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from fake_sysfs import FakeSysfs
from hip_doubles import build_cpu_double
from rich.console import Console

from rocline.hip_kernels.driver import Device, devices
from rocline.pipeline.card_watch import CardWatch
from rocline.pipeline.sysfs_cards import cards
from rocline.tools.vram import HipCard
from rocline.tools.vram_session import Session

N_CARDS = 8


def main(folder: Path, seconds: float) -> None:
    os.environ["ROCM_PATH"] = str(build_cpu_double(folder / "double"))
    sysfs = FakeSysfs(folder / "sys")
    for _ in range(N_CARDS):
        sysfs.add().throttle(1)
    shown = cards(sysfs.root)

    def hip_free(device: Device) -> Callable[[], int]:
        return lambda: device.memory().free_bytes

    makers: dict[str, Callable[[], list[CardWatch]]] = {
        "sysfs alone": lambda: [CardWatch(card, 0, print) for card in shown],
        "sysfs and HIP": lambda: [CardWatch(c, 0, print, hip_free(d)) for c, d in zip(shown, devices(), strict=True)],
        "HIP alone": lambda: [CardWatch(HipCard(device, str(device.index)), 0, print) for device in devices()],
    }
    for name, make in makers.items():
        with open(folder / "vram.csv", "w", encoding="utf-8", newline="") as file:
            session = Session(make(), 0.1, print, csv_file=file, keeps_curves=True)
            session.watch(threading.Event(), seconds, Console(file=sys.stderr, force_terminal=False))
        print(f"{name}: {session.closing_line()}", flush=True)
    waiting = Session([], 0.1, print)
    waiting.watch(threading.Event(), seconds, Console(file=sys.stderr, force_terminal=False))
    print(f"waking up alone: {waiting.closing_line()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name), float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
