"""The log of servers that run in this process, read while they write."""

import json
import os

STDERR = 2


class ServerLog:
    """What came to stderr, a file while pytest captures it, since it was last read: whole lines alone.

    capfd.readouterr() empties the file: what a server's thread writes meanwhile is lost, or left without its beginning.
    """

    def __init__(self) -> None:
        self._read_bytes = 0

    def text(self) -> str:
        left = os.pread(STDERR, os.fstat(STDERR).st_size - self._read_bytes, self._read_bytes)
        whole = left[: left.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return whole.decode()

    def lines(self, *events: str) -> list[dict[str, object]]:
        """Those of these events, or all."""
        told = [json.loads(line) for line in self.text().splitlines()]
        return [line for line in told if not events or line["event"] in events]
