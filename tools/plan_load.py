"""What `rocline plan` says of loading: bytes from the checkpoint to each card and to the host, time, host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.engine.weights import NOT_LOADED, EngramHome
from rocline.pipeline.placement import CHOICE_RATES, Placement
from rocline.pipeline.plan import GIB, Plan
from rocline.tools.doctor_disk import LEAST_BYTES, disk
from rocline.tools.doctor_host import SPARE_BYTES

COPY_BYTES_PER_S = CHOICE_RATES.hop_bytes_per_s  # assumed: from host memory to a card over PCIe
_SIDE_PARTS = ("attn_norm.", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")


@dataclass(frozen=True)
class Disk:
    """A rate of reading, and where it is from. found: of a measurement, in words; bytes_per_s is None if it failed."""

    bytes_per_s: float | None
    source: str
    found: str | None = None


@dataclass(frozen=True)
class CardLoad:
    """Bytes that are read for one card: what goes to it, and Engram's tables of its layers, which stay on the host."""

    card_bytes: int
    engram_bytes: int

    def seconds(self, disk_bytes_per_s: float, engram: EngramHome) -> float:
        """What is copied to the card is read meanwhile, the slower of the two takes its time; tables are only read."""
        read_bytes = self.engram_bytes if engram == "ram" else 0
        return self.card_bytes / min(disk_bytes_per_s, COPY_BYTES_PER_S) + read_bytes / disk_bytes_per_s


def measured(folder: Path) -> Disk:
    """The rate of the checkpoint's disk, as `rocline doctor` measures it."""
    check = disk(folder)
    (entry,), values = check.entries, check.values
    timed = values.get("read_bytes", 0) >= LEAST_BYTES
    is_whole = timed and (folder / values["file"]).stat().st_blocks * 512 >= values["read_bytes"]  # no holes
    return Disk(values["bytes_per_s"] if is_whole else None, "measured", entry.found)


def card_loads(config: ModelConfig, placement: Placement) -> list[CardLoad]:
    """What engine/weights.py is asked for by each card: layers, sides of others' layers, embedding, norm and head."""
    of_layer, of_side, of_table, whole = Counter[int](), Counter[int](), Counter[int](), Counter[str]()
    for name, spec in expected_tensors(config).items():
        if spec.component in NOT_LOADED:
            continue
        if spec.layer is None:
            whole[name] += spec.n_bytes
        elif ".engram.embed." in name:
            of_table[spec.layer] += spec.n_bytes
        else:
            of_layer[spec.layer] += spec.n_bytes
            if name.removeprefix(f"layers.{spec.layer}.").startswith(_SIDE_PARTS):
                of_side[spec.layer] += spec.n_bytes
    (first, _), (last, _) = placement.path[0], placement.path[-1]
    loads = []
    for device in range(placement.n_devices):
        visits = [visit for stage in placement.stages if stage.device == device for visit in stage.visits]
        layers = {layer for visit in visits for layer in visit.layers}
        sides = {side for visit in visits for side in visit.kv_sides} - layers
        n_bytes = sum(of_layer[layer] for layer in layers) + sum(of_side[side] for side in sides)
        n_bytes += whole["norm.weight"]
        n_bytes += whole["embed.weight"] if placement.stages[first].device == device else 0
        n_bytes += whole["head.weight"] if placement.stages[last].device == device else 0
        loads.append(CardLoad(n_bytes, sum(of_table[layer] for layer in layers)))
    return loads


def load_report(found: Plan, disk: Disk | None) -> dict[str, Any]:
    """JSON-ready. Seconds are None where no rate of the disk is known."""
    loads, rate = card_loads(found.model.config, found.placement), disk and disk.bytes_per_s
    tables = sum(load.engram_bytes for load in loads)

    def of(engram: EngramHome) -> dict[str, Any]:
        held = tables if engram == "ram" else 0
        return {
            "read_bytes": sum(load.card_bytes for load in loads) + held,
            "seconds": sum(load.seconds(rate, engram) for load in loads) if rate else None,
            "host_bytes": held + SPARE_BYTES,
        }

    return {
        "disk": {"bytes_per_s": rate, "source": disk.source, "found": disk.found} if disk else None,
        "copy_bytes_per_s": COPY_BYTES_PER_S,
        "engram_bytes": tables,
        "engram": {home: of(home) for home in get_args(EngramHome)},
        "devices": [
            {
                "card_bytes": load.card_bytes,
                "engram_bytes": load.engram_bytes,
                "seconds": load.seconds(rate, "ram") if rate else None,
            }
            for load in loads
        ],
    }


def load_rows(load: dict[str, Any]) -> list[tuple[str, ...]]:
    """A table: what is read for each card."""
    rows = [("device", "to the card", "Engram to the host", "seconds")]
    for device, each in enumerate(load["devices"]):
        rows.append((str(device), _gib(each["card_bytes"]), _gib(each["engram_bytes"]), _seconds(each["seconds"])))
    ram = load["engram"]["ram"]
    card_bytes = ram["read_bytes"] - load["engram_bytes"]
    return [*rows, ("sum", _gib(card_bytes), _gib(load["engram_bytes"]), _seconds(ram["seconds"]))]


def rate_line(load: dict[str, Any]) -> str:
    """What the seconds rest on."""
    disk = load["disk"]
    if disk and disk["bytes_per_s"]:
        rate = f"{disk['bytes_per_s'] / GIB:.2f} GiB/s, {disk['source']}"
        then = f"{load['copy_bytes_per_s'] / 1e9:g} GB/s, assumed"
        return f"Seconds: at least, of reading at {rate}, and then copying at {then}, card after card."
    if disk:  # measured, in vain
        return f"No seconds: {disk['found']}. Give --disk-gib-s X."
    return "No seconds without the disk's rate: give --disk-gib-s X, or --measure-disk with --model."


def host_lines(load: dict[str, Any]) -> Iterable[str]:
    """What the host needs, by where Engram's tables are."""
    for home, each in load["engram"].items():
        parts = [f"reads {_gib(each['read_bytes'])} GiB"]
        if each["seconds"] is not None:
            parts[0] += f" in {each['seconds']:,.0f} s"
        parts.append(f"wants {_gib(each['host_bytes'])} GiB of host memory")
        if home == "mmap":
            parts.append("reads table rows from the disk while it serves")
        yield f"--engram {home}: {', '.join(parts)}."


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f}"
