"""Connections that last, that end early, and that stand still: B02, B04, B06, B07, B08 (io.md section 5.1)."""

import re
import socket
import struct
import threading
import time

import httpx
import pytest
from running_server import serving, wait_until
from wire import frames, http_bytes, read_response

from rocline.http import respond
from rocline.pipeline.options import Options

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 300}]},
    "/v1/completions": {"prompt": [300] * 300, "max_tokens": 100_000},
    "/generate": {"input_ids": [300] * 300, "sampling_params": {"max_new_tokens": 100_000}},
}
LEAVE_S = 0.5  # to notice, and to end in the engine: a chunk takes 0.05


def read_until(connection, wanted, timeout_s=10.0):
    """Everything up to and with the wanted bytes."""
    data, deadline_s = b"", time.monotonic() + timeout_s
    while wanted not in data:
        assert time.monotonic() < deadline_s, data
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def close(connection):
    connection.close()


def half_close(connection):
    connection.shutdown(socket.SHUT_WR)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture(scope="module")
def busy(model_folder, config):
    """One request runs at a time, in chunks of 64 rows."""
    with serving(model_folder, config) as make:
        server = make(options=Options(running=1, queue=8, chunk_rows=64))
        server.engine.answer = lambda request: [500] * 5000
        yield server


# A client that leaves


