"""`rocline bench` against rocline's server: over a fake engine of known pace and answers, and over the real one."""

import gc
import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.digest import ids_sha256
from rocline.http import app, respond
from rocline.pipeline.options import Options
from rocline.tools import bench, cli, load_client
from rocline.tools.demo_checkpoint import demo_config, write_demo_checkpoint
from rocline.tools.demo_tokenizer import tokenizer_json
from rocline.tools.load_protocols import draw_prompts, joined_sha256, usable_ids

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "http_server"))  # servers over fake engines
from running_server import serving, wait_until  # noqa: E402

CHUNK_S, STEP_S, CHUNK_ROWS = 0.04, 0.01, 16
OTHER_SHA256 = "0" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(demo_config()))
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    return path


@pytest.fixture
def start(folder):
    """start(running=…, queue=…): a server over a fake engine with the pace above."""
    with serving(folder, ModelConfig.load(folder)) as make:

        def paced(keys=(), **options):
            server = make(keys, Options(chunk_rows=CHUNK_ROWS, **options))
            server.engine.chunk_s, server.engine.step_s = CHUNK_S, STEP_S
            return server

        yield paced
    gc.unfreeze()  # a server that starts freezes what there is, here the tests' garbage too


@pytest.fixture
def calls(monkeypatch):
    """What servers that are started from now on were asked, in order."""
    told = []

    def note(name, handler):
        def noting(request, serving):
            told.append(name)
            return handler(request, serving)

        return noting

    for name in ("_freeze_gc", "_flush_cache", "generate"):
        monkeypatch.setattr(app, name, note(name.strip("_"), getattr(app, name)))
    return told


@pytest.fixture
def measure(capsys):
    """measure(server, words...): (exit status, report, stderr without the server's log)."""

    def run(server, *words):
        protocol, *flags = words
        status = cli.main(["bench", protocol, "--url", server.url, *flags])
        captured = capsys.readouterr()
        said = [line for line in captured.err.splitlines() if not line.startswith("{")]
        return status, json.loads(captured.out) if captured.out else None, "\n".join(said)

    return run


def answer(prompt, n_tokens):
    """The fake engine's, at temperature 0."""
    first = 300 + prompt[-1] % 500
    return list(range(first, first + n_tokens))


def drawn(folder, n_prompts, n_tokens, seed=42):
    return draw_prompts(usable_ids(folder), seed, n_prompts, n_tokens)


def is_paced(tokens_per_s, at_once=1):
    """For steps of STEP_S at least. Upwards: what an event that was late to begin with can add."""
    return 0.1 * at_once / STEP_S < tokens_per_s < 1.6 * at_once / STEP_S


# The four protocols


def test_random_is_the_published_protocol_in_small(measure, start, folder, calls):
    server = start()
    status, report, err = measure(server, "random", "--prompt-tokens", "40", "--output-tokens", "40", "--runs", "3")
    assert status == 0, err
    assert calls == ["freeze_gc"] + ["flush_cache", "generate"] * 4  # one of them to warm up
    (prompt,) = drawn(folder, 1, 40)
    assert (report["output_sha256"], report["hash_of"]) == (ids_sha256(answer(prompt, 40)), "ids")
    sizes = {"prompt_tokens": 40, "output_tokens": 40, "runs": 3}
    assert report["config"] == sizes | {"prompts_sha256": ids_sha256(prompt)}
    assert [run["run"] for run in report["runs"]] == [1, 2, 3]
    for run in report["runs"]:
        assert (run["prompt_tokens"], run["completion_tokens"]) == (40, 40)
        assert run["first_event_tokens"] in (1, 2)  # two where the first event was late by a step
        assert 3 * CHUNK_S <= run["ttft_s"] < 3 * CHUNK_S + 2  # 40 rows are three chunks
        assert is_paced(run["decode_tokens_per_s"])
        assert run["total_s"] >= 3 * CHUNK_S + 39 * STEP_S
    assert min(run["first_event_tokens"] for run in report["runs"]) == 1
    for name in ("ttft_s", "decode_tokens_per_s"):
        assert report["result"][name]["mean"] == pytest.approx(sum(run[name] for run in report["runs"]) / 3)
    assert (report["warnings"], report["error"]) == ([], None)


