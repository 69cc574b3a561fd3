"""Progress shows what is done, its rate and the time left: lines into a file, a bar on a terminal."""

import io
import re
import time

from rocline.engine.progress import ByteProgress, RowProgress


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_off_a_terminal():
    clock, stream = Clock(), io.StringIO()
    with ByteProgress("weights", 510_286_023_000, stream=stream, clock=clock) as progress:
        for _ in range(12):
            clock.now_s += 1
            progress.advance(2_000_000_000)
    assert stream.getvalue().splitlines() == [
        "weights: 10.00 of 510.29 GB (1 %), 2.00 GB/s, 4 min 10 s left",
        "weights: 20.00 of 510.29 GB (3 %), 2.00 GB/s, 4 min 05 s left",
        "weights: 24.00 of 510.29 GB (4 %), 2.00 GB/s, 4 min 03 s left",
    ]


def test_last_line_of_a_short_read():
    clock, stream = Clock(), io.StringIO()
    with ByteProgress("weights", 2_000_000_000, stream=stream, clock=clock) as progress:
        clock.now_s += 4
        progress.advance(2_000_000_000)
    assert stream.getvalue() == "weights: 2.00 of 2.00 GB (100 %), 0.50 GB/s, took 4 s\n"


def test_bar_on_a_terminal():
    stream = Terminal()
    with ByteProgress("weights", 3_000_000, stream=stream) as progress:
        progress.advance(1_500_000)
        progress.advance(1_500_000)
    text = stream.getvalue()
    assert "weights" in text
    assert "3.0/3.0 MB" in text
    assert "\x1b[" in text
    assert "took" not in text


def test_nothing_read():
    stream = io.StringIO()
    with ByteProgress("weights", 1000, stream=stream, clock=Clock()):
        pass
    assert stream.getvalue() == "weights: 0.00 of 0.00 GB (0 %), 0.00 GB/s, took 0 s\n"


def test_rows_off_a_terminal():
    clock, stream = Clock(), io.StringIO()
    with RowProgress("prefill", 2500, stream=stream, clock=clock) as progress:
        for n_rows in (1024, 1024, 452):
            clock.now_s += 6
            progress.advance(n_rows)
    assert stream.getvalue().splitlines() == [
        "prefill: 1,024 of 2,500 rows (40 %), 170.7 rows/s, 9 s left",
        "prefill: 2,048 of 2,500 rows (81 %), 170.7 rows/s, 3 s left",
        "prefill: 2,500 of 2,500 rows (100 %), 138.9 rows/s, took 18 s",
    ]


def test_rows_on_a_terminal():
    stream = Terminal()
    with RowProgress("prefill", 300, stream=stream) as progress:
        time.sleep(0.01)
        progress.advance(300)  # one step is enough for a rate
    text = stream.getvalue()
    assert "prefill" in text
    assert "300/300" in text
    assert float(re.findall(r"([\d,.]+) rows/s", text)[-1].replace(",", "")) > 0
    assert "took" not in text
