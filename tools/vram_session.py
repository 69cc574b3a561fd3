"""Cards watched for some time by `rocline vram`: the loop, and what is written and shown of it."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rocline.pipeline.card_watch import COARSE_S, GIB, CardWatch, Least, Look
from rocline.tools.vram_picture import Curve, clock
from rocline.tools.vram_server import NO_FIGURES, Server, ServerFigures

SHOW_S = 5.0  # drawing the table takes as much time as a hundred looks
WRITE_S = 1.0  # ten looks are written in hardly more time than one: what it takes is in the processor's caches then
COLUMNS = (
    "time_s", "elapsed_s", "card", "free_bytes", "used_bytes", "total_bytes", "hip_free_bytes", "busy_percent",
    "power_w", "junction_c", "memory_c", "sclk_mhz", "mclk_mhz", "throttle", "ecc_corrected_errors",
    "ecc_uncorrected_errors", "arena_high_water_bytes", "server_free_bytes", "frozen", "error",
)  # fmt: skip


class Session:
    """
    say       told at once what goes wrong
    began_s   time.time() of the first look; seconds from it to the last one
    curves    of each card, empty if keeps_curves is not set
    n_missed  looks that were due while an earlier one was not done
    """

    def __init__(
        self,
        watches: Sequence[CardWatch],
        interval_s: float,
        say: Callable[[str], None],
        server: Server | None = None,
        csv_file: TextIO | None = None,
        keeps_curves: bool = False,
    ) -> None:
        self.watches, self.curves = watches, [Curve() for _ in watches]
        self.began_s, self.seconds = time.time(), 0.0
        self.n_looks = self.n_missed = 0
        self._interval_s, self._say, self._server, self._keeps_curves = interval_s, say, server, keeps_curves
        self._csv_file, self._csv_failed = csv_file, False
        self._looks: list[tuple[float, list[Look]]] = []  # of all cards, with at_s; not written yet
        self._write_due_s = 0.0
        self._cpu_s = 0.0
        self._write([COLUMNS])

    @property
    def has_failed(self) -> bool:
        return self._csv_failed or any(watch.has_failed for watch in self.watches)

    def watch(self, stop: threading.Event, seconds: float | None, console: Console) -> None:
        """Look at all cards, once at least, until `stop` or for so long."""
        began_s, began_cpu_s, self.began_s = time.monotonic(), time.process_time(), time.time()
        shown_s, tick = 0.0, 0
        live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        with live or nullcontext(), ExitStack() as at_end:
            at_end.callback(self._write_looks)
            while True:
                self.look(time.monotonic() - began_s)
                if live and self.seconds >= shown_s:
                    live.update(self.table(), refresh=True)
                    shown_s = self.seconds + SHOW_S
                next_tick = int((time.monotonic() - began_s) / self._interval_s) + 1
                due_s = next_tick * self._interval_s
                self.n_missed, tick = self.n_missed + next_tick - tick - 1, next_tick
                if seconds is not None and due_s >= seconds:
                    break
                if stop.wait(max(0.0, began_s + due_s - time.monotonic())):
                    break
        self._cpu_s = time.process_time() - began_cpu_s

    def look(self, at_s: float) -> None:
        """At every card, at_s seconds after began_s. What is found is written every WRITE_S, and at the watch's end."""
        self.n_looks, self.seconds = self.n_looks + 1, at_s
        self._looks.append((at_s, [watch.look(at_s) for watch in self.watches]))
        if at_s >= self._write_due_s:
            self._write_due_s = at_s + WRITE_S
            self._write_looks()

    def _write_looks(self) -> None:
        kept, self._looks = self._looks, []
        if self._keeps_curves:
            for at_s, looks in kept:
                for curve, look in zip(self.curves, looks, strict=True):
                    curve.add(at_s, look.free_bytes)
        self._write(row for at_s, looks in kept for row in self._rows(at_s, looks))

    def _rows(self, at_s: float, looks: Sequence[Look]) -> Iterator[list[Any]]:
        """None is an empty cell."""
        times = f"{self.began_s + at_s:.3f}", f"{at_s:.3f}"
        for watch, look in zip(self.watches, looks, strict=True):
            *memory, sensors, frozen, error = look
            server = self._figures(watch)
            of_server = server.arena_high_water_bytes, server.free_bytes
            yield [*times, watch.card.pci_id, *memory, *sensors, *of_server, int(frozen), error]

    def _write(self, rows: Iterator[list[Any]] | list[tuple[str, ...]]) -> None:
        """To the CSV file. One that can be written no longer is left, and the watch goes on."""
        if not self._csv_file:
            return
        try:
            csv.writer(self._csv_file, lineterminator="\n").writerows(rows)
            self._csv_file.flush()
        except OSError as error:
            self._say(f"{self._csv_file.name}: {error.strerror}; goes on without it")
            with suppress(OSError):  # once: it holds what it could not write
                self._csv_file.close()
            self._csv_file, self._csv_failed = None, True

    def _figures(self, watch: CardWatch) -> ServerFigures:
        return self._server.of(watch.card.pci_id) if self._server else NO_FIGURES

    def table(self) -> Table:
        """What is known so far."""
        title = f"Least free memory in GiB and highest sensors in {self.seconds:.1f} s"
        table = Table(title=title, title_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("card", "at") else "right")
        if self._server:
            table.add_column("arena", justify="right")
        for watch in self.watches:
            arena = [_gib(self._figures(watch).arena_high_water_bytes)] if self._server else []
            table.add_row(*_cells(watch, self.began_s), *arena)
        return table

    def closing_line(self) -> str:
        rate = (self.n_looks - 1) / self.seconds if self.seconds else 0.0
        return f"{self.n_looks:,} looks, {rate:.1f} a second, {self.n_missed:,} missed; {self._cpu_share:.2%} of a core"

    def summary(self) -> dict[str, Any]:
        """As data; what is not known is None."""
        return {
            "began_s": self.began_s,
            "seconds": self.seconds,
            "interval_s": self._interval_s,
            "looks": self.n_looks,
            "looks_missed": self.n_missed,
            "cpu_share": self._cpu_share,
            "cards": [_summary(watch, self.began_s, self._figures(watch)) for watch in self.watches],
        }

    @property
    def _cpu_share(self) -> float:
        """Of one core, that watching took."""
        return self._cpu_s / max(self.seconds, self._interval_s)