def test_a_report_says_what_is_needed_to_repeat_it(measure, start, folder):
    _, report, err = measure(start(), "random", "--prompt-tokens", "4", "--output-tokens", "2", "--runs", "1",
                             "--seed", "7")  # fmt: skip
    assert (report["rocline_bench"], report["protocol"], report["seed"]) == (1, "random", 7)
    assert report["config"]["prompts_sha256"] == ids_sha256(drawn(folder, 1, 4, seed=7)[0])
    assert (report["server"]["api"], report["server"]["model"]["model_path"]) == ("sglang", str(folder))
    assert report["server"]["server_info"]["options"]["chunk_rows"] == CHUNK_ROWS
    environment = report["environment"]
    assert environment["rocline"] == report["server"]["version"]["version"]
    assert environment["cores"] == os.cpu_count()
    assert environment["commit"] is None or len(environment["commit"].rstrip("+")) == 40
    assert report["took_s"] > report["runs"][0]["total_s"]
    assert f"Hash of the output ids: {report['output_sha256']}" in err


def test_prefill_of_ids_and_its_progress(measure, start, monkeypatch, calls):
    monkeypatch.setattr(respond, "COMMENT_S", 0.02)
    monkeypatch.setattr(bench, "STATUS_EVERY_S", 0.0)
    server = start()
    status, report, err = measure(server, "prefill", "--prompt-tokens", "160", "--runs", "2", "--output-tokens", "3")
    assert status == 0, err
    assert calls == ["flush_cache", "generate"] * 2
    for run in report["runs"]:
        assert 10 * CHUNK_S <= run["ttft_s"] < 10 * CHUNK_S + 2
        assert run["prefill_tokens_per_s"] == 160 / run["ttft_s"]
    assert re.search(r"prefill, \d s: prefill \d+/160 rows", err)


def test_prefill_of_a_file_goes_as_a_chat(measure, start, folder, tmp_path):
    server = start()
    seen = []
    numbered = server.engine.answer
    server.engine.answer = lambda request: seen.append(request) or numbered(request)
    (tmp_path / "long.txt").write_text("Word upon word. " * 40)
    status, report, err = measure(server, "prefill", "--prompt", str(tmp_path / "long.txt"))
    assert status == 0, err
    (run,) = report["runs"]
    assert report["server"]["api"] == "openai"
    assert run["prompt_tokens"] == len(seen[0].prompt_ids) > 40
    assert run["ttft_s"] >= run["prompt_tokens"] // CHUNK_ROWS * CHUNK_S
    assert report["hash_of"] == "text"


@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_decode_of_four_streams(measure, start, folder, api):
    server = start()
    server.engine.chunk_s = 0.1  # the last stream begins long after the first
    status, report, err = measure(server, "decode", "--streams", "4", "--prompt-tokens", "16", "--output-tokens", "60",
                                  "--api", api)  # fmt: skip
    assert status == 0, err
    answers = [ids_sha256(answer(prompt, 60)) for prompt in drawn(folder, 4, 16)]
    if api == "sglang":
        assert report["output_sha256"] == joined_sha256(answers)
    assert len(report["runs"]) == 2
    for run in report["runs"]:
        assert is_paced(run["tokens_per_s"], at_once=4)
        assert 0 < run["window_tokens"] <= 4 * 57  # in step; the first has at least three before
        assert run["best_range_tokens_per_s"] > 0.5 * run["tokens_per_s"]
        assert run["window_tokens"] == pytest.approx(run["tokens_per_s"] * run["window_s"])
    assert set(report["result"]) == {"tokens_per_s"}  # no prefill figure beside it, and the best stretch is none
    assert "No result: the best quarter of a window" in err


