"""`rocline vram` over a made-up sysfs: what it writes, prints, draws, tells and refuses."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_sysfs import GIB, FakeSysfs
from rich.console import Console

from rocline.hip_kernels import driver
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.runtime import HipError
from rocline.pipeline.card_watch import CardWatch
from rocline.pipeline.headroom import pci_id_of
from rocline.pipeline.plan import GIB as PLAN_GIB
from rocline.pipeline.plan import HEADROOM_FLOOR_BYTES
from rocline.pipeline.sysfs_cards import cards
from rocline.tools import cli, vram, vram_server, vram_session
from rocline.tools.vram_server import ServerFigures, parse
from rocline.tools.vram_session import COLUMNS, Session

ROOT = Path(__file__).resolve().parents[2]
TOTAL = 48 * GIB


@pytest.fixture
def sysfs(tmp_path):
    return FakeSysfs(tmp_path / "sys")


@pytest.fixture
def rocline(sysfs, capsys):
    """Run `rocline vram` on the tree, with a look each 5 ms: its status, stdout and stderr."""

    def run(*words, seconds=0.05):
        words = ["--sysfs", sysfs.root, "--seconds", seconds, "--interval-ms", 5, *words]
        status = cli.main(["vram", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def rows(file):
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


# What it gives


def test_where_the_driver_shows_nothing_hip_alone_is_asked(hip_device, sysfs, monkeypatch, capsys):
    """As in a container without /sys."""
    (sysfs.root / "class" / "drm").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(vram, "SYSFS", sysfs.root)
    slab = devices()[0].allocate(1 << 20)
    assert cli.main(["vram", "--seconds", "0.05", "--interval-ms", "5", "--floor-gib", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)["cards"]
    assert [card["card"] for card in told] == [pci_id_of(device) for device in devices()]
    memory = devices()[0].memory()
    assert (told[0]["total_bytes"], told[0]["min_free"]["bytes"]) == (memory.total_bytes, memory.free_bytes)
    assert (told[0]["max"], told[0]["looks_failed"], told[0]["looks_frozen"]) == ({}, 0, 0)
    assert "no card of the amdgpu driver: HIP alone is asked" in err
    slab.free()


def test_a_card_that_hip_loses_is_told(hip_device, sysfs, monkeypatch, capsys):
    monkeypatch.setattr(vram, "SYSFS", sysfs.root)

    def lost(device):
        raise HipError("hipMemGetInfo: hipErrorNoDevice (100)")

    monkeypatch.setattr(driver.Device, "memory", lost)
    assert cli.main(["vram", "--seconds", "0.02", "--interval-ms", "5"]) == vram.EXIT_ALARM
    assert "cannot be read: hipMemGetInfo: hipErrorNoDevice (100)" in capsys.readouterr().err


def test_everything_at_once(rocline, sysfs, tmp_path):
    sysfs.add(used_bytes=40 * GIB).throttle(1)
    sysfs.add(used_bytes=TOTAL - 2 * GIB - 1000)
    sysfs.add(driver="nvidia")
    status, out, err = rocline("--json", "--csv", tmp_path / "a.csv", "--svg", tmp_path / "a.svg")
    assert status == 0
    told = json.loads(out)
    assert (told["floor_bytes"], told["interval_s"], told["server"]) == (3 * GIB // 2, 0.005, None)
    first, second = told["cards"]
    assert (first["card"], first["name"], first["total_bytes"]) == ("0000:03:00.0", "card0", TOTAL)
    assert first["min_free"]["bytes"] == first["min_free_of_5_s_sampler"]["bytes"] == 8 * GIB
    assert first["max"] == {"power_w": 17, "junction_c": 34, "memory_c": 41}
    assert first["throttled_readings"] == {"power": 1}
    assert (first["ecc_corrected_errors"], first["looks_failed"], first["looks_frozen"]) == (0, 0, 0)
    assert second["min_free"]["bytes"] == 2 * GIB + 1000
    assert time.time() - 5 < second["min_free"]["time_s"] <= time.time()
    assert 1 <= told["looks"] <= 10
    assert "0000:03:00.0" in err
    assert "8.000" in err
    assert f"{told['looks']} looks" in err
    table = rows(tmp_path / "a.csv")
    assert len(table) == 2 * told["looks"]
    assert tuple(table[0]) == COLUMNS
    assert [row["card"] for row in table] == ["0000:03:00.0", "0000:04:00.0"] * told["looks"]
    assert table[0] == {
        "time_s": table[0]["time_s"], "elapsed_s": table[0]["elapsed_s"], "card": "0000:03:00.0",
        "free_bytes": str(8 * GIB), "used_bytes": str(40 * GIB), "total_bytes": str(TOTAL), "hip_free_bytes": "",
        "busy_percent": "0.0", "power_w": "17.0", "junction_c": "34.0", "memory_c": "41.0", "sclk_mhz": "32.0",
        "mclk_mhz": "96.0", "throttle": "power", "ecc_corrected_errors": "0", "ecc_uncorrected_errors": "0",
        "arena_high_water_bytes": "", "server_free_bytes": "", "frozen": "0", "error": "",
    }  # fmt: skip
    assert float(table[0]["time_s"]) - float(table[0]["elapsed_s"]) == pytest.approx(told["began_s"], abs=0.002)
    ET.parse(tmp_path / "a.svg")


def test_missing_files_are_empty_cells(rocline, sysfs, tmp_path):
    card = sysfs.add(without=["ras/umc_err_count", "hwmon/hwmon4/temp3_label", "gpu_busy_percent"])
    status, _, _ = rocline("--csv", tmp_path / "a.csv")
    row = rows(tmp_path / "a.csv")[0]
    empty = ("busy_percent", "memory_c", "throttle", "ecc_corrected_errors", "ecc_uncorrected_errors")
    assert [row[name] for name in empty] == [""] * 5
    assert (status, row["junction_c"], row["card"]) == (0, "34.0", card.pci_id)


def test_one_look_at_least(rocline, sysfs):
    sysfs.add()
    status, out, _ = rocline("--json", seconds=0.001)
    assert (status, json.loads(out)["looks"]) == (0, 1)


def test_some_of_the_cards(rocline, sysfs):
    for _ in range(3):
        sysfs.add()
    status, out, _ = rocline("--json", "--card", "0000:05:00.0", "--card", "0000:03:00.0")
    assert status == 0
    assert [card["card"] for card in json.loads(out)["cards"]] == ["0000:03:00.0", "0000:05:00.0"]


class FakeTime:
    """In place of the module, and of the event that a session waits on: waiting is what makes time pass."""

    def __init__(self):
        self.now_s = 500.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return 1e9 + self.now_s

    def process_time(self):
        return self.now_s / 1000

    def wait(self, seconds):
        self.now_s += seconds + 1e-4  # nobody wakes up in time
        return False


def test_looks_come_regularly_and_late_ones_are_counted(sysfs, monkeypatch):
    sysfs.add()
    session, clock, looked_s = Session([CardWatch(cards(sysfs.root)[0], 0, print)], 0.1, print), FakeTime(), []

    def look(at_s, looks=session.look):
        looked_s.append(at_s)
        looks(at_s)
        clock.now_s += 0.25 if len(looked_s) == 3 else 0.01

    monkeypatch.setattr(vram_session, "time", clock)
    monkeypatch.setattr(session, "look", look)
    session.watch(clock, 1.0, Console(file=io.StringIO()))
    assert looked_s == pytest.approx([0, 0.1, 0.2, 0.5, 0.6, 0.7, 0.8, 0.9], abs=2e-4)
    assert (session.n_looks, session.n_missed) == (8, 2)
    assert session.closing_line() == "8 looks, 7.8 a second, 2 missed; 0.10% of a core"


def test_lines_are_written_once_a_second_and_at_the_end(sysfs, monkeypatch, tmp_path):
    sysfs.add()
    clock, n_lines = FakeTime(), []
    with open(tmp_path / "a.csv", "w", encoding="utf-8", newline="") as file:
        session = Session([CardWatch(cards(sysfs.root)[0], 0, print)], 0.1, print, None, file)

        def look(at_s, looks=session.look):
            looks(at_s)
            n_lines.append(len(rows(tmp_path / "a.csv")))

        monkeypatch.setattr(vram_session, "time", clock)
        monkeypatch.setattr(session, "look", look)
        session.watch(clock, 1.55, Console(file=io.StringIO()))
    assert n_lines == [1] * 10 + [11] * 6
    assert [float(row["elapsed_s"]) for row in rows(tmp_path / "a.csv")] == pytest.approx(
        [n / 10 for n in range(16)], abs=2e-3
    )


def test_the_table_is_shown_while_it_runs_on_a_terminal(sysfs):
    sysfs.add(used_bytes=TOTAL - 3 * GIB)
    session = Session([CardWatch(cards(sysfs.root)[0], 0, print)], 0.005, print)
    screen = io.StringIO()
    session.watch(threading.Event(), 0.02, Console(file=screen, force_terminal=True, width=120))
    assert "3.000" in screen.getvalue()


# Alarms


def test_below_the_floor(rocline, sysfs):
    sysfs.add(used_bytes=TOTAL - GIB)
    status, _, err = rocline()
    assert status == 1
    assert re.match(r"vram: \d\d:\d\d:\d\d\.\d: 0000:03:00.0 has 1.00 GiB free, the floor is 1.50; lower", err)
    assert err.count("the floor is") == 1
    assert rocline("--floor-gib", 0.5)[0] == 0
    assert rocline("--floor-gib", 0)[0] == 0


def test_the_floor_is_the_plans():
    assert vram.FLOOR_GIB * PLAN_GIB == HEADROOM_FLOOR_BYTES


def test_a_card_that_goes(rocline, sysfs, tmp_path):
    sysfs.add().remove("mem_info_vram_total")
    sysfs.add()
    status, out, err = rocline("--json", "--csv", tmp_path / "a.csv", "--svg", tmp_path / "a.svg")
    lost, there = json.loads(out)["cards"]
    assert status == 1
    assert "0000:03:00.0 cannot be read: No such file or directory" in err
    assert "0000:03:00.0 lost" in err
    assert (lost["min_free"], lost["looks_failed"]) == (None, lost["looks"])
    assert (there["looks_failed"], there["min_free"]["bytes"]) == (0, 47 * GIB)
    row = rows(tmp_path / "a.csv")[0]
    assert (row["free_bytes"], row["power_w"]) == ("", "")
    assert "No such file" in row["error"]
    assert "not read" in (tmp_path / "a.svg").read_text()


# Its end


def test_ctrl_c_ends_it_with_the_summary(sysfs, tmp_path):
    """The CSV file has the lines of every look, the first at once and others within a second."""
    sysfs.add(used_bytes=TOTAL - GIB)
    table = tmp_path / "a.csv"
    words = ["--sysfs", str(sysfs.root), "--csv", str(table), "--interval-ms", "20", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rocline.tools.cli", "vram", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert "the floor is 1.50" in process.stderr.readline()
        while not table.read_text().count("\n") > 3:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1  # it was below the floor
    assert json.loads(out)["looks"] == len(rows(table))
    assert "a second" in err
    assert "Traceback" not in err


def test_signals_are_as_they_were(rocline, sysfs):
    sysfs.add()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    rocline()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with vram._stopped_by_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5)


def test_it_needs_no_torch():
    """It may run beside a server for days."""
    code = (
        "import sys; import rocline.tools.vram; print([n for n in ('torch', 'numpy', 'aiohttp') if n in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, timeout=60)
    assert out == "[]\n"


# What it refuses


def test_a_folder_that_is_none(tmp_path, capsys):
    assert cli.main(["vram", "--sysfs", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err == f"vram: {tmp_path / 'no'}: not a folder\n"


def test_a_host_without_a_gpu(rocline, sysfs):
    sysfs.add(driver="ast")
    status, out, err = rocline("--json")
    assert (status, out) == (2, "")
    assert (
        err
        == f"vram: {sysfs.root}/class/drm shows no card of the amdgpu driver: there is no GPU to watch on this host\n"
    )


@pytest.mark.parametrize("flag", ["--csv", "--svg"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_watched(
    rocline, sysfs, tmp_path, monkeypatch, flag
):
    sysfs.add()
    monkeypatch.setattr(Session, "look", lambda *args: pytest.fail("it looked"))
    status, _, err = rocline(flag, tmp_path)
    assert (status, err) == (2, f"vram: {tmp_path}: Is a directory\n")


def test_a_card_that_is_not_there(rocline, sysfs):
    sysfs.add()
    status, _, err = rocline("--card", "0000:99:00.0")
    assert (status, err) == (2, "vram: --card 0000:99:00.0: there is no such card; there is 0000:03:00.0\n")


@pytest.mark.parametrize(
    ("flag", "word"), [("--interval-ms", "0"), ("--seconds", "-1"), ("--floor-gib", "nan"), ("--seconds", "x")]
)
def test_wrong_numbers(rocline, capsys, flag, word):
    with pytest.raises(SystemExit) as stop:
        rocline(flag, word)
    assert stop.value.code == 2
    assert "must be a number of at least" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk: no /dev/full here")
def test_a_disk_that_is_full(rocline, sysfs):
    """The watch goes on without the file, and says so; a picture that cannot be written comes last."""
    sysfs.add()
    status, out, err = rocline("--json", "--csv", "/dev/full")
    assert status == 1
    assert "/dev/full: No space left on device; goes on without it" in err
    assert err.count("/dev/full") == 1
    assert json.loads(out)["looks"] >= 1
    status, out, err = rocline("--json", "--svg", "/dev/full")
    assert (status, json.loads(out)["looks"] >= 1) == (2, True)
    assert "vram: /dev/full: No space left on device" in err


# HIP


def test_hip_is_asked_for_the_cards_it_knows(hip_device, sysfs):
    told, pci_id = [], pci_id_of(devices()[0])
    here = [device for device in devices() if pci_id_of(device) == pci_id]  # a double's are all in one place
    sysfs.add(pci_id)
    sysfs.add("0000:77:00.0")
    free_bytes = vram._hip_free(cards(sysfs.root), told.append)
    assert list(free_bytes) == [pci_id]
    assert free_bytes[pci_id]() == here[-1].memory().free_bytes
    assert told == []


def test_without_hip_the_driver_alone_is_asked(sysfs, monkeypatch):
    sysfs.add()
    told = []

    def fail():
        raise HipError("HIP: hip-python is not installed")

    monkeypatch.setattr(driver, "devices", fail)
    assert vram._hip_free(cards(sysfs.root), told.append) == {}
    assert told == ["the driver alone is asked, not HIP: HIP: hip-python is not installed"]


# Beside a server

METRICS = """\
# HELP rocline_up 1 while the engine takes requests
# TYPE rocline_up gauge
rocline_up 1.0
# TYPE rocline_arena_high_water_bytes gauge
rocline_arena_high_water_bytes{device="0"} 3.0e+08
rocline_arena_high_water_bytes{device="1"} 5.0e+08
# TYPE rocline_headroom_bytes gauge
rocline_headroom_bytes{device="1"} 2.0e+09
# TYPE rocline_headroom_min_bytes gauge
rocline_headroom_min_bytes{device="0"} 1.0e+09
rocline_headroom_min_bytes{device="1"} 1.5e+09
# TYPE rocline_card gauge
rocline_card{device="0",pci_id="0000:04:00.0"} 1.0
rocline_card{device="1",pci_id="0000:03:00.0"} 1.0
"""


@contextmanager
def metrics_server(answer):
    """answer(path, headers): status and text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answer(self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_servers_figures_are_found_by_pci_id():
    assert parse(METRICS) == {
        "0000:04:00.0": ServerFigures(300_000_000, None, 1_000_000_000),
        "0000:03:00.0": ServerFigures(500_000_000, 2_000_000_000, 1_500_000_000),
    }
    assert parse('rocline_headroom_bytes{device="host"} 1.0\n') == {}  # it runs on the CPU


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_beside_a_server(rocline, sysfs, tmp_path, monkeypatch, path):
    sysfs.add("0000:03:00.0", used_bytes=TOTAL - 4 * GIB)
    asked = []

    def answer(path, headers):
        asked.append((path, headers["Authorization"]))
        return 200, METRICS

    monkeypatch.setenv("ROCLINE_API_KEYS", " key-1 ,key-2")
    with metrics_server(answer) as url:
        status, out, err = rocline("--url", url + path, "--json", "--csv", tmp_path / "a.csv")
    assert status == 0
    told = json.loads(out)
    assert told["cards"][0]["server"] == {
        "arena_high_water_bytes": 500_000_000, "free_bytes": 2_000_000_000, "min_free_bytes": 1_500_000_000,
    }  # fmt: skip
    row = rows(tmp_path / "a.csv")[0]
    assert (row["arena_high_water_bytes"], row["server_free_bytes"]) == ("500000000", "2000000000")
    assert "0.466" in err  # GiB of the arena, in the table
    assert asked == [("/metrics", "Bearer key-1")] * 2  # at the start and at the end


def test_a_server_elsewhere(rocline, sysfs):
    sysfs.add("0000:77:00.0")
    with metrics_server(lambda path, headers: (200, METRICS)) as url:
        status, _, err = rocline("--url", url)
    assert status == 0
    assert f"the server at {url} is on none of these cards" in err


def test_a_server_that_stops_answering(rocline, sysfs, monkeypatch):
    sysfs.add("0000:03:00.0")
    monkeypatch.setattr(vram_server, "POLL_S", 0.01)
    answers = iter([(200, METRICS)])
    with metrics_server(lambda path, headers: next(answers, (503, ""))) as url:
        status, out, err = rocline("--url", url, "--json", seconds=0.2)
    assert status == 0
    assert err.count(f"{url}/metrics: status 503; its last figures stay") == 1
    assert json.loads(out)["cards"][0]["server"]["arena_high_water_bytes"] == 500_000_000


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ((401, ""), "status 401; set ROCLINE_API_KEYS to a key of it"),
        ((404, ""), "status 404"),
        ((200, "<html> {{ </html>"), ": "),
        (None, "Connection refused"),
    ],
)
def test_a_server_that_cannot_be_read_is_refused(rocline, sysfs, answer, complaint):
    sysfs.add()
    with metrics_server(lambda path, headers: answer) as url:
        if answer:
            status, out, err = rocline("--url", url)
    if not answer:
        status, out, err = rocline("--url", url)
    assert (status, out) == (2, "")
    assert err.startswith(f"vram: {url}/metrics: ")
    assert complaint in err
    assert rocline("--url", "nonsense")[0] == 2
