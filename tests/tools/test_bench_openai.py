"""`rocline bench` against a server that is not rocline: OpenAI's routes only, and each way in which it can fail."""

import hashlib
import json
import socket
import sys

import pytest
from tiny_openai import WORDS, running_tiny

from rocline.engine.digest import ids_sha256
from rocline.tools import bench, cli, load_client, load_protocols
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.load_protocols import draw_prompts, usable_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What --model needs beside --url."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    return path


@pytest.fixture
def tiny():
    with running_tiny() as server:
        yield server


@pytest.fixture
def measure(tiny, folder, capsys):
    """measure(protocol, flags...): (exit status, report, stderr); sizes are small where flags name none."""

    def run(protocol, *flags):
        sizes = {
            "prefill": ("--prompt-tokens", "24", "--output-tokens", "4"),
            "random": ("--prompt-tokens", "24", "--output-tokens", "6", "--runs", "2"),
            "decode": ("--prompt-tokens", "24", "--output-tokens", "6", "--streams", "2"),
            "serve": ("--prompt-tokens", "24", "--output-tokens", "3", "--requests", "12", "--concurrency", "4",
                      "--warm-ups", "3"),
        }[protocol]  # fmt: skip
        if "--prompt" in flags:
            sizes = sizes[2:]
        status = cli.main(["bench", protocol, "--url", tiny.url, "--model", str(folder), *sizes, *flags])
        captured = capsys.readouterr()
        return status, json.loads(captured.out) if captured.out else None, captured.err

    return run


def answer_sha256(n_tokens):
    return hashlib.sha256("".join(WORDS[n % 3] for n in range(1, n_tokens + 1)).encode()).hexdigest()


@pytest.mark.parametrize("usage_each", [False, True])
@pytest.mark.parametrize("protocol", ["prefill", "random", "decode", "serve"])
def test_every_protocol(measure, tiny, protocol, usage_each):
    tiny.usage_each, tiny.step_s = usage_each, 0.002
    status, report, err = measure(protocol)
    assert status == 0, err
    assert (report["error"], report["server"]["api"], report["server"]["name"]) == (None, "openai", "tiny")
    assert report["hash_of"] == "text"
    n_requests = {"prefill": 1, "random": 3, "decode": 4, "serve": 15}[protocol]
    assert len(tiny.bodies) == n_requests
    assert {len(body["prompt"]) for body in tiny.bodies} == {24}
    assert {(body["temperature"], body["ignore_eos"], body["stream"]) for body in tiny.bodies} == {(0, True, True)}
    assert any("no /flush_cache" in words for words in report["warnings"])
    estimated = any("does not count tokens" in words for words in report["warnings"])
    assert estimated == (protocol == "decode" and not usage_each)


def test_random_sends_one_drawn_prompt_again_and_again(measure, tiny, folder):
    _, report, _ = measure("random")
    prompt = draw_prompts(usable_ids(folder), 42, 1, 24)[0]
    assert [body["prompt"] for body in tiny.bodies] == [list(prompt)] * 3
    assert report["config"]["prompts_sha256"] == ids_sha256(prompt)
    assert report["output_sha256"] == answer_sha256(6)


