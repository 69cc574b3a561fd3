"""tools/bench_http.py against a server over a fake engine: it runs, and its figures are possible."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rocline.tools import bench_http
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(tmp_path):
    """A process: the figures are of one."""
    config = demo_config()
    text = config["text_config"]
    text["max_position_embeddings"] = 1 << 20
    text["rope_scaling"]["original_max_position_embeddings"] = (1 << 20) // text["rope_scaling"]["factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/http_server/fake_server.py"), str(tmp_path),
         "--port", "0", "--step-s", "0.01", "--running", "8", "--chunk-rows", "65536", "--workers", "1"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    for line in process.stderr:
        if (start := json.loads(line))["event"] == "start":
            break
    yield start["url"], process.pid
    process.kill()
    process.communicate()


def test_the_figures(server, monkeypatch, capsys):
    url, pid = server
    for name, value in (("N_STREAMS", 4), ("N_TOKENS", 20), ("N_IDLE", 16), ("N_FIRST", 3)):
        monkeypatch.setattr(bench_http, name, value)
    monkeypatch.setattr(bench_http, "IDS_BODY", b'{"stream":true,"max_tokens":1,"prompt":[' + b"9," * 50_000 + b"9]}")
    monkeypatch.setattr(bench_http, "TEXT_BODY", b'{"stream":true,"max_tokens":1,"prompt":"' + b" the" * 5000 + b'"}')
    assert bench_http.main([url, "--pid", str(pid)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["first_byte"]["headers_s"] <= told["first_byte"]["first_event_s"] < 5
    streams = told["streams"]
    assert 0 < streams["tokens_per_s"] <= 4 / 0.01
    assert 0 < streams["events_per_token"] <= 1
    assert 0 < streams["cpu_us_per_token"] < 50_000
    assert abs(told["idle_streams"]["bytes_each"]) < 10_000_000
    for name in ("million_ids", "million_tokens_of_text"):
        assert 0 < told[name]["accepted_s"] < 10
        assert told[name]["delay_s"] == pytest.approx(told[name]["longest_gap_s"] - told[name]["median_gap_s"])


def test_a_server_that_is_not_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert bench_http.main([f"http://127.0.0.1:{port}"]) == 1
    assert "bench_http: " in capsys.readouterr().err