def test_streams_that_hardly_meet(measure, start):
    server = start()
    server.engine.chunk_s = 0.1  # the second prompt's six chunks let the first stream have as many tokens
    status, _, err = measure(server, "decode", "--streams", "2", "--prompt-tokens", "96", "--output-tokens", "9")
    assert status == 0, err
    assert "Warning: the streams shared the time of less than half of their tokens" in err


def test_streams_that_the_server_runs_one_after_the_other(measure, start):
    server = start(running=1)
    status, report, _ = measure(server, "decode", "--streams", "2", "--prompt-tokens", "8", "--output-tokens", "3")
    assert status == bench.EXIT_FAILED
    assert "no moment at which all streams were decoding" in report["error"]


def test_serve(measure, start, folder, calls):
    server = start(running=4, queue=4)
    server.engine.chunk_s = 0.005
    words = ["serve", "--prompt-tokens", "20", "--output-tokens", "8", "--requests", "12", "--concurrency", "4"]
    status, report, err = measure(server, *words, "--warm-ups", "2")
    assert status == 0, err
    assert calls == ["flush_cache"] + ["generate"] * 2 + ["flush_cache"] + ["generate"] * 12
    answers = [ids_sha256(answer(prompt, 8)) for prompt in drawn(folder, 14, 20)[2:]]
    assert [run["output_sha256"] for run in report["runs"]] == answers
    assert report["output_sha256"] == joined_sha256(answers)
    assert [run["request"] for run in report["runs"]] == list(range(1, 13))
    result = report["result"]
    assert (result["answered"], result["refusals"], result["failures"]) == (12, 0, {})
    assert result["output_tokens_per_s"] == pytest.approx(12 * 8 / report["took_s"], rel=0.9)
    for name in ("ttft_s", "decode_tokens_per_s", "inter_token_s"):
        assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert result["inter_token_s"]["mean"] > STEP_S * 0.9
    assert "12 answered, 0 failed, 0 times 429" in err


def test_serve_against_a_server_that_is_full(measure, start):
    """B15 seen by a client: 429 is waited out and counted."""
    server = start(running=1, queue=1)
    words = ["serve", "--prompt-tokens", "4", "--output-tokens", "2", "--requests", "3", "--concurrency", "3"]
    status, report, err = measure(server, *words, "--warm-ups", "1")
    assert status == 0, err
    assert report["result"]["refusals"] >= 1
    assert sum(run["refusals"] for run in report["runs"]) == report["result"]["refusals"]
    assert report["result"]["answered"] == 3


# The answer before the speed

SMALL = ("random", "--prompt-tokens", "8", "--output-tokens", "4", "--runs", "2")


def test_the_expected_hash(measure, start, folder):
    wanted = ids_sha256(answer(drawn(folder, 1, 8)[0], 4))
    status, report, err = measure(start(), *SMALL, "--expect", wanted)
    assert status == 0, err
    assert report["output_sha256"] == wanted


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        ("prefill", "--prompt-tokens", "8"),
        ("decode", "--prompt-tokens", "8", "--output-tokens", "4"),
        ("serve", "--prompt-tokens", "8", "--output-tokens", "4", "--requests", "3", "--warm-ups", "1"),
    ],
)
def test_another_hash_and_no_speed(measure, start, words):
    status, report, err = measure(start(), *words, "--expect", OTHER_SHA256)
    assert status == bench.EXIT_ANOTHER_HASH
    assert f"expected {OTHER_SHA256}" in report["error"]
    assert report["error"] in err
    assert report["result"] == {}
    assert report["runs"]
    shown = json.dumps(report["runs"]) + err
    assert not any(words in shown for words in ('_s"', "per_s", "token/s", "TTFT"))


def test_runs_that_differ_have_no_hash(measure, start):
    server = start()
    turns = iter(range(300, 400))
    server.engine.answer = lambda request: [next(turns)] * request.params.max_tokens
    status, report, err = measure(server, *SMALL)
    assert (status, report["output_sha256"]) == (0, None)
    assert "Warning: the same request was not answered the same in every run" in err


