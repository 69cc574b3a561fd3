"""`rocline top`: rates of two looks, frames that fit, and servers that are another's, gone, or back again."""

import gc
import io
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from rocline.arena.stats import Stats as ArenaStats
from rocline.engine.config import ModelConfig
from rocline.http.metrics import Metrics
from rocline.pipeline.options import Options
from rocline.pipeline.stats import MemoryStats, StageStats, State, Stats
from rocline.tools import cli, top, top_look
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.top_view import Bar, Frame, elapsed, runs

sys.path.append(str(Path(__file__).resolve().parents[1] / "http_server"))  # servers over fake engines
from running_server import serving, wait_until

GIB = 1 << 30
LAYERS = ((0, 1, 20, 21, 22), (2, 3, 23, 24), (4, 5, 6, 7, 25), (19, 39))
NO_ARENA = dict.fromkeys(ArenaStats.__dataclass_fields__, 0)
URL = "http://127.0.0.1:8000"


def stats_at(uptime_s, *, prompt_rows=0, output_tokens=0, busy_s=(0.0, 0.0, 0.0, 0.0), n_stages=4, min_free=2 * GIB):
    """Of an engine on as many cards as stages."""
    arena = ArenaStats(**NO_ARENA | {"used_bytes": GIB // 4, "high_water_bytes": GIB // 2, "slab_bytes": GIB})
    return Stats(
        state=State.READY,
        reason="",
        uptime_s=uptime_s,
        queued=3,
        prefilling=2,
        decoding=6,
        paused=1,
        running_limit=8,
        queue_limit=64,
        ended={},
        prompt_rows=prompt_rows,
        output_tokens=output_tokens,
        engram_wait_s=0.0,
        n_pages=1024,
        free_pages=812,
        page_positions=2048,
        stages=tuple(StageStats(n, n, LAYERS[n % 4], True, busy_s[n % 4], 1, n, arena) for n in range(n_stages)),
        memory=tuple(
            MemoryStats(n, f"0000:{16 * n + 3:02x}:00.0", 4 * GIB, 48 * GIB, min_free, 1.0, "") for n in range(n_stages)
        ),
    )


def metrics_of(stats):
    """A server's /metrics, and which layers its stages run."""
    about = [
        f'rocline_stage{{stage="{s.stage}",device="{s.device}",layers="{",".join(map(str, s.layers))}"}} 1.0\n'
        for s in stats.stages
    ]
    return Metrics(lambda: stats).text().decode() + "".join(about)


def info_of(uptime_s, requests=None, state="ready"):
    info = {"version": "0.1.0", "state": state, "served_model_name": "a/model", "uptime_s": uptime_s, "other": 1}
    return info if requests is None else info | {"requests": requests}


def requests_of(n):
    """n that prefill and one that decodes."""
    at_it = [
        {"id": f"cmpl-{number:024}", "phase": "prefill", "rows_done": 40_960, "rows_total": 1_000_411, "eta_s": 142.2}
        for number in range(n)
    ]
    return [*at_it, {"id": "x", "phase": "decode", "rows_done": 5, "rows_total": 5, "eta_s": None}]


@contextmanager
def answering(answers, port=0):
    """A server that gives answers[path], (status, text); others are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def answers_of(stats, info):
    return {"/metrics": (200, metrics_of(stats)), "/server_info": (200, json.dumps(info))}


@pytest.fixture
def look_at(monkeypatch):
    """look_at(at_s, stats, info): a look at a server with these figures."""

    def look(at_s, stats, info):
        texts = {path: text for path, (_, text) in answers_of(stats, info).items()}
        monkeypatch.setattr(top_look, "get", lambda url, key: texts[url.removeprefix(URL)])
        monkeypatch.setattr(top_look.time, "monotonic", lambda: at_s)
        return top_look.look(URL, None)

    return look


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(demo_config()))
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    return path


@pytest.fixture
def serve(folder):
    with serving(folder, ModelConfig.load(folder)) as make:
        yield make
    gc.unfreeze()  # a server that starts freezes what there is, here the tests' garbage too


def run_top(capsys, *words):
    """Without the log of a server in this process."""
    code = cli.main(["top", *words])
    out, err = capsys.readouterr()
    return code, out, "".join(line for line in err.splitlines(keepends=True) if not line.startswith("{"))


# Figures


def test_two_looks_a_second_apart_give_rates(look_at):
    before = look_at(1000.0, stats_at(60, prompt_rows=5000, output_tokens=90, busy_s=(9.0, 8.0, 7.0, 6.0)), info_of(60))
    after = stats_at(61, prompt_rows=6530, output_tokens=199, busy_s=(9.9, 8.5, 7.0, 8.0))
    told = top_look.figures(URL, before, look_at(1001.0, after, info_of(61)))
    assert told["interval_s"] == 1.0
    assert told["tokens_per_s"] == {"in": 1530, "out": 109}
    assert told["tokens_per_s_since_start"] == pytest.approx({"in": 6530 / 61, "out": 199 / 61})
    shares = [stage["busy_share"] for stage in told["stages"]]
    assert shares == pytest.approx([0.9, 0.5, 0.0, 1.0])  # the last one's step began before
    assert [stage["waiting"] for stage in told["stages"]] == [0, 1, 2, 3]
    assert [tuple(stage["layers"]) for stage in told["stages"]] == list(LAYERS)
    assert [stage["device"] for stage in told["stages"]] == ["0", "1", "2", "3"]
    assert told["requests"] == {"queued": 3, "prefill": 2, "decode": 6, "paused": 1}
    assert (told["running_limit"], told["queue_limit"], told["pages"], told["free_pages"]) == (8, 64, 1024, 812)
    assert told["devices"][1] == {
        "device": "1", "pci_id": "0000:13:00.0", "free_bytes": 4 * GIB, "min_free_bytes": 2 * GIB,
        "total_bytes": 48 * GIB,
        "arena": {"used_bytes": GIB // 4, "high_water_bytes": GIB // 2, "slab_bytes": GIB},
    }  # fmt: skip
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("rows", "uptime_s"),
    [(4999, 61.0), (5000, 50.0)],
    ids=["counters fell", "it started later"],
)
def test_a_server_that_has_started_again_has_no_rates_at_first(look_at, rows, uptime_s):
    before = look_at(1000.0, stats_at(60, prompt_rows=5000), info_of(60))
    told = top_look.figures(URL, before, look_at(1001.0, stats_at(1, prompt_rows=rows), info_of(uptime_s)))
    assert told["tokens_per_s"] == {"in": None, "out": None}
    assert {stage["busy_share"] for stage in told["stages"]} == {None}
    assert told["tokens_per_s_since_start"]["in"] == pytest.approx(rows / uptime_s)


def test_prefills_are_those_of_server_info(look_at):
    told = top_look.figures(URL, None, look_at(1.0, stats_at(1), info_of(1, requests_of(2))))
    assert [each["id"] for each in told["prefills"]] == [f"cmpl-{number:024}" for number in range(2)]
    assert told["prefills"][0] == {
        "id": f"cmpl-{0:024}", "rows_done": 40_960, "rows_total": 1_000_411, "eta_s": 142.2,
    }  # fmt: skip
    assert top_look.figures(URL, None, look_at(1.0, stats_at(1), info_of(1)))["prefills"] is None


# Frames


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_broken(look_at, width, ascii_only):
    """Eight cards, long prompts, and figures as large as they come."""
    big = stats_at(9, prompt_rows=10**9, output_tokens=10**6, n_stages=8, min_free=GIB)
    info = info_of(99_999, requests_of(3)) | {"served_model_name": "deepseek-ai/DeepSeek-V4.1-Flash" * 3}
    before = look_at(1.0, stats_at(8, prompt_rows=10**9 - 12_345, output_tokens=10**6 - 1234, n_stages=8), info)
    told = top_look.figures(URL, before, look_at(2.0, big, info))
    console = Console(width=width, file=io.StringIO(), highlight=False)
    if ascii_only:
        console.file = io.TextIOWrapper(io.BytesIO(), "ascii")
    with console.capture() as captured:
        console.print(Frame(told))
    lines = captured.get().splitlines()
    assert [line for line in lines if len(line) > width] == []
    assert ascii_only == all(line.isascii() for line in lines)
    first, *others = lines
    assert len(others) == 3 + (2 + 3) + (2 + 8) + (2 + 8)  # each table after an empty line and a header
    assert "in 12,345.0   out 1,234.0" in others[1]
    assert sum("40,960/1,000,411" in line and "2:22" in line for line in others) == 3
    assert sum("0-1 20-22" in line for line in others) == 2
    assert sum(re.search(r" 0% +[0-7]$", line.rstrip()) is not None for line in others) == 8
    cards = [line for line in others if re.search(r"4\.00 +1\.00 +48\.00$", line.rstrip())]
    assert len(cards) == 8
    assert all(("0000:" in line) == (width == 120) for line in cards)
    headers = [line.split() for line in (others[4], others[-19], others[-9])]
    card = ["card"] * (width == 120)
    assert headers == [
        ["prefill", "rows", "ETA"],
        ["stage", "device", "layers", "busy", "waiting"],
        ["device", *card, "arena", "used", "peak", "slab", "memory", "free", "least", "of", "GiB"],
    ]
    assert URL in first


def test_a_low_terminal_drops_empty_lines_and_later_prefills(look_at):
    told = top_look.figures(URL, None, look_at(1.0, stats_at(1, n_stages=8), info_of(1, requests_of(9))))
    console = Console(width=80, height=24, file=io.StringIO())
    console.print(Frame(told), height=24)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 24
    assert "prefill, 1 of 9" in lines[4]
    assert "" not in [line.strip() for line in lines]


def test_bars():
    def drawn(bar, width=10):
        console = Console(width=width, file=io.StringIO())
        console.print(bar)
        return console.file.getvalue().rstrip("\n")

    assert drawn(Bar(0.0)) == "··········"
    assert drawn(Bar(0.001)) == "█·········"  # little is not nothing
    assert drawn(Bar(0.3, 0.5)) == "███▒▒·····"
    assert drawn(Bar(0.5, 0.2)) == "█████·····"
    assert drawn(Bar(1.0, 1.0, 0.97)) == "█████████│"
    assert drawn(Bar(0.0, 0.0, 1.0)) == "·········│"


def test_words():
    assert runs([0, 1, 2, 3, 26, 27]) == "0-3 26-27"
    assert runs([19, 39]) == "19 39"
    assert runs([]) == ""
    assert [elapsed(seconds) for seconds in (0.04, 59.9, 245, 3723)] == ["0.0 s", "59.9 s", "4:05", "1:02:03"]


# The command


def test_once_over_a_server(serve, capsys, monkeypatch):
    server = serve(options=Options(running=2, queue=5))
    engine = server.engine
    engine.gate.clear()
    asked = [threading.Thread(target=server.post, args=("/v1/completions", {"prompt": [300] * 9})) for _ in range(3)]
    for thread in asked:
        thread.start()
    wait_until(lambda: engine.n_active == 3)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run_top(capsys, "--url", server.url + "/", "--once", "--interval-s", "0.1")
    assert (status, err) == (0, "")
    assert "queued 1/5   prefill 2   decode 0   paused 0   running 2/2" in out
    assert "14 of 16 free" in out
    assert max(map(len, out.splitlines())) <= 80
    engine.gate.set()
    for thread in asked:
        thread.join(10)
    wait_until(server.quiet)
    status, out, _ = run_top(capsys, "--url", server.url, "--json", "--interval-s", "0.1")
    told = json.loads(out)
    assert (status, told["state"], told["tokens_per_s"]) == (0, "ready", {"in": 0, "out": 0})
    assert told["tokens_per_s_since_start"]["in"] == pytest.approx(27 / told["uptime_s"])
    assert told["devices"][0]["free_bytes"] == 3 * GIB
    assert [stage["stage"] for stage in told["stages"]] == [0]


def test_a_server_whose_engine_loads(serve, capsys):
    server = serve(start=False)
    loaded = threading.Event()
    server.opening = lambda: loaded.wait(10) and server.engine
    server._thread.start()
    wait_until(lambda: hasattr(server, "server") and server.port)
    status, out, _ = run_top(capsys, "--url", server.url, "--once", "--interval-s", "0.1")
    loaded.set()
    assert status == 0
    assert re.search(r"127\.0\.0\.1:\d+  starting  up ", out)
    assert "The engine is not there yet." in out


def test_a_server_with_keys(serve, capsys, tmp_path):
    server = serve(keys=("secret",))
    (tmp_path / "key").write_text("secret\n")
    status, out, err = run_top(capsys, "--url", server.url, "--once", "--interval-s", "0.1")
    assert (status, out) == (2, "")
    assert err == f"top: {server.url}/metrics: status 401; give the server's key with --api-key-file\n"
    words = ("--url", server.url + "/v1", "--once", "--interval-s", "0.1", "--api-key-file")
    assert run_top(capsys, *words, str(tmp_path / "key"))[0] == 0
    status, _, err = run_top(capsys, *words, str(tmp_path / "no"))
    assert (status, err) == (2, f"top: {tmp_path / 'no'}: No such file or directory\n")


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        ({}, 2, r"is no rocline server: http://\S+/metrics: status 404"),
        ({"/metrics": (200, "other_metric 1.0\n")}, 2, "is no rocline server: its /metrics has no rocline_up"),
        ({"/metrics": (200, "<html> {{ </html>")}, 2, "is no rocline server: "),
        ({"/metrics": (200, "rocline_up 1.0\n")}, 2, r"is no rocline server: http://\S+/server_info: status 404"),
        ({"/metrics": (200, "rocline_up 1.0\n"), "/server_info": (200, "{}")}, 2, "is no rocline server: .*version"),
        ({"/metrics": (502, "")}, 1, "no answer: .*status 502"),
    ],
)
def test_what_is_no_rocline_server(capsys, answers, status, words):
    with answering(answers) as port:
        got, out, err = run_top(capsys, "--url", f"http://127.0.0.1:{port}", "--once", "--interval-s", "0.1")
    assert (got, out) == (status, "")
    assert re.search(words, err)


def test_nobody_there(capsys):
    with answering({}) as port:
        pass
    status, out, err = run_top(capsys, "--url", f"http://127.0.0.1:{port}", "--json")
    assert (status, out) == (1, "")
    assert err == f"top: no answer: http://127.0.0.1:{port}/metrics: Connection refused\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url(capsys, url):
    assert run_top(capsys, "--url", url, "--once") == (
        2, "", f"top: --url {url}: not the URL of a server, as http://127.0.0.1:8000 is\n",
    )  # fmt: skip


def test_a_server_that_goes_and_comes_back():
    answers = answers_of(stats_at(60, prompt_rows=5000), info_of(60))
    with answering(answers) as port:
        watch = top.Watch(f"http://127.0.0.1:{port}", None)
        first, second = watch.step(), watch.step()
        assert isinstance(first, Frame)
        assert first.figures["tokens_per_s"]["in"] is None
        assert second.figures["tokens_per_s"]["in"] == 0
    for _ in range(2):
        lost = watch.step()
        assert isinstance(lost, Text)
        assert re.match(r"No answer for \d\.\d s, trying again\.\n.*Connection refused$", str(lost))
    with answering(answers_of(stats_at(1, prompt_rows=7), info_of(1)), port):
        back, again = watch.step(), watch.step()
    assert back.figures["tokens_per_s"]["in"] is None
    assert again.figures["tokens_per_s"]["in"] == 0
    with answering({}, port), pytest.raises(top.InputError, match="no rocline server"):
        watch.step()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_frames_come_until_it_is_stopped(monkeypatch, is_terminal):
    """On a terminal on a screen of their own, which is left at the end."""
    out = io.StringIO()
    monkeypatch.setattr(top, "Console", partial(Console, file=out, force_terminal=is_terminal, width=80, height=30))
    monkeypatch.setenv("TERM", "xterm")
    n_waits, before = [], signal.getsignal(signal.SIGTERM)

    def wait(seconds):
        n_waits.append(seconds)
        if len(n_waits) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(top.time, "sleep", wait)
    with answering(answers_of(stats_at(60), info_of(60, requests_of(1)))) as port:
        assert cli.main(["top", "--url", f"http://127.0.0.1:{port}", "--interval-s", "2"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    text = out.getvalue()
    assert text.count("queued 3/64") == 3
    assert all(1 < seconds <= 2 for seconds in n_waits)
    screens = [text.count(code) for code in ("\x1b[?1049h", "\x1b[?1049l")]
    assert screens == [int(is_terminal)] * 2


def test_an_interval_that_is_no_load():
    for word in ("0.05", "nan", "inf"):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["top", "--interval-s", word])
        assert exit_.value.code == 2


def test_it_starts_without_torch():
    """Which takes seconds, of which a command that is typed to have a quick look has none."""
    code = "import sys, rocline.tools.top; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
