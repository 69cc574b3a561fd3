"""What a running server says of the cards it is on: its /metrics, read now and then by a thread."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

POLL_S, TIMEOUT_S = 5.0, 3.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find 127.0.0.1
_FIGURES = {
    "rocline_arena_high_water_bytes": "arena_high_water_bytes",
    "rocline_headroom_bytes": "free_bytes",
    "rocline_headroom_min_bytes": "min_free_bytes",
}


class ServerError(RuntimeError):
    """A server does not answer as it should. status: of its answer; None where there was none, or no text."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def get(url: str, api_key: str | None) -> str:
    """The text at url. Raises ServerError."""
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        with _OPENER.open(request, timeout=TIMEOUT_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: status {error.code}", error.code) from error
    except (OSError, HTTPException, ValueError) as error:  # the last: no URL, no UTF-8
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerError(f"{url}: {getattr(cause, 'strerror', None) or cause}") from error


class ServerFigures(NamedTuple):
    """Of one card. free_bytes and their minimum since the server's start are the less of what HIP and sysfs say."""

    arena_high_water_bytes: int | None = None
    free_bytes: int | None = None
    min_free_bytes: int | None = None


NO_FIGURES = ServerFigures()


class Server:
    """Asks every POLL_S, and once more at the end; `complain` is called when it stops answering."""

    def __init__(self, url: str, api_key: str | None, complain: Callable[[str], None]) -> None:
        """Has asked once when it returns. Raises ServerError."""
        self._url = url.rstrip("/").removesuffix("/metrics") + "/metrics"
        self._api_key = api_key
        self._complain = complain
        self._figures = self._ask()  # replaced, never changed: any thread may read it
        self._answers = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="server", daemon=True)
        self._thread.start()

    def of(self, pci_id: str) -> ServerFigures:
        """As of the last answer; nothing for a card that it is not on."""
        return self._figures.get(pci_id, NO_FIGURES)

    def is_on(self, pci_id: str) -> bool:
        return pci_id in self._figures

    def close(self) -> None:
        """Harmless twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._try()

    def _poll(self) -> None:
        while not self._closing.wait(POLL_S):
            self._try()

    def _try(self) -> None:
        try:
            self._figures, self._answers = self._ask(), True
        except ServerError as error:
            if self._answers:
                self._complain(f"{error}; its last figures stay")
            self._answers = False

    def _ask(self) -> dict[str, ServerFigures]:
        try:
            return parse(get(self._url, self._api_key))
        except ServerError as error:
            advice = "; set ROCLINE_API_KEYS to a key of it" if error.status == 401 else ""
            raise ServerError(f"{error}{advice}", error.status) from error
        except ValueError as error:  # no text of metrics
            raise ServerError(f"{self._url}: {error}") from error


def parse(text: str) -> dict[str, ServerFigures]:
    """By PCI id. Raises ValueError."""
    figures: dict[str, dict[str, int]] = {}
    pci_ids: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            device = sample.labels.get("device", "")
            if sample.name == "rocline_card":
                pci_ids[device] = sample.labels["pci_id"]
            elif sample.name in _FIGURES:
                figures.setdefault(device, {})[_FIGURES[sample.name]] = int(sample.value)
    return {pci_id: ServerFigures(**figures.get(device, {})) for device, pci_id in pci_ids.items()}