def test_a_file_is_a_chats_message_and_its_reasoning_counts(measure, tiny, tmp_path):
    (tmp_path / "prompt.txt").write_text("Wie grüßt man die Welt?")
    tiny.step_s = 0.05
    status, report, err = measure("prefill", "--prompt", str(tmp_path / "prompt.txt"), "--runs", "2")
    assert status == 0, err
    assert tiny.bodies[0]["messages"] == [{"role": "user", "content": "Wie grüßt man die Welt?"}]
    assert "ignore_eos" not in tiny.bodies[0]
    for run in report["runs"]:
        assert run["prompt_tokens"] == 11
        assert 0.05 <= run["ttft_s"] < run["total_s"] - 3 * 0.05  # the role's event before it does not count
        assert run["prefill_tokens_per_s"] == pytest.approx(11 / run["ttft_s"])


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("500", "HTTP 500: no room 500"),
        ("429", "HTTP 429: no room 429"),
        ("error", "the server failed: a stage failed"),
        ("cut", "the connection broke"),
        ("no end", "the answer ended without [DONE]"),
        ("no usage", "does not tell prompt_tokens"),
        ("one token less", "completion_tokens is 5, must be 6"),
        ("empty first", "the first event carries no token"),
        ("cached", "not cold: 8 of 24 prompt tokens were cached"),
        ("silent", "silent for longer than the read time-out"),
    ],
)
def test_what_fails_is_told_and_what_was_measured_is_kept(measure, tiny, trouble, words):
    tiny.step_s = 0.005
    tiny.trouble = lambda number: trouble if number == 4 else None  # a warm-up and two runs before
    status, report, err = measure("random", "--runs", "4", "--read-timeout-s", "0.5")
    assert status == bench.EXIT_FAILED
    assert words in report["error"]
    assert f"bench: {report['error']}" in err
    assert [run["run"] for run in report["runs"]] == [1, 2]
    assert report["result"]["ttft_s"]["mean"] > 0
    assert "decode token/s" in err


def test_serve_counts_failures_by_reason(measure, tiny):
    tiny.trouble = lambda number: {6: "cut", 8: "500", 9: "cut", 11: "one token less"}.get(number)
    status, report, err = measure("serve")
    assert status == bench.EXIT_FAILED
    assert report["result"]["failures"] == {
        "the connection broke": 2,
        "HTTP 500: no room 500": 1,
        "completion_tokens is 2, must be 3": 1,
    }
    assert "4 of 12 requests failed (2: the connection broke; 1: " in err
    assert "8 answered, 4 failed" in err
    assert len(report["runs"]) == 12
    assert report["output_sha256"] is None


def test_serve_honours_429_and_counts_it(measure, tiny, monkeypatch):
    monkeypatch.setattr(load_protocols, "LONGEST_RETRY_S", 0.01)
    tiny.trouble = lambda number: "429" if number in (5, 6, 9) else None
    status, report, err = measure("serve")
    assert status == 0, err
    assert report["result"]["refusals"] == 3
    assert (report["result"]["answered"], report["result"]["failures"]) == (12, {})
    assert len(tiny.bodies) == 3 + 12 + 3
    assert "3 times 429" in err


def test_serve_gives_a_server_up_that_always_refuses(measure, tiny, monkeypatch):
    monkeypatch.setattr(load_protocols, "LONGEST_RETRY_S", 0.01)
    monkeypatch.setattr(load_protocols, "RETRY_S", 0.05)
    tiny.trouble = lambda number: "429" if number > 3 else None
    status, report, _ = measure("serve", "--requests", "2")
    assert status == bench.EXIT_FAILED
    assert report["result"]["failures"] == {"HTTP 429: no room 429": 2}
    assert "ttft_s" not in report["result"]


def test_a_warm_up_that_fails_stops_serve(measure, tiny):
    tiny.trouble = lambda number: "500" if number == 2 else None
    status, report, _ = measure("serve")
    assert status == bench.EXIT_FAILED
    assert report["error"] == "a warm-up failed: HTTP 500: no room 500"
    assert report["runs"] == []


def test_a_server_that_is_not_there(folder, capsys):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert cli.main(["bench", "random", "--url", url, "--model", str(folder)]) == bench.EXIT_FAILED
    captured = capsys.readouterr()
    assert f"bench: {url}/model_info: cannot connect: Connection refused" in captured.err
    assert captured.out == ""


