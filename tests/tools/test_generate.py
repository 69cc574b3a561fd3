"""`rocline generate`: the same answer by every way in, streamed or as JSON, and one line for what cannot be done."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.digest import ids_sha256
from rocline.engine.model import Model
from rocline.engine.text import TextTokenizer
from rocline.tools import cli
from rocline.tools.generate import bytes_to_read

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "golden" / "micro" / "model"
TOKENIZER = TextTokenizer.load(MODEL, 512)
TEXT = "Hello <｜User｜>\r\nwörld 😀"
SAMPLING = ["--seed", "7", "--max-tokens", "2"]
COMMAND = [sys.executable, "-m", "rocline.tools.cli", "generate", str(MODEL)]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def stdin(monkeypatch):
    def give(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.fixture
def answer(capsys):
    """answer(words): what `rocline generate MODEL words --json` prints."""

    def run(*words):
        assert cli.main(["generate", str(MODEL), *SAMPLING, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_json_tells_everything(answer):
    got = answer("--prompt", TEXT, "--chunk-rows", "16", "--prefill", "full")
    ids, n_prompt = got["output_ids"], len(TOKENIZER.encode(TEXT))
    assert got["text"] == TOKENIZER.decode(ids)
    assert got["output_ids_sha256"] == ids_sha256(ids)
    assert len(got["logits_sha256"]) == 64
    assert (got["prompt_tokens"], got["output_tokens"], got["seed"]) == (n_prompt, len(ids), 7)
    assert (got["prefill"], got["chunk_rows"], got["finish_reason"]) == ("full", 16, "length")
    assert got["prefill_tokens_per_s"] == n_prompt / got["prefill_s"]
    assert got["decode_tokens_per_s"] > 0


def test_one_answer_by_every_way_in(answer, stdin, tmp_path):
    want = answer("--prompt", TEXT)
    ids = TOKENIZER.encode(TEXT)
    text_file, json_file, words_file = (tmp_path / name for name in ("text", "json", "words"))
    text_file.write_bytes(TEXT.encode())
    json_file.write_text(f" {ids}")
    words_file.write_text("\n".join(map(str, ids)) + "\n")
    ways = [("--prompt-file", text_file), ("--ids-file", json_file), ("--ids-file", words_file)]
    got = [answer(flag, str(file), "--chunk-rows", "7") for flag, file in ways]
    stdin(TEXT.encode())
    got.append(answer("--prompt-file", "-", "--prefill", "full"))
    stdin(json.dumps(ids).encode())
    got.append(answer("--ids-file", "-", "--engram", "mmap"))
    for other in got:
        for field in ("prompt_tokens", "output_ids", "text", "output_ids_sha256", "logits_sha256"):
            assert other[field] == want[field]


def test_the_stream_is_the_text_and_the_rest_is_talk(capsys, answer):
    want = answer("--prompt", TEXT)
    assert cli.main(["generate", str(MODEL), "--prompt", TEXT, *SAMPLING]) == 0
    out, err = capsys.readouterr()
    assert out == want["text"]
    lines = err.splitlines()
    n_prompt = want["prompt_tokens"]
    assert lines[0].startswith("weights: ")
    assert lines[1].startswith(f"prefill: {n_prompt} of {n_prompt} rows (100 %), ")
    assert lines[2] == ""
    assert lines[3].startswith(f"generate: prompt {n_prompt} tokens, prefill halo with chunk_rows 1,024: ")
    assert lines[4].startswith("generate: output 2 tokens, ")
    assert lines[4].endswith(" token/s; finish reason length; seed 7")
    assert lines[5] == f"generate: output_ids_sha256 {want['output_ids_sha256']}"
    assert lines[6] == f"generate: logits_sha256 {want['logits_sha256']}"
    assert len(lines) == 7


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture
def output(monkeypatch):
    """Make the model answer the given bytes, then its end token."""
    of_byte = {TOKENIZER.token_bytes(token): token for token in reversed(range(512))}

    def say(data):
        ids = iter([*(of_byte[bytes([byte])] for byte in data), 1])
        monkeypatch.setattr("rocline.engine.generation.sample", lambda logits, how, out: out.fill_(next(ids)))

    return say


WILD = b"\x1b[J\r\n\t\xf0\x9f\x98\x80\xff\x7f\xc2\x9b"


@pytest.mark.parametrize(
    ("stdout", "want"),
    [
        (io.TextIOWrapper, WILD.decode("utf-8", "replace").encode()),  # as it is, every character whole
        (Terminal, "␛[J␍\n\t😀\ufffd␡\ufffd\n".encode()),  # nothing a terminal would obey
    ],
    ids=["pipe", "terminal"],
)
def test_bytes_written(monkeypatch, output, stdout, want):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", stdout(raw, encoding="latin-1"))  # the text is UTF-8 all the same
    output(WILD)
    assert cli.main(["generate", str(MODEL), "--prompt", "a"]) == 0
    assert raw.getvalue() == want


def test_a_stop_token_writes_nothing_and_an_unfinished_character_one_replacement(answer, output):
    output(b"ok\xf0\x9f")
    got = answer("--prompt", "a", "--max-tokens", "9")
    assert (got["text"], got["finish_reason"], got["output_tokens"]) == ("ok\ufffd", "stop", 5)
    assert got["output_ids"][-1] == 1


def test_ignore_eos_writes_the_end_token(answer, output):
    output(b"ok")
    got = answer("--prompt", "a", "--max-tokens", "3", "--ignore-eos")
    assert (got["text"], got["finish_reason"]) == ("ok<｜end▁of▁sentence｜>", "length")


@pytest.fixture
def no_weights(monkeypatch):
    def load(*args, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Model, "load", load)


@pytest.mark.parametrize(
    ("words", "data", "message"),
    [
        (["--prompt", ""], b"", "empty prompt"),
        (["--prompt-file", "-"], b"", "empty prompt"),
        (["--ids-file", "-"], b"\n", "empty prompt"),
        (["--ids-file", "-"], b"[]", "empty prompt"),
        (["--ids-file", "-"], b"5 " * 4096, "prompt of 4096 tokens: at most 4095 fit"),
        (["--ids-file", "-"], b"5 512", "prompt[1] = 512: must be a token id from 0 to 511"),
        (["--ids-file", "-"], b"[5, -1]", "prompt[1] = -1"),
        (["--ids-file", "-"], b"5 six", "-: invalid literal for int() with base 10: 'six'; write token ids as"),
        (["--ids-file", "-"], b"5,6", "'5,6'; write token ids as a JSON list, or with spaces between"),
        (["--ids-file", "-"], b"[5, 6.5]", "$[1]"),
        (["--ids-file", "-"], b"[5, true]", "$[1]"),
        (["--ids-file", "-"], b"[5, 6", "truncated"),
        (["--ids-file", "-"], b"\xff", "-: not UTF-8 at byte 0 (0xff)"),
        (["--prompt-file", "-"], b"ab\xe2\x82", "-: not UTF-8 at byte 2 (0xe2)"),
        (["--prompt", os.fsdecode(b"a\xff")], b"", "--prompt: not UTF-8 at byte 1 (0xff)"),
        (["--prompt-file", "no/such"], b"", "no/such: No such file or directory"),
        (["--ids-file", str(ROOT)], b"", f"{ROOT}: Is a directory"),
        (["--prompt", "a", "--temperature", "-1"], b"", "--temperature -1.0: must be from 0 to 100"),
        (["--prompt", "a", "--temperature", "nan"], b"", "--temperature nan"),
        (["--prompt", "a", "--top-p", "0"], b"", "--top-p 0.0"),
        (["--prompt", "a", "--top-k", "-2"], b"", "--top-k -2"),
        (["--prompt", "a", "--min-p", "2"], b"", "--min-p 2.0"),
        (["--prompt", "a", "--seed", "-1"], b"", "--seed -1"),
        (["--prompt", "a", "--max-tokens", "0"], b"", "--max-tokens 0"),
    ],
)
def test_wrong_input_is_one_line_before_weights_are_read(no_weights, stdin, capsys, words, data, message):
    stdin(data)
    assert cli.main(["generate", str(MODEL), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("generate: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --prompt --prompt-file --ids-file is required"),
        (["--prompt", "a", "--ids-file", "b"], "not allowed with argument"),
        (["--prompt", "a", "--chunk-rows", "0"], "--chunk-rows: 0: must be a whole number of at least 1"),
        (["--prompt", "a", "--chunk-rows", "x"], "--chunk-rows: x: must be a whole number of at least 1"),
        (["--prompt", "a", "--seed", "x"], "invalid int value: 'x'"),
        (["--prompt", "a", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["--prompt", "a", "--prefill", "half"], "invalid choice: 'half'"),
    ],
)
def test_wrong_flags_stop_with_status_2(no_weights, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", str(MODEL), *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "config.json: No such file or directory"),
        ("tokenizer.json", "tokenizer.json: No such file or directory"),
        ("model.safetensors", "model.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(capsys, tmp_path, file, message):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / file).unlink()
    assert cli.main(["generate", str(folder), "--prompt", "a"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"generate: {folder}" in err
    assert message in err


def test_logits_that_are_not_finite_fail_by_position(monkeypatch, capsys):
    load = Model.load

    def damaged(*args, **options):
        model = load(*args, **options)
        model.weights.head_bf16[5] = float("nan")
        return model

    monkeypatch.setattr(Model, "load", damaged)
    assert cli.main(["generate", str(MODEL), "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "generate: logits of position 0 are not finite; the request cannot go on"


@pytest.mark.parametrize("engram", ["ram", "mmap"])
def test_progress_knows_the_bytes_that_will_be_read(engram):
    n_bytes = []
    Model.load(MODEL, engram=engram, advance=n_bytes.append, kv_tokens=2048)
    assert sum(n_bytes) == bytes_to_read(ModelConfig.load(MODEL), engram)


@pytest.mark.parametrize("threads", ["1", "4"])
def test_as_a_process_whatever_the_environments_threads(answer, threads):
    env = ENV | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    done = subprocess.run([*COMMAND, "--prompt", TEXT, *SAMPLING], capture_output=True, env=env, cwd=ROOT, timeout=60)
    want = answer("--prompt", TEXT)
    assert done.returncode == 0
    assert done.stdout == want["text"].encode()
    for name in ("output_ids_sha256", "logits_sha256"):
        assert f"{name} {want[name]}\n" in done.stderr.decode()


@pytest.mark.usefixtures("hears_interrupts")
def test_ctrl_c_on_a_terminal_stops_quietly():
    """Bar, text, then the interrupt while tokens come: a new line, status 130, no traceback."""
    master, slave = pty.openpty()
    command = [*COMMAND, "--prompt", "Hello", "--temperature", "0", "--max-tokens", "4000", "--ignore-eos"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=ENV | {"TERM": "xterm"}, cwd=ROOT)
    os.close(slave)
    seen = b""
    while b"strame" not in seen:  # the first tokens
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    try:
        while data := os.read(master, 4096):
            seen += data
    except OSError:  # how a pseudo-terminal says that nobody writes any more
        pass
    os.close(master)
    assert b"rows/s" in seen
    assert b"Traceback" not in seen
    assert seen.endswith(b"\r\n")


def test_a_gpu_gives_one_answer_too(hip_device, answer):
    ways = (["--chunk-rows", "7"], ["--prefill", "full"], ["--chunk-rows", "100"])
    got = [answer("--prompt", TEXT, "--device", "hip", *words) for words in ways]
    assert len({(g["output_ids_sha256"], g["logits_sha256"]) for g in got}) == 1
