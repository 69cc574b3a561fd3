"""Reading a log while it is written: no line is lost or torn, whatever the moment."""

import json
import os
import threading

from server_log import STDERR

N_LINES = 3000


def test_every_line_once_and_whole(server_log):
    """Each written in two pieces, as print() does where nothing holds it back."""

    def write():
        for n in range(N_LINES):
            os.write(STDERR, json.dumps({"event": "even" if n % 2 == 0 else "odd", "n": n}).encode())
            os.write(STDERR, b"\n")

    writer, told = threading.Thread(target=write), []
    writer.start()
    while writer.is_alive():
        told += server_log.lines()
    told += server_log.lines()
    assert [line["n"] for line in told] == list(range(N_LINES))


def test_lines_of_some_events(server_log):
    os.write(STDERR, b'{"event": "a"}\n{"event": "b"}\n{"event": "c"}\n{"event"')
    assert [line["event"] for line in server_log.lines("c", "a")] == ["a", "c"]
    os.write(STDERR, b': "d"}\n')
    assert server_log.text() == '{"event": "d"}\n'