@pytest.fixture
def compare(tmp_path, capsys):
    """compare(report, report): (exit status, stdout, stderr)."""

    def run(*reports):
        paths = [tmp_path / f"{n}.json" for n in range(2)]
        for path, report in zip(paths, reports, strict=True):
            path.write_text(json.dumps(report))
        status = cli.main(["bench", "compare", *map(str, paths)])
        return status, *capsys.readouterr()

    return run


def test_compare(measure, start, compare):
    server = start()
    first = measure(server, *SMALL)[1]
    server.engine.chunk_s = 4 * CHUNK_S
    second = measure(server, *SMALL, "--runs", "3")[1]  # how often is no part of the work
    status, out, err = compare(first, second)
    assert status == 0, err
    figure = json.loads(out)["figures"]["ttft_s"]
    assert figure["ratio"] == pytest.approx(second["result"]["ttft_s"]["mean"] / first["result"]["ttft_s"]["mean"])
    assert "TTFT s" in err

    for change, words, wanted in (
        ({"output_sha256": OTHER_SHA256}, "another output", bench.EXIT_ANOTHER_HASH),
        ({"output_sha256": None}, "has no one hash", bench.EXIT_ANOTHER_HASH),
        ({"hash_of": "text"}, "say nothing about each other", bench.EXIT_WRONG_INPUT),
        ({"config": first["config"] | {"prompt_tokens": 9}}, "prompt_tokens 8 and 9", bench.EXIT_WRONG_INPUT),
        ({"protocol": "prefill"}, "protocol random and prefill", bench.EXIT_WRONG_INPUT),
        ({"error": "interrupted"}, "not a whole measurement: interrupted", bench.EXIT_WRONG_INPUT),
        ({"rocline_bench": 0}, "not a report", bench.EXIT_WRONG_INPUT),
    ):
        status, out, err = compare(first, second | change)
        assert (status, out) == (wanted, "")
        assert words in err
        assert "token/s" not in err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rocline_bench": 0}'])
def test_compare_refuses_what_is_no_report(tmp_path, capsys, text):
    (tmp_path / "a.json").write_text(text)
    assert cli.main(["bench", "compare", str(tmp_path / "a.json"), "nowhere"]) == bench.EXIT_WRONG_INPUT
    assert capsys.readouterr() == (
        "",
        f"bench: {tmp_path / 'a.json'}: not a report of rocline bench; name a file with what a measurement wrote to "
        "stdout\n",
    )


def test_an_empty_prompt_is_refused(tmp_path, capsys):
    (tmp_path / "empty").touch()
    words = ("prefill", "--prompt", str(tmp_path / "empty"), "--url", "http://127.0.0.1:1")
    assert cli.main(["bench", *words]) == bench.EXIT_WRONG_INPUT
    assert capsys.readouterr().err == f"bench: {tmp_path / 'empty'}: empty; name a text of at least one character\n"


@pytest.mark.parametrize("words", [("prefill", "--prompt"), (*SMALL, "--api-key-file")])
def test_files_are_read_before_any_server_is_asked(tmp_path, capsys, words):
    """Nobody answers at port 1, which would be another error."""
    for name, reason in (("none", "No such file or directory"), ("latin", "not UTF-8 at byte 2 (0xef)")):
        (tmp_path / "latin").write_bytes(b"na\xefve")
        status = cli.main(["bench", *words, str(tmp_path / name), "--url", "http://127.0.0.1:1"])
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (bench.EXIT_WRONG_INPUT, "", 1)
        assert err.startswith(f"bench: {tmp_path / name}: {reason}")


def test_serve_is_compared_too(measure, start, compare):
    words = ("serve", "--prompt-tokens", "8", "--output-tokens", "4", "--requests", "3", "--warm-ups", "1")
    report = measure(start(), *words)[1]
    status, out, _ = compare(report, report)
    assert status == 0
    assert {figure["ratio"] for figure in json.loads(out)["figures"].values()} == {1.0}
    assert "output_tokens_per_s" in json.loads(out)["figures"]


