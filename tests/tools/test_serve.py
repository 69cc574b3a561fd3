"""`rocline serve`: settings and their origins, and the process as a supervisor sees it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path

import httpx
import pytest

from rocline.http.server import EXIT_ENGINE_FAILED
from rocline.http.settings import Settings
from rocline.pipeline.options import Options
from rocline.tools import cli, serve
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import tokenizer_json

ROOT = Path(__file__).resolve().parents[2]
FAKE_SERVER = ROOT / "tests" / "http_server" / "fake_server.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(demo_config()))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


@pytest.fixture(autouse=True)
def _empty_folder_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ROCLINE_"):
            monkeypatch.delenv(name)


def check(capsys, *words):
    """What --check prints; its status is 0."""
    assert cli.main(["serve", "--check", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words):
    assert cli.main(["serve", "--check", *words]) == serve.EXIT_WRONG_INPUT
    return capsys.readouterr().err


# Settings


def test_every_setting_has_a_default_and_its_origin(capsys):
    told = check(capsys, "--model", "m")
    assert told.pop("model") == {"value": "m", "origin": "--model"}
    assert {entry["origin"] for entry in told.values()} == {"default"}
    for made in (Settings(), Options()):
        for name in made.__dataclass_fields__:
            value = getattr(made, name)
            assert told[name]["value"] == (list(value) if isinstance(value, tuple) else value)
    assert (told["host"]["value"], told["port"]["value"]) == ("127.0.0.1", 8000)


def test_flags_before_environment_before_file_before_defaults(capsys, monkeypatch):
    Path("rocline.toml").write_text('model = "file"\nport = 1\nchunk_rows = 11\nany_model = true\n')
    told = check(capsys)
    assert told["model"] == {"value": "file", "origin": "rocline.toml"}
    assert told["any_model"] == {"value": True, "origin": "rocline.toml"}
    monkeypatch.setenv("ROCLINE_PORT", "2")
    monkeypatch.setenv("ROCLINE_CHUNK_ROWS", "12")
    told = check(capsys, "--port", "3")
    assert told["port"] == {"value": 3, "origin": "--port"}
    assert told["chunk_rows"] == {"value": 12, "origin": "ROCLINE_CHUNK_ROWS"}
    assert told["running"] == {"value": 8, "origin": "default"}


def test_another_file(capsys, monkeypatch):
    Path("rocline.toml").write_text("port = 1\n")
    Path("other.toml").write_text('model = "other"\n')
    assert check(capsys, "--config", "other.toml")["port"]["origin"] == "default"
    monkeypatch.setenv("ROCLINE_CONFIG", "other.toml")
    assert check(capsys)["model"] == {"value": "other", "origin": "other.toml"}
    assert "none.toml: No such file or directory" in refusal(capsys, "--config", "none.toml")


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("--aliases", "a, b", ["a", "b"]),
        ("--thinking", "false", False),
        ("--kv-tokens", "5000", 5000),
        ("--drain-s", "2.5", 2.5),
        ("--placement", "contiguous", "contiguous"),
    ],
)
def test_words_become_the_settings_type(capsys, word, name, value):
    assert check(capsys, "--model", "m", word, name)[word[2:].replace("-", "_")]["value"] == value


def test_unknown_names_are_refused_with_the_nearest(capsys, monkeypatch):
    Path("rocline.toml").write_text("chunk_row = 3\n")
    assert "rocline.toml: no setting chunk_row; the nearest is chunk_rows" in refusal(capsys, "--model", "m")
    Path("rocline.toml").unlink()
    monkeypatch.setenv("ROCLINE_CHUNKROWS", "3")
    message = refusal(capsys, "--model", "m")
    assert "no setting ROCLINE_CHUNKROWS; the nearest is ROCLINE_CHUNK_ROWS" in message
    with pytest.raises(SystemExit):
        cli.main(["serve", "--chunk-row", "3"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model"),
        (["--port", "70000"], "serve: --port 70000: must be 0 to 65535"),
        (["--port", "many"], "serve: --port many: must be a whole number"),
        (["--chunk-rows", "0"], "serve: --chunk-rows 0: must be 1 to"),
        (["--placement", "elsewhere"], "serve: --placement elsewhere: must be folded or contiguous"),
        (["--drain-s", "soon"], "serve: --drain-s soon: must be a number"),
        (["--thinking", "maybe"], "serve: --thinking maybe: must be true or false"),
        (["--reference-op", "rope"], "serve: --reference-op rope: on the CPU every operator is its torch reference"),
        (["--api-key-file", "none"], "serve: api_key_file = none: No such file or directory\n"),
        (["--served-name", ""], "served_name is empty"),
    ],
)
def test_wrong_values_are_refused_with_their_origin(capsys, words, message):
    assert message in refusal(capsys, *(["--model", "m", *words] if words else []))


def test_values_are_told_as_their_origin_has_them(capsys, monkeypatch):
    Path("rocline.toml").write_text('port = 70000\nstages = "x"\n')
    assert "rocline.toml: stages = 'x': must be a whole number" in refusal(capsys, "--model", "m")
    Path("rocline.toml").write_text("port = 70000\n")
    assert "rocline.toml: port = 70000: must be 0 to 65535" in refusal(capsys, "--model", "m")
    monkeypatch.setenv("ROCLINE_PORT", "70001")
    assert "ROCLINE_PORT=70001: must be 0 to 65535" in refusal(capsys, "--model", "m")


def test_a_refusal_prints_no_settings(capsys):
    """Nothing on stdout: a script that reads it would take them for good."""
    for words in (("--port", "70000"), ("--api-key-file", "none")):
        assert cli.main(["serve", "--check", "--model", "m", *words]) == serve.EXIT_WRONG_INPUT
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["port = ", "port = 'x'", "port = true", "aliases = 'a'\nport = 1.5"])
def test_a_broken_file_is_refused(capsys, text):
    Path("rocline.toml").write_text(text)
    assert "rocline.toml" in refusal(capsys, "--model", "m")


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in serve.SETTINGS:
        assert re.search(rf"--{name.replace('_', '-')} \S+\s+\w", text), name
    for python in ("None", "True", "False", "()", "(default )"):
        assert python not in text
    assert "--stages N " in text
    assert "--drain-s S " in text
    assert "--model FOLDER " in text
    assert "--any-model true|false" in text
    assert "--prefill {halo,full}" in text


def test_api_keys_from_file_and_environment():
    Path("keys").write_text("one\n\n two \n")
    settings = Settings(api_key_file="keys")
    assert serve.api_keys(settings, {"ROCLINE_API_KEYS": "three, four"}) == ["three", "four", "one", "two"]
    assert serve.api_keys(Settings(), {}) == []
    Path("keys").write_text("\n")
    with pytest.raises(serve.ConfigurationError, match="holds no key"):
        serve.api_keys(settings, {})


def test_a_folder_that_is_no_model(capsys, model):
    Path("empty").mkdir()
    assert cli.main(["serve", "--model", "empty"]) == serve.EXIT_WRONG_INPUT
    assert "config.json" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--workers", "1", "--port", str(port))
        assert cli.main(["serve", "--model", str(model), *words]) == serve.EXIT_WRONG_INPUT
        assert capsys.readouterr().err == (
            f"serve: 127.0.0.1, port {port}: Address already in use; choose another with --host or --port\n"
        )


@pytest.mark.parametrize("origin", ["--context", "ROCLINE_CONTEXT", "rocline.toml"])
def test_more_context_than_the_model_has_is_refused(capsys, model, monkeypatch, origin):
    """And nothing is opened for it."""
    monkeypatch.setattr(serve, "open_engine", None)
    words, said = ["--model", str(model)], "--context 65537"
    if origin == "--context":
        words += ["--context", "65537"]
    elif origin == "ROCLINE_CONTEXT":
        monkeypatch.setenv(origin, "65537")
        said = "ROCLINE_CONTEXT=65537"
    else:
        Path(origin).write_text("context = 65537\n")
        said = "rocline.toml: context = 65537"
    assert cli.main(["serve", *words]) == serve.EXIT_WRONG_INPUT
    assert capsys.readouterr().err == f"serve: {said}: must be 1 to 65536, the model's limit\n"


# The process


class Process:
    """A server process over a fake engine."""

    def __init__(self, model, *words, **environment):
        self._process = subprocess.Popen(
            [sys.executable, str(FAKE_SERVER), str(model), "--port", "0", "--workers", "1", *words],
            stderr=subprocess.PIPE, text=True, cwd=model, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.pid, self.lines = self._process.pid, []

    def wait_until_ready(self):
        while not self.lines or self.lines[-1]["event"] != "start":
            self.lines.append(json.loads(self._process.stderr.readline()))
        self.url = self.lines[-1]["url"]
        self.children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert self.children

    def send(self, number):
        self._process.send_signal(number)

    def end(self):
        """Its exit status."""
        self.lines += (json.loads(line) for line in self._process.stderr if line.startswith("{"))
        return self._process.wait(20)

    def wait_until_alone(self):
        """None of the processes it started is left."""
        deadline_s = time.monotonic() + 5
        while [pid for pid in self.children if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@pytest.fixture(scope="module")
def processes(model, tmp_path_factory):
    """Started together: most of their start is importing torch."""
    socket_path = str(tmp_path_factory.mktemp("notify") / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(socket_path)
        listener.settimeout(60)
        started = {
            "draining": Process(model, "--step-s", "0.01", NOTIFY_SOCKET=socket_path),
            "stuck": Process(model, "--step-s", "30"),
            "failing": Process(model, "--fail-after-s", "0.3"),
        }
        yield started, listener
        for process in started.values():
            if process._process.poll() is None:
                process._process.kill()
            process._process.wait()
            process._process.stderr.close()


def test_sigterm_drains_and_leaves_no_process(processes):
    process, listener = processes[0]["draining"], processes[1]
    process.wait_until_ready()
    assert listener.recv(100) == b"READY=1"
    body = {"prompt": "a", "max_tokens": 60, "stream": True}
    with httpx.stream("POST", process.url + "/v1/completions", json=body) as response:
        parts = response.iter_bytes()
        text = next(parts)
        process.send(signal.SIGTERM)
        text += b"".join(parts)
    assert text.endswith(b"data: [DONE]\n\n")
    assert process.end() == 0
    assert process.lines[-1] == {**process.lines[-1], "event": "end", "drained": True}
    process.wait_until_alone()


def test_a_second_signal_does_not_wait(processes):
    process = processes[0]["stuck"]
    process.wait_until_ready()
    with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "a", "stream": True}):
        process.send(signal.SIGINT)
        time.sleep(0.3)
        started_s = time.monotonic()
        process.send(signal.SIGINT)
        assert process.end() == 1
        assert time.monotonic() - started_s < 10
    process.wait_until_alone()


def test_an_engine_that_fails_gives_a_status_to_restart_on(processes):
    process = processes[0]["failing"]
    assert process.end() == EXIT_ENGINE_FAILED
    assert process.lines[-1] == {**process.lines[-1], "event": "failed", "error": "stage 3 hangs"}


LOADS_FOR_A_MINUTE = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from rocline.tools import cli, serve

def open_slowly(model, folder, options):
    with ThreadPoolExecutor(1) as readers:  # as the checkpoint's, for which the interpreter's end waits
        readers.submit(time.sleep, 60).result()

serve.open_engine = open_slowly
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_while_it_loads_ends_it_at_once(model):
    command = [sys.executable, "-c", LOADS_FOR_A_MINUTE, "serve", "--model", str(model), "--port", "0"]
    options = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    signals = {number: subprocess.Popen(command, **options) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number, process in signals.items():
            port = json.loads(process.stderr.readline())["port"]
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
            process.send_signal(number)
            (line,) = process.communicate(timeout=20)[1].splitlines()
            assert json.loads(line)["event"] == "end"
            assert process.returncode == 0
    finally:
        for process in signals.values():
            process.kill()
            process.wait()
            process.stderr.close()


def test_the_unit_file_fits_the_server():
    unit = ConfigParser(strict=False)
    unit.optionxform = str
    unit.read(ROOT / "docs" / "rocline.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].endswith("rocline serve")
    assert float(service["TimeoutStopSec"]) > Settings().drain_s
    assert int(service["WatchdogSec"]) >= 10
    assert service["Restart"] == "on-failure"
    prevented = {int(status) for status in service["RestartPreventExitStatus"].split()}
    assert serve.EXIT_WRONG_INPUT in prevented
    assert EXIT_ENGINE_FAILED not in prevented


def test_the_help_of_a_setting_is_sentences_that_end():
    """Of settings whose text goes on in another line, too."""
    for name, setting in serve.SETTINGS.items():
        text = serve._help(name).replace("%%", "%")
        assert re.fullmatch(r"[A-Z].*[A-Za-z]\.", text), name
        assert "None" not in text
        words = " ".join((setting.owner.__doc__ or "").split())
        assert text in words
        after = words.partition(text)[2].split()
        assert not after or after[0] in {*serve.SETTINGS, "None"}, f"--{name}: goes on with {after[:6]}"