@pytest.mark.parametrize("leave", [close, half_close, reset])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_b04_b06_b07_a_client_that_leaves_frees_its_place(busy, server_log, route, streamed, phase, leave):
    engine = busy.engine
    engine.cancels.clear()
    engine.chunk_s = engine.step_s = 0.05 if phase == "prefill" else 0.005
    other = None
    if phase == "queued":
        other = busy.connect()
        other.sendall(http_bytes("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}))
        wait_until(lambda: engine.stats().decoding == 1)
    connection = busy.connect()
    connection.sendall(http_bytes(route, ROUTES[route] | {"stream": streamed}))
    wait_until(lambda: getattr(engine.stats(), {"queued": "queued", "prefill": "prefilling"}.get(phase, "decoding")))
    if phase == "queued":
        wait_until(lambda: engine.n_active == 2)
    server_log.text()
    started_s = time.monotonic()
    leave(connection)
    n_left = 1 if phase == "queued" else 0
    wait_until(lambda: engine.n_active == n_left, LEAVE_S)
    wait_until(lambda: len(busy.serving.jobs) == n_left)
    assert time.monotonic() - started_s < LEAVE_S
    assert len(engine.cancels) == 1  # exactly one abort
    assert '"reason": "disconnect"' in server_log.text()
    if other:
        other.close()
        wait_until(busy.quiet)
    connection.close()
    answer = busy.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    assert answer.status_code == 200  # the next is none the worse


def test_a_client_that_leaves_while_its_body_is_tokenised(server):
    connection = server.connect()
    connection.sendall(http_bytes("/v1/completions", {"prompt": "word " * 400_000, "max_tokens": 5}))
    time.sleep(0.1)
    connection.close()
    time.sleep(0.3)
    wait_until(server.quiet)
    assert server.engine.stats().decoding == 0


# A client that waits


def test_b02_headers_come_at_once_and_a_comment_after_5_s(server):
    server.engine.gate.clear()
    with server.connect() as connection:
        started_s = time.monotonic()
        connection.sendall(http_bytes("/v1/chat/completions", ROUTES["/v1/chat/completions"] | {"stream": True}))
        data = read_until(connection, b"\r\n\r\n")
        assert time.monotonic() - started_s < 1
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert data.endswith(b"\r\n\r\n")  # nothing else in the first seconds
        comment = read_until(connection, b"\n\n\r\n")
        assert time.monotonic() - started_s == pytest.approx(respond.COMMENT_S, abs=0.5)
    assert re.fullmatch(rb"[0-9a-f]+\r\n: prefill 0/\d+ rows\n\n\r\n", comment)


def test_b02_comments_tell_rows_and_eta_and_go_on_while_the_engine_stands_still(server, monkeypatch):
    monkeypatch.setattr(respond, "COMMENT_S", 0.1)
    server.engine.chunk_s = 0.06
    server.engine.options = Options(chunk_rows=100)
    body = {"prompt": [300] * 1000, "max_tokens": 1, "stream": True}
    data = server.post("/v1/completions", body).content
    comments = [frame for frame in frames(data) if frame.startswith(":")]
    assert len(comments) >= 3
    rows = [int(re.match(r": prefill (\d+)/1000 rows", comment)[1]) for comment in comments]
    assert rows == sorted(rows)
    assert re.fullmatch(r": prefill \d00/1000 rows, ETA \d s", comments[-1])
    server.engine.gate.clear()
    with server.connect() as connection:
        connection.sendall(http_bytes("/v1/completions", body))
        for _ in range(4):
            read_until(connection, b": prefill 0/1000 rows\n\n")


def test_b02_queued_requests_get_comments_too(busy, monkeypatch):
    monkeypatch.setattr(respond, "COMMENT_S", 0.1)
    busy.engine.step_s = 0.005
    with busy.connect() as first, busy.connect() as second:
        first.sendall(http_bytes("/v1/completions", ROUTES["/v1/completions"] | {"stream": True}))
        read_until(first, b"data: ")
        second.sendall(http_bytes("/v1/completions", ROUTES["/v1/completions"] | {"stream": True}))
        read_until(second, b": queued 0/300 rows\n\n")
        read_until(second, b": queued 0/300 rows\n\n")
    wait_until(busy.quiet)


@pytest.mark.parametrize("route", ROUTES)
def test_b08_newlines_before_an_answer_that_is_not_streamed(server, monkeypatch, route):
    monkeypatch.setattr(respond, "NEWLINE_S", 0.1)
    server.engine.gate.clear()
    with server.connect() as connection:
        body = dict(ROUTES[route])
        if "sampling_params" not in body:
            body["max_tokens"] = 2
        connection.sendall(http_bytes(route, body))
        data = read_until(connection, b"\r\n\r\n")
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        rest = data[data.index(b"\r\n\r\n") + 4 :]
        while rest.count(b"1\r\n\n\r\n") < 3:
            rest += connection.recv(4096)
        server.engine.gate.set()
        while not rest.endswith(b"0\r\n\r\n"):
            rest += connection.recv(1 << 20)
    assert b'"' in rest


def test_newlines_come_every_10_s_after_admission():
    assert respond.NEWLINE_S == 10
    assert respond.COMMENT_S == 5


def test_no_newline_before_admission_so_the_status_stays_open(busy, monkeypatch):
    monkeypatch.setattr(respond, "NEWLINE_S", 0.05)
    busy.engine.step_s = 0.005
    with busy.connect() as first, busy.connect() as second:
        first.sendall(http_bytes("/v1/completions", ROUTES["/v1/completions"]))
        wait_until(lambda: busy.engine.stats().decoding)
        second.sendall(http_bytes("/v1/completions", ROUTES["/v1/completions"]))
        wait_until(lambda: busy.engine.n_active == 2)
        second.settimeout(0.4)
        with pytest.raises(TimeoutError):
            second.recv(1)
    wait_until(busy.quiet)


def test_an_error_after_newlines_is_the_body(server, monkeypatch):
    monkeypatch.setattr(respond, "NEWLINE_S", 0.05)
    server.engine.gate.clear()
    threading.Timer(0.3, server.engine.gate.set).start()
    server.engine.fail_next = "broken"
    response = server.post("/v1/completions", {"prompt": "a"})
    assert response.status_code == 200
    assert response.content.startswith(b"\n")
    assert response.json()["error"] == {"message": "broken", "type": "internal_error", "code": 500}


# Time-outs


def test_b08_progress_resets_the_deadline_and_only_standing_still_meets_it(serve):
    server = serve(progress_timeout_s=0.4, options=Options(chunk_rows=100))
    server.engine.chunk_s = 0.1
    body = {"prompt": [300] * 1000, "max_tokens": 1}
    started_s = time.monotonic()
    assert server.post("/v1/completions", body).status_code == 200
    assert time.monotonic() - started_s > 0.8
    server.engine.gate.clear()
    response = server.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    *_, error, done = frames(server.post("/v1/completions", body | {"stream": True}).content)
    assert '"code":504' in error
    assert done == "data: [DONE]"
    wait_until(server.quiet)
    assert len(server.engine.cancels) == 2


def test_waiting_for_others_is_not_standing_still(serve):
    server = serve(progress_timeout_s=0.3, options=Options(running=1, queue=1))
    server.engine.step_s = 0.02
    server.engine.answer = lambda request: [500] * 40
    results = []
    bodies = [{"prompt": [300], "max_tokens": 40}, {"prompt": [301], "max_tokens": 1}]
    threads = [threading.Thread(target=lambda b=b: results.append(server.post("/v1/completions", b))) for b in bodies]
    threads[0].start()
    wait_until(lambda: server.engine.n_active == 1)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert [result.status_code for result in results] == [200, 200]


def test_a_request_has_so_much_time_in_all(serve):
    server = serve(request_timeout_s=0.4)
    server.engine.step_s = 0.02
    server.engine.answer = lambda request: [500] * 1000
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1000})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    wait_until(server.quiet)


