"""Server-sent events from bytes as they come (WHATWG's event stream: data and comments, no event names or ids)."""

from __future__ import annotations

import codecs
import io
from typing import NamedTuple


class Item(NamedTuple):
    """An event's data, its lines joined by newlines, or one comment."""

    text: str
    is_comment: bool = False


class SseReader:
    """Bytes in, whole items out: a character, a line end or an event may be split anywhere."""

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)  # all three line ends to \n
        self._line = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Item]:
        """The items that this chunk completes. An event whose empty line never comes is none, as the standard says."""
        *lines, self._line = (self._line + self._decoder.decode(chunk)).split("\n")
        items = []
        for line in lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if self._data:
                    items.append(Item("\n".join(self._data)))
                self._data = []
            elif not name:
                items.append(Item(value, is_comment=True))
            elif name == "data":
                self._data.append(value)
        return items
