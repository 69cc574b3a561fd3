"""Health, metrics, logs, draining, and an engine that fails (design.md section 9)."""

import json
import os
import re
import socket
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import wait_until
from wire import frames

from rocline.http import server as server_module
from rocline.http.server import EXIT_ENGINE_FAILED, EXIT_FAILED, notify
from rocline.pipeline.headroom import Headroom, Memory, Source
from rocline.pipeline.options import Options
from rocline.pipeline.stats import State

SECRET = "a most secret sentence"
MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"


# Loading and readiness


def test_while_the_engine_loads_health_is_503_and_live_is_200(serve):
    server = serve(start=False)
    loaded = threading.Event()
    server.opening = lambda: loaded.wait(10) and server.engine
    server._thread.start()
    wait_until(lambda: hasattr(server, "server") and server.port)
    wait_until(lambda: httpx.get(server.url + "/live").status_code == 200)
    assert httpx.get(server.url + "/health").status_code == 503
    ready = httpx.get(server.url + "/ready")
    assert (ready.status_code, ready.json()["state"]) == (503, "starting")
    response = server.post("/v1/completions", {"prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "not_ready"
    assert httpx.get(server.url + "/v1/models").status_code == 200
    assert "rocline_up 0.0" in httpx.get(server.url + "/metrics").text
    loaded.set()
    wait_until(lambda: server.serving.state is State.READY)
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/ready").json() == {"state": "ready", "reason": ""}
    assert httpx.get(server.url + "/health").content == b""


def test_an_engine_that_does_not_open_ends_the_server(serve, server_log):
    server = serve(start=False)

    def fail():
        raise ValueError("no such shard")

    server.opening = fail
    server._thread.start()
    assert server.join() == EXIT_FAILED
    assert server_log.lines("failed")[0]["error"] == "ValueError: no such shard"


def test_a_stop_while_the_engine_loads_does_not_wait_for_it(serve):
    server = serve(start=False)
    loaded = threading.Event()
    server.opening = lambda: loaded.wait(30) and server.engine
    server._thread.start()
    wait_until(lambda: hasattr(server, "server") and server.port)
    assert server.stop(5) == 0
    loaded.set()


# Information


def test_information_routes(server):
    info = httpx.get(server.url + "/server_info").json()
    assert info == {**httpx.get(server.url + "/get_server_info").json(), "uptime_s": info["uptime_s"]}
    assert info["served_model_name"] == MODEL
    assert info["model_path"] == info["tokenizer_path"] == server.serving.folder
    assert info["options"]["chunk_rows"] == 1024
    model = httpx.get(server.url + "/model_info").json()
    assert model == httpx.get(server.url + "/get_model_info").json()
    assert model["max_model_len"] == 1 << 20
    listed = httpx.get(server.url + "/v1/models").json()
    assert listed["data"][0] == httpx.get(server.url + f"/v1/models/{MODEL}").json()
    assert listed["data"][0]["max_model_len"] == 1 << 20
    assert httpx.get(server.url + "/v1/models/other/name").status_code == 404
    assert httpx.get(server.url + "/version").json()["version"]


# Metrics


def metrics(server):
    samples = {}
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for sample in family.samples:
            samples[sample.name, *sorted(sample.labels.items())] = sample.value
    return samples


def test_metrics(serve):
    server = serve()
    server.engine.step_s = 0.001
    assert httpx.get(server.url + "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    server.post("/v1/completions", {"prompt": [300] * 10, "max_tokens": 5})
    server.post("/v1/completions", {"prompt": [300], "max_tokens": 5, "stream": True})
    server.post("/v1/completions", {"prompt": [300], "max_tokens": 0})
    httpx.get(server.url + "/no/such/path")
    wait_until(server.quiet)
    told = metrics(server)
    route = ("route", "/v1/completions")
    assert told["rocline_requests_total", ("outcome", "length"), route] == 2
    assert told["rocline_requests_total", ("outcome", "http_400"), route] == 1
    assert told["rocline_requests_total", ("outcome", "http_404"), ("route", "unknown")] == 1
    assert told[("rocline_prompt_tokens_total",)] == 11
    assert told[("rocline_output_tokens_total",)] == 10
    for name in ("queue_wait_seconds", "ttft_seconds", "request_seconds", "cold_prefill_tokens_per_second"):
        assert told[(f"rocline_{name}_count",)] == 2
    assert 1 <= told[("rocline_inter_token_seconds_count",)] <= 8
    for phase in ("queued", "prefill", "decode", "paused"):
        assert told["rocline_requests_now", ("phase", phase)] == 0
    assert told[("rocline_kv_pages_free",)] == 16
    assert told["rocline_stage_busy_seconds_total", ("stage", "0")] == 0.5
    assert told["rocline_stage_busy_ratio", ("stage", "0")] == 0
    assert told["rocline_arena_used_bytes", ("device", "0")] == 1
    assert told["rocline_arena_device_allocs_total", ("device", "0")] == 1


def test_headroom_by_device(serve):
    """A card that cannot be read has no figure of now, and does not hide the host's."""
    server, free = serve(), [Memory(3 << 30, 48 << 30), Memory(9 << 30, 64 << 30)]

    def card():
        if free[0] is None:
            raise OSError("gone")
        return free[0]

    both = [Source(0, "0000:03:00.0", card), Source(None, "", lambda: free[1])]
    server.engine.headroom = headroom = Headroom(both, interval_s=None)
    free[:] = Memory(2 << 30, 48 << 30), Memory(8 << 30, 64 << 30)
    headroom.sample()
    free[:] = None, Memory(10 << 30, 64 << 30)
    headroom.sample()
    told = metrics(server)

    def of(name):
        return {labels[0][1]: value for (sample, *labels), value in told.items() if sample == name}

    assert of("rocline_headroom_bytes") == {"host": 10 << 30}
    assert of("rocline_headroom_min_bytes") == {"0": 2 << 30, "host": 8 << 30}
    assert of("rocline_memory_bytes") == {"0": 48 << 30, "host": 64 << 30}
    assert told["rocline_card", ("device", "0"), ("pci_id", "0000:03:00.0")] == 1
    assert len([sample for sample, *_ in told if sample == "rocline_card"]) == 1


# Logs


def test_a_request_has_one_line_with_its_figures_and_no_text(server, server_log, speaker):
    speaker.says(server.engine, f"{SECRET}<｜end▁of▁sentence｜>")
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "user": SECRET})
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [SECRET]}], "user": SECRET})
    server.post("/v1/completions", {"prompt": SECRET, "max_tokens": SECRET})
    server.post(f"/{SECRET}", {"prompt": SECRET})
    wait_until(server.quiet)
    told = server_log.text()
    assert SECRET not in told
    assert "secret" not in told
    lines = [json.loads(line) for line in told.splitlines()]
    (line,) = [line for line in lines if line["event"] != "running"]  # that of every 10 s may come in between
    assert set(line) == {
        "time", "event", "id", "choice", "route", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s",
        "prefill_tokens_per_s", "decode_tokens_per_s", "chunk_rows", "output_ids_sha256", "device_allocs",
        "min_headroom_bytes", "reason",
    }  # fmt: skip
    assert (line["route"], line["reason"], line["chunk_rows"]) == ("/v1/chat/completions", "stop", 1024)
    assert line["output_tokens"] == len(speaker.ids(SECRET)) + 1
    assert re.fullmatch("[0-9a-f]{64}", line["output_ids_sha256"])


