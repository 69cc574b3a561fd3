"""What tests send and read byte for byte, and answers spelled in words."""

import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence

from fake_engine import FakeEngine

from rocline.http.prompt import Markers
from rocline.pipeline.request import Request

MARKERS = ("</think>", "<｜end▁of▁sentence｜>", "<｜User｜>")


def http_bytes(path: str, body: object, *headers: str, method: str = "POST") -> bytes:
    """A request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers, "", "")
    return "\r\n".join(lines).encode() + data


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body without its chunks' sizes)."""
    reader = connection.makefile("rb")
    status = int(reader.readline().split()[1])
    headers = {}
    while line := reader.readline().strip().decode():
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return status, headers, b"".join(body_parts(reader, headers))


def body_parts(reader, headers: dict[str, str]) -> Iterator[bytes]:
    if headers.get("transfer-encoding") != "chunked":
        yield reader.read(int(headers["content-length"]))
        return
    while n_bytes := int(reader.readline(), 16):
        yield reader.read(n_bytes)
        assert reader.read(2) == b"\r\n"
    assert reader.read(2) == b"\r\n"


def frames(body: bytes) -> list[str]:
    """The events and comments of a stream; each ends in exactly one empty line."""
    assert body.endswith(b"\n\n")
    return body.decode().removesuffix("\n\n").split("\n\n")


def events(body: bytes) -> list[dict]:
    """The JSON of a stream's events. The last frame is [DONE], and there is no other."""
    *rest, last = [frame for frame in frames(body) if not frame.startswith(":")]
    assert last == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in rest]


def without_chance(text: str) -> str:
    """A frame with id, time and seed replaced: the parts that differ from run to run."""
    text = re.sub(r'"id":"(chatcmpl|cmpl|gen)-[0-9a-f]{24}"', r'"id":"\1-ID"', text)
    return re.sub(r'"created":\d{10}', '"created":0', text)


class Speaker:
    """Writes answers for a fake engine in words: says(engine, "text</think>more") with markers spelled out."""

    def __init__(self, encode: Callable[[str], Sequence[int]], markers: Markers) -> None:
        self._encode, self._markers = encode, markers

    def ids(self, text: str) -> list[int]:
        ids = []
        for part in re.split(f"({'|'.join(map(re.escape, MARKERS))})", text):
            if part in MARKERS:
                ids.append(self._markers.ids[part])
            elif part:
                ids += self._encode(part)
        return ids

    def says(self, engine: FakeEngine, *texts: str) -> None:
        """The engine's next requests get these answers in turn, and the last one for ever."""
        answers = [self.ids(text) for text in texts]

        def answer(request: Request) -> list[int]:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        engine.answer = answer
