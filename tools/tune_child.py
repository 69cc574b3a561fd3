"""One cell of `rocline tune` measured: a server of its own, one cold request, and what its metrics say afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rocline.tools.load_answer import Answer, LoadError
from rocline.tools.load_client import Ask, InputError, LoadClient, open_client
from rocline.tools.load_protocols import Talk, check_counts, now
from rocline.tools.load_server import child_server
from rocline.tools.tune_cells import Cell, Outcome

METRICS_S = 10.0  # for a server to answer
TRUSTED_PART = 8  # of the prompt's rows, one in so many seen to pass before their pace is believed


class EndedEarly(Exception):
    """The request would have come out hopelessly slower than another cell's."""


class Patience:
    """Ends a prefill that will take too long.

    The pace is that between two looks at the rows done, the first after the pipeline has filled. Rows become slower
    as the history grows, so the forecast is too early, and never ends a cell that would have been in time.
    """

    def __init__(self, limit_s: float | None) -> None:
        """limit_s: of the TTFT; None: none."""
        self._limit_s = limit_s
        self._first: tuple[float, int] | None = None

    def look(self, comment: str, elapsed_s: float) -> None:
        """comment: of the server, elapsed_s after the request. Raises EndedEarly."""
        found = re.match(r"prefill (\d+)/(\d+) rows", comment)
        if self._limit_s is None or not found:
            return
        n_done, n_rows = int(found[1]), int(found[2])
        if elapsed_s > self._limit_s:
            raise EndedEarly(f"{n_done:,} of {n_rows:,} rows after {elapsed_s:.0f} s, limit {self._limit_s:.0f}")
        if not n_done:
            return
        self._first = self._first or (elapsed_s, n_done)
        since_s, n_since = elapsed_s - self._first[0], n_done - self._first[1]
        if n_since * TRUSTED_PART < n_rows:
            return
        forecast_s = elapsed_s + (n_rows - n_done) * since_s / n_since
        if forecast_s > self._limit_s:
            raise EndedEarly(
                f"{n_done:,} of {n_rows:,} rows after {elapsed_s:.0f} s: a TTFT of {forecast_s:.0f} s at least, "
                f"limit {self._limit_s:.0f}"
            )


@dataclass(frozen=True)
class CellRunner:
    """Runs cells, each in a fresh `rocline serve`.

    settings   NAME=VALUE of all servers; chunk_rows and arena_gib are the cell's
    prompt     ids
    timeout_s  of a cell, from the start of its server
    """

    model: str
    settings: Sequence[str]
    prompt: Sequence[int]
    output_tokens: int
    api_key: str | None
    timeout_s: float
    talk: Talk

    def __call__(self, cell: Cell, limit_s: float | None) -> Outcome:
        """What became of the cell; limit_s of its TTFT, None: none. Raises KeyboardInterrupt, for SIGTERM too."""
        started, began_s = now(), time.monotonic()
        blank = Outcome(chunk_rows=cell.chunk_rows, arena_gib=cell.arena_gib, status="failed", started=started)
        try:
            outcome = asyncio.run(self._run(cell, limit_s, blank))
        except EndedEarly as early:
            outcome = replace(blank, status="ended early", note=str(early))
        except (LoadError, InputError) as error:
            outcome = replace(blank, note=plain(str(error)))
        except TimeoutError:
            outcome = replace(blank, note=f"not done after {self.timeout_s:g} s, which --cell-timeout-s allows")
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        return replace(outcome, took_s=round(time.monotonic() - began_s, 3))

    async def _run(self, cell: Cell, limit_s: float | None, blank: Outcome) -> Outcome:
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        settings = [*self.settings, f"chunk_rows={cell.chunk_rows}", f"arena_gib={cell.arena_gib!r}"]
        async with asyncio.timeout(self.timeout_s) as timeout, child_server(self.model, settings) as url:
            client_of = open_client(url, apis=("sglang",), api_key=self.api_key, read_timeout_s=self.timeout_s)
            async with client_of as client:
                before = await self._metrics(url)
                self.talk.status(f"{cell}: the server is ready")
                answer = await self._ask(client, cell, Patience(limit_s))
                after = await self._metrics(url)
            timeout.reschedule(None)  # measured: its end may take as long as it likes
        return _outcome(blank, answer, before, after)

    async def _ask(self, client: LoadClient, cell: Cell, patience: Patience) -> Answer:
        """The whole answer to a cold request. Raises LoadError and EndedEarly."""

        def hear(comment: str) -> None:
            elapsed_s = time.perf_counter() - sent_s
            self.talk.status(f"{cell}, {elapsed_s:.0f} s: {comment}")
            patience.look(comment, elapsed_s)

        sent_s = time.perf_counter()
        answer = await client.ask(Ask(self.prompt, self.output_tokens), hear)
        check_counts(answer, len(self.prompt), self.output_tokens)
        if answer.cached_tokens:
            raise LoadError(f"not cold: {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were cached")
        if answer.hash_of != "ids":
            raise LoadError("the server sent no output ids, nothing can be compared")
        return answer

    async def _metrics(self, url: str) -> Figures:
        """Raises LoadError."""
        try:
            return figures(await asyncio.to_thread(_read, url + "/metrics", self.api_key))
        except (OSError, HTTPException, ValueError) as error:
            raise LoadError(f"/metrics: {error}") from error


