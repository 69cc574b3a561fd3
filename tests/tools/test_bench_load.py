"""The benchmark of loading runs, on a few small experts, and refuses what does not fit."""

import json

import pytest

from rocline.tools import bench_load

FLAGS = ["--experts", "5", "--width", "256", "--inner", "128", "--copy-mib", "1", "--repeats", "2"]


def test_every_figure_is_there(hip_device, capsys, tmp_path):
    assert bench_load.main([*FLAGS, "--folder", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows.pop(3).keys() == {"what", "gb", "ms"}
    loads = "from memory", "from memory, by pageable copies", "from a file in the page cache"
    assert [row["what"] for row in rows] == [
        "copies from pinned memory",
        "copies from pageable memory",
        "copies to pinned memory by 8 threads",
        *(f"load and re-order {way}" for way in loads),
    ]
    assert {row["gb"] for row in rows[3:]} == {round((5 * 17 / 32 + 1 + 1 / 1024) * 3 * 256 * 128 / 1e9, 3)}
    assert rows[0]["gb_per_s"] > 0
    assert all(row["of_transfer"] == pytest.approx(row["gb_per_s"] / rows[0]["gb_per_s"], abs=2e-3) for row in rows[1:])
    assert list(tmp_path.iterdir()) == []


def test_experts_that_do_not_fit_are_refused(capsys):
    assert bench_load.main(["--experts", "1000000"]) == 1
    assert "lower --experts 1000000" in capsys.readouterr().err