def test_a_request_is_told_the_least_headroom_while_it_ran(serve, server_log):
    """Not what was least before it began, nor while it waited for others."""
    server = serve(options=Options(running=1))
    engine, threads = server.engine, []

    def ask(n):
        body = {"prompt": [300], "max_tokens": n}
        threads.append(threading.Thread(target=server.post, args=("/v1/completions", body)))
        threads[-1].start()
        wait_until(lambda: engine.n_active == len(threads))

    def finds(*gib):
        for free_gib in gib:
            engine.memory = Memory(free_gib << 30, 48 << 30)
            engine.headroom.sample()

    finds(1, 9)
    engine.gate.clear()
    ask(2)
    finds(8)
    ask(3)
    finds(4, 7)
    engine.gate.set()
    for thread in threads:
        thread.join(10)
    wait_until(server.quiet)
    told = {line["output_tokens"]: line["min_headroom_bytes"] for line in server_log.lines("request")}
    assert told == {2: 4 << 30, 3: 7 << 30}


def test_broken_requests_and_handlers_log_no_text(server, server_log, monkeypatch):
    for data in (f"NONSENSE {SECRET}\r\n\r\n", f"POST /generate HTTP/1.1\r\nContent-Length: {SECRET}\r\n\r\n"):
        with server.connect() as connection:
            connection.sendall(data.encode())
            assert b" 400 " in connection.recv(4096)

    async def broken(method, body):
        raise RuntimeError(f"cannot take {body!r}")

    monkeypatch.setattr(server.pool, "run", broken)
    response = server.post("/v1/completions", {"prompt": SECRET})
    assert response.status_code == 500
    assert SECRET not in response.text
    told = server_log.text()
    assert "secret" not in told
    (line,) = [json.loads(line) for line in told.splitlines()]
    assert (line["event"], line["error"]) == ("error", "RuntimeError")
    assert "test_operation.py" in line["where"]


