"""The benchmark of Engram's gathers runs, on a small table, and refuses one that does not fit."""

import re

from rocline.tools import bench_engram


def test_it_prints_a_rate_for_each_chunk_and_thread_count(capsys):
    flags = ["--gib", "0.01", "--threads", "1", "3", "--chunk-rows", "2", "300", "--seconds", "0.05"]
    assert bench_engram.main(flags) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.search(r"table of 0\.01 GiB, 42,\d{3} rows", first)
    line = r"chunk +(\d+)  threads (\d)  +(\d+\.\d\d) million table rows/s  +(\d+\.\d\d) a processor second"
    found = [re.fullmatch(line, text) for text in lines]
    assert [(int(m[1]), int(m[2])) for m in found] == [(2, 1), (2, 3), (300, 1), (300, 3)]
    assert all(float(m[3]) > 0 < float(m[4]) for m in found[2:])


def test_a_table_that_does_not_fit_is_refused(capsys):
    assert bench_engram.main(["--gib", "1e6"]) == 1
    assert "lower --gib 1000000.0" in capsys.readouterr().err