def _cells(watch: CardWatch, began_s: float) -> list[str]:
    least, coarse, highs, sensors = watch.least, watch.coarse_least, watch.highs, watch.sensors
    errors = (sensors.ecc_corrected, sensors.ecc_uncorrected)
    return [
        watch.card.pci_id + " frozen" * bool(watch.n_frozen) + " lost" * bool(watch.n_failed),
        _gib(least.free_bytes if least else None),
        clock(began_s + least.at_s) if least else "",
        _gib(coarse.free_bytes if coarse else None),
        _gib(watch.total_bytes or None),
        *(f"{highs[name]:.0f} {unit}" if name in highs else "" for name, unit in _SHOWN.items()),
        ", ".join(f"{reason} {n}x" for reason, n in watch.throttled.items()),
        "" if None in errors else "/".join(map(str, errors)),
    ]


_COLUMNS = ("card", "free", "at", f"every {COARSE_S:g} s", "of", "junction", "memory", "power", "throttled", "ECC")
_SHOWN = {"junction_c": "°C", "memory_c": "°C", "power_w": "W"}


def _summary(watch: CardWatch, began_s: float, server: ServerFigures) -> dict[str, Any]:
    return {
        "card": watch.card.pci_id,
        "name": watch.card.name,
        "total_bytes": watch.total_bytes,
        "min_free": _least(watch.least, began_s),
        "min_free_of_5_s_sampler": _least(watch.coarse_least, began_s),
        "looks": watch.n_looks,
        "looks_failed": watch.n_failed,
        "looks_below_floor": watch.n_below,
        "looks_frozen": watch.n_frozen,
        "max": watch.highs,
        "throttled_readings": watch.throttled,
        "ecc_corrected_errors": watch.sensors.ecc_corrected,
        "ecc_uncorrected_errors": watch.sensors.ecc_uncorrected,
        "server": server._asdict(),
    }


def _least(least: Least | None, began_s: float) -> dict[str, float] | None:
    return {"bytes": least.free_bytes, "time_s": began_s + least.at_s, "elapsed_s": least.at_s} if least else None


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.3f}"
