"""One cell of `rocline tune` over a server with a fake engine: figures, and whatever can go wrong."""

import gc
import json
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.digest import ids_sha256
from rocline.http import respond
from rocline.pipeline.headroom import Memory
from rocline.pipeline.options import Options
from rocline.tools import tune_child
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.load_answer import LoadError
from rocline.tools.tune_cells import GIB, Cell
from rocline.tools.tune_child import CellRunner, EndedEarly, Patience, figures, plain

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "http_server"))  # servers over fake engines
from running_server import serving, wait_until  # noqa: E402

CELL, PROMPT, N_OUTPUT = Cell(16, 0.5), tuple(range(300, 364)), 5


class Quiet:
    def say(self, line): ...
    def status(self, line): ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(demo_config()))
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    return path


@pytest.fixture
def start(folder):
    with serving(folder, ModelConfig.load(folder)) as make:
        yield lambda keys=(): make(keys, Options(chunk_rows=CELL.chunk_rows))
    gc.unfreeze()  # a server that starts freezes what there is, here the tests' garbage too


@pytest.fixture
def measure(folder, monkeypatch):
    """measure(server, limit_s=…, …): the outcome of CELL over that server, in place of a child."""

    def run(server, limit_s=None, timeout_s=60.0, api_key=None):
        @asynccontextmanager
        async def child(model, settings):
            run.settings = settings
            yield server.url

        monkeypatch.setattr(tune_child, "child_server", child)
        return CellRunner(str(folder), ["stages=2"], PROMPT, N_OUTPUT, api_key, timeout_s, Quiet())(CELL, limit_s)

    return run


@contextmanager
def later(*steps):
    """Run each step in a thread, one after the other, while the body runs."""
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    yield
    thread.join()


def test_the_figures_of_a_cell(start, measure):
    server = start()
    server.engine.chunk_s = 0.02
    outcome = measure(server)
    assert (outcome.status, outcome.note, outcome.cell) == ("done", "", CELL)
    assert measure.settings == ["stages=2", "chunk_rows=16", "arena_gib=0.5"]
    assert 4 * 0.02 <= outcome.ttft_s < outcome.took_s
    assert outcome.prefill_tokens_per_s == len(PROMPT) / outcome.ttft_s
    first = 300 + PROMPT[-1] % 500
    assert outcome.output_sha256 == ids_sha256(range(first, first + N_OUTPUT))
    assert outcome.least_headroom == ("0 0000:03:00.0", 3 * GIB)
    assert outcome.device_allocs == 0
    assert outcome.started.endswith("+00:00")


def test_the_least_headroom_of_all_looks_counts(start, measure):
    server = start()
    engine = server.engine

    def dip():
        wait_until(lambda: engine.n_active)
        for free_gib in (1, 2):
            engine.memory = Memory(free_gib * GIB, 48 * GIB)
            engine.headroom.sample()

    engine.step_s = 0.05
    with later(dip):
        outcome = measure(server)
    assert outcome.least_headroom == ("0 0000:03:00.0", GIB)


def test_a_key(start, measure):
    assert measure(start(keys=("secret",)), api_key="secret").status == "done"
    refused = measure(start(keys=("secret",)))
    assert (refused.status, "HTTP 401" in refused.note) == ("failed", True)


def test_a_request_that_fails(start, measure):
    server = start()
    server.engine.fail_next = "arena of stage 3: no room for 402.7 MiB"
    outcome = measure(server)
    assert (outcome.status, outcome.note) == ("failed", "the server failed: arena of stage 3: no room for 402.7 MiB")
    assert outcome.output_sha256 is outcome.ttft_s is None


def test_a_cell_that_takes_too_long(start, measure):
    server = start()
    server.engine.gate.clear()
    outcome = measure(server, timeout_s=0.5)
    assert (outcome.status, outcome.note) == ("failed", "not done after 0.5 s, which --cell-timeout-s allows")
    wait_until(lambda: server.engine.n_active == 0)  # B04: the request ends with its client


def test_a_hopeless_cell_is_ended(start, measure, monkeypatch):
    monkeypatch.setattr(respond, "COMMENT_S", 0.02)
    server = start()
    server.engine.chunk_s = 0.1
    outcome = measure(server, limit_s=0.05)
    assert outcome.status == "ended early"
    assert outcome.note.startswith("0 of 64 rows after 0 s")
    wait_until(lambda: server.engine.n_active == 0)
    assert measure(server, limit_s=20.0).status == "done"


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt(start, measure, number):
    server = start()
    server.engine.gate.clear()

    def interrupt():
        wait_until(lambda: server.engine.n_active)
        os.kill(os.getpid(), number)

    with later(interrupt), pytest.raises(KeyboardInterrupt):
        measure(server)
    wait_until(lambda: server.engine.n_active == 0)


