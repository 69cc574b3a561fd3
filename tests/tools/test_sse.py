"""Server-sent events: the same items wherever the bytes are cut."""

import pytest

from rocline.tools.sse import Item, SseReader

STREAM = (
    ": prefill 1/2 rows\n\n"
    'data: {"text": "Grüße, 世界 🙂"}\n\n'
    "event: note\nid: 7\nretry: 10\ndata: one\ndata:two\ndata\ndata:  three\n\n"
    "data: [DONE]\n\n"
)
ITEMS = [
    Item("prefill 1/2 rows", is_comment=True),
    Item('{"text": "Grüße, 世界 🙂"}'),
    Item("one\ntwo\n\n three"),
    Item("[DONE]"),
]


def items(chunks):
    reader = SseReader()
    return [item for chunk in chunks for item in reader.feed(chunk)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])  # a byte order mark is no part of the stream
def test_the_items_whatever_the_cuts(rng, end, mark):
    data = mark + STREAM.replace("\n", end).encode() + b": after the last\n"  # a lone \r at the very end would wait
    wanted = [*ITEMS, Item("after the last", is_comment=True)]
    assert items([data]) == wanted
    assert items(data[place : place + 1] for place in range(len(data))) == wanted  # every character split
    for _ in range(20):
        cuts = sorted(rng.integers(0, len(data), 6).tolist())
        assert items(data[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)) == wanted


def test_an_event_comes_with_its_empty_line_and_not_before():
    reader = SseReader()
    assert reader.feed(b"data: one\n") == []
    assert reader.feed(b"\n") == [Item("one")]
    assert reader.feed(b"\n\ndata: never ended\n") == []


def test_bytes_that_are_no_utf8_stop_nothing():
    assert items([b"data: \xff\xfe\n\ndata: on\n\n"]) == [Item("\ufffd\ufffd"), Item("on")]