def test_idle_connections_and_slow_headers_are_closed(serve):
    server = serve(idle_timeout_s=0.3)
    with server.connect() as silent, server.connect() as slow, server.connect() as kept:
        slow.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n")
        kept.sendall(http_bytes("/live", b"", method="GET"))
        read_until(kept, b"200 OK")
        started_s = time.monotonic()
        for _ in range(20):  # a byte now and then does not help
            if time.monotonic() - started_s > 0.5:
                break
            try:
                slow.sendall(b"X")
            except OSError:
                break
            time.sleep(0.05)
        for connection in (silent, kept, slow):
            try:
                while connection.recv(4096):
                    pass
            except ConnectionError:
                pass
        assert time.monotonic() - started_s < 2


def test_a_body_that_stops_coming_is_given_up(serve):
    server = serve(body_timeout_s=0.3)
    with server.connect() as connection:
        connection.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"text"')
        status, _, body = read_response(connection)
    assert status == 408
    assert b'"request_timeout"' in body


# A client that does not read


@pytest.mark.parametrize("leave", [None, half_close])
def test_a_slow_reader_is_cut_and_holds_up_nobody(serve, server_log, leave):
    server = serve(write_timeout_s=0.5, options=Options(running=2))
    server.engine.answer = lambda request: range(300, 300 + request.params.max_tokens)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    sampling = {"max_new_tokens": 3000}
    slow.sendall(http_bytes("/generate", {"input_ids": [1], "stream": True, "sampling_params": sampling}))
    wait_until(lambda: server.engine.stats().decoding or server.engine.n_active == 0)
    if leave:
        leave(slow)
    for _ in range(5):  # the engine and another client go on
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 5}).status_code == 200
    wait_until(lambda: not server.serving.jobs, 5)
    assert server.engine.n_active == 0
    reasons = re.findall(r'"route": "/generate".*"reason": "(\w+)"', server_log.text())
    assert len(reasons) == 1
    if not leave:
        assert server.n_tasks() < 12
    slow.close()


def test_deltas_merge_while_a_client_reads_slowly(server):
    """What a stream sends is bounded by what is read, not by the number of tokens."""
    server.engine.answer = lambda request: [500] * 2000
    with server.connect() as connection:
        connection.sendall(http_bytes("/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True}))
        time.sleep(0.2)
        _, _, body = read_response(connection)
    text = "".join(re.findall(r'"text":"([^"]*)"', body.decode()))
    assert text == server.pool.tokenizer.decode([500] * 2000)
    assert body.count(b"data: ") < 1500


def test_a_long_keep_alive_session(server):
    with httpx.Client(base_url=server.url) as client:
        for n in range(20):
            path = ("/v1/completions", "/health", "/v1/nothing", "/generate")[n % 4]
            response = client.post(path, json={"prompt": "a", "text": "a", "max_tokens": 1})
            assert response.status_code in (200, 404, 405)