def test_a_server_that_does_not_start(folder, monkeypatch):
    @asynccontextmanager
    async def child(model, settings):
        raise LoadError(
            'the server did not start: {"time": 1.5, "event": "failed", "error": "PlacementError: no room"}'
        )
        yield

    monkeypatch.setattr(tune_child, "child_server", child)
    outcome = CellRunner(str(folder), [], PROMPT, N_OUTPUT, None, 9.0, Quiet())(CELL, None)
    assert (outcome.status, outcome.note) == ("failed", "the server did not start: PlacementError: no room")


@pytest.mark.parametrize("message", ["no line", 'broken {"line', 'a {"event": "end", "drained": true}', "{", '{"a"} b'])
def test_other_words_stay(message):
    assert plain(message) == message


# How long a prefill may take


def looked(limit_s, *looks):
    """The first look, of (seconds, rows done) of 1,000, that ended it; and the reason."""
    patience = Patience(limit_s)
    for elapsed_s, n_done in looks:
        try:
            patience.look(f"prefill {n_done}/1000 rows, ETA 3 s", elapsed_s)
        except EndedEarly as early:
            return elapsed_s, str(early)
    return None


def test_a_prefill_that_will_be_in_time():
    assert looked(100, (5, 0), (30, 0), (50, 500), (60, 1000)) is None  # a slow beginning is no pace
    assert looked(100, *((s, 10 * s) for s in range(0, 100, 5))) is None
    assert looked(None, (10_000, 1)) is None


def test_a_prefill_that_will_not():
    ended_s, why = looked(100, (5, 0), (10, 50), (15, 75), (30, 150), (40, 200), (45, 225))
    assert ended_s == 40  # 150 rows have been seen to pass, five a second, and 800 are left
    assert why == "200 of 1,000 rows after 40 s: a TTFT of 200 s at least, limit 100"
    assert looked(100, (99, 990), (101, 999)) == (101, "999 of 1,000 rows after 101 s, limit 100")


def test_a_pace_is_believed_after_an_eighth_of_the_rows():
    assert looked(100, (5, 1), (60, 125)) is None
    assert looked(100, (5, 1), (60, 126))[0] == 60


def test_rows_that_grow_slower_never_end_what_would_be_in_time(rng):
    for _ in range(100):
        paces = [float(pace) for pace in sorted(rng.random(20) + 0.01)]  # seconds of each 50 rows
        total_s = 3.0 + sum(paces)
        looks = [(3.0 + sum(paces[:n]), 50 * n) for n in range(21)]
        assert looked(total_s * 1.0001, *looks) is None


def test_only_a_prefill_has_a_forecast():
    for comment in ("queued 0/1000 rows", "decode 1000/1000 rows", "keep-alive", ""):
        Patience(1).look(comment, 100)


# What metrics say

TEXT = """\
rocline_headroom_min_bytes{{device="0"}} 5e9
rocline_headroom_min_bytes{{device="1"}} 4e9
rocline_memory_bytes{{device="0"}} 48e9
rocline_memory_bytes{{device="1"}} 48e9
rocline_memory_bytes{{device="2"}} 48e9
rocline_card{{device="1",pci_id="0000:43:00.0"}} 1
rocline_arena_high_water_bytes{{device="0"}} 100
rocline_arena_high_water_bytes{{device="1"}} 90
rocline_arena_slab_bytes{{device="0"}} 200
rocline_arena_slab_bytes{{device="1"}} 100
# TYPE rocline_arena_device_allocs counter
rocline_arena_device_allocs_total{{device="0"}} {allocs}
rocline_arena_device_allocs_total{{device="1"}} 1
"""


def test_figures_by_card():
    got = figures(TEXT.format(allocs=3))
    assert got.min_headroom_bytes == {"0": 5 * 10**9, "1 0000:43:00.0": 4 * 10**9, "2": None}
    assert got.arenas == [(100, 200), (90, 100)]
    assert got.device_allocs == 4


def test_the_fullest_arena_and_new_allocations(start, measure, monkeypatch):
    texts = iter([TEXT.format(allocs=1), TEXT.format(allocs=3)])
    monkeypatch.setattr(tune_child, "_read", lambda url, key: next(texts))
    outcome = measure(start())
    assert (outcome.arena_high_water_bytes, outcome.arena_share) == (90, 0.9)
    assert outcome.device_allocs == 2
    assert outcome.least_headroom is None  # one card was never read


@pytest.mark.parametrize("text", ["", "rocline_up 1\n", "<html>"])
def test_other_metrics(text, start, measure, monkeypatch):
    monkeypatch.setattr(tune_child, "_read", lambda url, key: text)
    outcome = measure(start())
    assert (outcome.status, outcome.note.startswith("/metrics: ")) == ("failed", True)