def test_one_line_at_the_start_and_one_now_and_then(serve, server_log, monkeypatch):
    assert server_module.LOG_S == 10
    monkeypatch.setattr(server_module, "LOG_S", 0.1)
    monkeypatch.setattr(server_module, "TICK_S", 0.05)
    server = serve()
    (start,) = server_log.lines("start")
    assert start["url"] == server.url
    assert start["options"]["chunk_rows"] == 1024
    assert start["stages"][0]["layers"] == [0, 1]
    time.sleep(0.2)
    assert server_log.lines("running") == []  # nothing runs
    server.engine.gate.clear()
    thread = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "a", "max_tokens": 2}))
    running, began_s = [], time.monotonic()
    thread.start()
    wait_until(lambda: running.extend(server_log.lines("running")) or len(running) >= 3)
    assert len(running) <= 1 + (time.monotonic() - began_s) / 0.1
    server.engine.gate.set()
    thread.join()
    assert running[0]["prefilling"] == 1
    assert (running[0]["headroom_bytes"], running[0]["min_headroom_bytes"]) == ([3 << 30], 3 << 30)


# The end


def test_a_drain_lets_requests_end_and_takes_no_new_ones(serve, server_log):
    server = serve(drain_s=10)
    server.engine.step_s = 0.01
    server.engine.answer = lambda request: [500] * 50
    results = []
    thread = threading.Thread(target=lambda: results.append(server.post("/v1/completions", {"prompt": "a"})))
    thread.start()
    wait_until(lambda: server.engine.n_active == 1)
    server.loop.call_soon_threadsafe(server.server.stop)
    wait_until(lambda: server.serving.state is State.DRAINING)
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.get(server.url + "/live").status_code == 200
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    thread.join(5)
    assert results[0].json()["choices"][0]["finish_reason"] == "length"
    assert server.join() == 0
    assert server_log.lines("end")[0]["drained"] is True


def test_a_drain_has_an_end(serve, server_log):
    server = serve(drain_s=0.2)
    server.engine.gate.clear()
    results = {}
    threads = [
        threading.Thread(
            target=lambda s=s: results.update({s: server.post("/v1/completions", {"prompt": "a", "stream": s})})
        )
        for s in (False, True)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.engine.n_active == 2)
    server.loop.call_soon_threadsafe(server.server.stop)
    assert server.join() == 0
    for thread in threads:
        thread.join(5)
    assert (results[False].status_code, results[False].json()["error"]["code"]) == (503, "shutting_down")
    *_, error, done = frames(results[True].content)
    assert '"code":503' in error
    assert done == "data: [DONE]"
    told = server_log.lines()
    assert [line["reason"] for line in told if line["event"] == "request"] == ["shutdown", "shutdown"]
    assert told[-1] == {**told[-1], "event": "end", "drained": False}


def test_an_engine_that_fails_ends_the_server_with_a_code_to_restart_on(serve, server_log, monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.05)
    server = serve()
    server.engine.gate.clear()
    results = []
    body = {"prompt": "a", "stream": True}
    thread = threading.Thread(target=lambda: results.append(server.post("/v1/completions", body)))
    thread.start()
    wait_until(lambda: server.engine.n_active == 1)
    server.engine.break_down("stage 3 hangs: restart the server")
    thread.join(5)
    *_, error, done = frames(results[0].content)
    assert "stage 3 hangs" in error
    assert done == "data: [DONE]"
    assert server.join() == EXIT_ENGINE_FAILED
    assert server_log.lines("failed")[0]["error"] == "stage 3 hangs: restart the server"


# systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_notify(tmp_path, monkeypatch, abstract):
    notify("READY=1")  # nobody listens
    name = f"\0rocline-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        notify("READY=1\nSTATUS=here")
        assert listener.recv(100) == b"READY=1\nSTATUS=here"
    notify("READY=1")  # it has gone


def test_a_unit_hears_when_it_is_ready_alive_and_stopping(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        server = serve()
        while listener.recv(1000) != b"READY=1":  # other servers of this process may speak too
            pass
        for _ in range(3):
            assert listener.recv(1000) == b"WATCHDOG=1\nSTATUS=ready: 0 run, 0 wait"
        server.stop()
        while not (told := listener.recv(1000)).startswith(b"STOPPING=1"):
            pass
        assert b"EXTEND_TIMEOUT_USEC=" in told