def test_a_server_that_accepts_and_says_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(load_client, "CONTROL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert cli.main(["bench", "random", "--url", url, "--model", str(folder)]) == bench.EXIT_FAILED
    assert "silent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api", "sglang"), "does not speak sglang"),
        (("--set", "chunk_rows=1"), "--set is for the server that --model starts"),
        (("--model", "/nowhere"), "/nowhere/tokenizer.json"),
        (("--api-key-file", "/nowhere"), "/nowhere: "),
    ],
)
def test_wrong_input(measure, flags, words):
    status, report, err = measure("random", *flags)
    assert (status, report) == (bench.EXIT_WRONG_INPUT, None)
    assert words in err


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_what_is_no_url(folder, capsys, url):
    assert cli.main(["bench", "random", "--url", url, "--model", str(folder)]) == bench.EXIT_WRONG_INPUT
    assert "not the URL of a server" in capsys.readouterr().err


def test_no_tokenizer_no_ids(tiny, capsys):
    assert cli.main(["bench", "random", "--url", tiny.url]) == bench.EXIT_WRONG_INPUT
    assert "name a folder with its tokenizer by --model" in capsys.readouterr().err


def test_a_folder_that_is_on_another_machine(tiny, capsys):
    tiny.model_info = json.dumps({"model_path": "/elsewhere", "is_generation": True})  # an SGLang of some age
    assert cli.main(["bench", "random", "--url", tiny.url + "/v1"]) == bench.EXIT_WRONG_INPUT
    err = capsys.readouterr().err
    assert "/elsewhere/tokenizer.json: " in err
    assert "name the folder of the server's model with --model" in err


def test_a_page_for_every_path_is_no_api(measure, tiny):
    tiny.model_info = "<html>welcome</html>"
    status, report, err = measure("random")
    assert status == 0, err
    assert report["server"]["api"] == "openai"


def test_no_server_at_all(capsys):
    assert cli.main(["bench", "random"]) == bench.EXIT_WRONG_INPUT
    assert "say --url, or --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["random", "--runs", "0"],
        ["decode", "--streams", "x"],
        ["prefill"],
        ["prefill", "--prompt", "a", "--prompt-tokens", "1"],
        ["serve", "--expect", "abc"],
        ["random", "--set", "chunk_rows"],
        ["fastest"],
        [],
    ],
)
def test_wrong_flags(words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *words])
    assert stop.value.code == 2


def test_another_model_by_name(measure, tiny):
    status, report, _ = measure("random", "--name", "other")
    assert status == 0
    assert {body["model"] for body in tiny.bodies} == {"other"}
    assert report["server"]["name"] == "other"


# A server of its own, played by a script


@pytest.fixture
def child(tmp_path, monkeypatch):
    """child(lines...): what is started in place of Python says these on stderr, one each 0.1 s, and ends."""

    def play(*lines):
        script = tmp_path / "python"
        said = "".join(f"echo '{line}' >&2; sleep 0.1\n" for line in lines)
        script.write_text(f'#!/bin/sh\necho "$@" > "$0.words"\n{said}exit 70\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path / "python.words"

    return play


def test_a_server_that_does_not_start(child, folder, capsys):
    words = child("a warning", "serve: stages = 99: must be 1 to 64")
    assert cli.main(["bench", "random", "--model", str(folder), "--set", "chunk_rows=9"]) == bench.EXIT_FAILED
    captured = capsys.readouterr()
    assert "bench: the server did not start: serve: stages = 99: must be 1 to 64" in captured.err
    assert captured.out == ""
    assert f"serve --drain-s 5 --chunk-rows 9 --model {folder} --port 0" in words.read_text()


def test_a_server_that_dies_has_the_last_word(child, folder, tiny, capsys):
    child(json.dumps({"event": "start", "url": tiny.url}), json.dumps({"event": "failed", "error": "stage 3 hangs"}))
    tiny.step_s = 0.02
    tiny.trouble = lambda number: "cut" if number == 3 else None
    status = cli.main(["bench", "random", "--model", str(folder), "--prompt-tokens", "4", "--output-tokens", "4"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert status == bench.EXIT_FAILED
    assert report["error"].startswith("the connection broke; the server has ended: {")
    assert "stage 3 hangs" in report["error"]
    assert len(report["runs"]) == 1