# What goes wrong on the way


def test_a_server_whose_engine_dies_keeps_the_runs_before(measure, start):
    server = start()
    dies = iter([False, False, False, True])

    def answers(request):
        if next(dies):
            threading.Timer(0.05, server.engine.break_down, ["stage 3 hangs"]).start()
        return range(300, 300 + request.params.max_tokens)

    server.engine.answer = answers
    status, report, err = measure(server, "random", "--prompt-tokens", "8", "--output-tokens", "40")
    assert status == bench.EXIT_FAILED
    assert report["error"] == "the server failed: stage 3 hangs"
    assert [run["run"] for run in report["runs"]] == [1, 2]
    assert "decode token/s" in err


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_the_runs_before_and_leaves_the_server_free(measure, start, number):
    server = start()

    def interrupt():
        wait_until(lambda: server.engine.stats().ended.get("length", 0) == 3)  # a warm-up and two runs
        server.engine.gate.clear()
        wait_until(lambda: server.engine.n_active)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, report, err = measure(server, *SMALL, "--runs", "9")
    thread.join()
    assert (status, report["error"]) == (bench.EXIT_INTERRUPTED, "interrupted")
    assert len(report["runs"]) == 2
    assert "bench: interrupted" in err
    wait_until(lambda: server.engine.n_active == 0)  # B04: the request ends with its client


def test_a_flush_waits_for_what_still_runs(measure, start, monkeypatch):
    server = start()

    def other(n_tokens):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": n_tokens}}
        thread = threading.Thread(target=server.post, args=("/generate", body))
        thread.start()
        wait_until(lambda: server.engine.n_active)
        return thread

    thread = other(20)
    status, _, err = measure(server, "prefill", "--prompt-tokens", "4")
    thread.join()
    assert status == 0, err
    monkeypatch.setattr(load_client, "QUIET_S", 0.1)
    thread = other(100)
    status, report, _ = measure(server, "prefill", "--prompt-tokens", "4")
    thread.join()
    assert status == bench.EXIT_FAILED
    assert report["error"].startswith("HTTP 400: 1 requests run or wait")


def test_more_tokens_than_the_context_holds(measure, start):
    server = start(context=64)
    status, report, err = measure(server, "random", "--prompt-tokens", "60", "--output-tokens", "5")
    assert (status, report) == (bench.EXIT_WRONG_INPUT, None)
    assert "65 tokens of prompt and output; the server's context holds 64" in err


def test_keys(measure, start, tmp_path):
    server = start(keys=("secret",))
    status, _, err = measure(server, *SMALL)
    assert status == bench.EXIT_WRONG_INPUT
    assert "--api-key-file" in err
    (tmp_path / "key").write_text("secret\n")
    status, report, err = measure(server, *SMALL, "--api-key-file", str(tmp_path / "key"))
    assert status == 0, err
    assert "secret" not in json.dumps(report) + err


def test_ids_are_those_of_no_marker(folder):
    added = {token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    ids = usable_ids(folder)
    assert added
    assert not added & set(ids)
    assert len(added) + len(ids) == demo_config()["text_config"]["vocab_size"]


# A server of its own


def test_a_real_server_is_started_measured_and_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no rocline.toml
    write_demo_checkpoint(tmp_path / "demo", seed=0)
    words = ["--prompt-tokens", "8", "--output-tokens", "2", "--runs", "1"]
    settings = ["stages=1", "context=2048", "workers=1"]
    settings_words = [word for setting in settings for word in ("--set", setting)]
    status = cli.main(["bench", "random", "--model", "demo", *words, *settings_words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    report = json.loads(captured.out)
    assert report["server"]["settings"] == settings
    assert report["server"]["server_info"]["options"]["stages"] == 1
    assert (len(report["runs"]), report["hash_of"], report["warnings"]) == (1, "ids", [])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(report["server"]["url"].rpartition(":")[2])))