def _read(url: str, api_key: str | None) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    with urllib.request.urlopen(request, timeout=METRICS_S) as response:
        return response.read().decode()


@dataclass(frozen=True)
class Figures:
    """Of a server's /metrics.

    min_headroom_bytes  by card, as its number and PCI id, or "host"; None where none was ever read
    arenas              (high-water mark, slab) in bytes of each device
    device_allocs       of all arenas since their start
    """

    min_headroom_bytes: dict[str, int | None]
    arenas: list[tuple[int, int]]
    device_allocs: int


def figures(text: str) -> Figures:
    """Raises ValueError for a text that is not of rocline's metrics."""
    values: dict[str, dict[str, int]] = {}
    pci_ids: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            device = sample.labels.get("device")
            if device is None:
                continue
            if sample.name == "rocline_card":
                pci_ids[device] = sample.labels["pci_id"]
            values.setdefault(sample.name, {})[device] = int(sample.value)
    try:
        high_water, slabs = values["rocline_arena_high_water_bytes"], values["rocline_arena_slab_bytes"]
        least, n_allocs = values["rocline_headroom_min_bytes"], values["rocline_arena_device_allocs_total"]
        cards = values["rocline_memory_bytes"]
    except KeyError as error:
        raise ValueError(f"no {error.args[0]} by device") from error
    return Figures(
        {" ".join(filter(None, [device, pci_ids.get(device)])): least.get(device) for device in cards},
        [(high_water[device], slabs[device]) for device in slabs],
        sum(n_allocs.values()),
    )


def _outcome(blank: Outcome, answer: Answer, before: Figures, after: Figures) -> Outcome:
    high_water_bytes, slab_bytes = max(after.arenas, key=lambda arena: arena[0] / arena[1])
    return replace(
        blank,
        status="done",
        ttft_s=answer.ttft_s,
        prefill_tokens_per_s=answer.prompt_tokens / answer.ttft_s,
        min_headroom_bytes=after.min_headroom_bytes,
        device_allocs=after.device_allocs - before.device_allocs,
        arena_high_water_bytes=high_water_bytes,
        arena_share=high_water_bytes / slab_bytes,
        output_sha256=answer.output_sha256,
    )


def plain(message: str) -> str:
    """With the words of a server's log line in place of the line."""
    at = message.find('{"')
    event: Any = None
    if at >= 0:
        try:
            event = json.loads(message[at:])
        except ValueError:
            return message
    words = event.get("error") if isinstance(event, dict) else None
    return message[:at] + str(words) if words else message
