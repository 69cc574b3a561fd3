"""`--model synthetic:SEED`: made-up words, a folder for as long as it is wanted, and `rocline tune` over servers of
it."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from tune_fakes import FakeRunner

from rocline.engine.config import ConfigError
from rocline.engine.release import release_config
from rocline.engine.text import TextTokenizer
from rocline.http.prompt import Markers
from rocline.pipeline.options import Options
from rocline.tools import cli, synthetic_model, tune
from rocline.tools.demo_checkpoint import demo_config
from rocline.tools.demo_tokenizer import VOCAB_SIZE, tokenizer_json
from rocline.tools.load_protocols import usable_ids
from rocline.tools.synthetic_model import files_of, open_engine, stretched_tokenizer

SMALL_CLI = Path(__file__).with_name("small_release.py")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The release has the demo's sizes, in servers that are started too."""
    monkeypatch.setattr(synthetic_model, "RELEASE_CONFIG", demo_config())
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(SMALL_CLI))} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(SMALL_CLI.parents[2]))
    monkeypatch.chdir(tmp_path)


def test_every_id_has_a_word_and_the_demos_keep_theirs():
    demo, more = TextTokenizer(tokenizer_json(), VOCAB_SIZE), TextTokenizer(stretched_tokenizer(5000), 5000)
    text = "def f(x): return x  # 12345, größer"
    assert more.encode(text) == demo.encode(text)
    assert more.token_bytes(4999 - 26) == b" id4973"
    before, after = Markers(tokenizer_json()), Markers(stretched_tokenizer(5000))
    assert {name: id + 904 * (id > 2) for name, id in before.ids.items()} == after.ids
    assert len(after.special) == len(before.special)
    assert json.loads(stretched_tokenizer(VOCAB_SIZE)) == json.loads(tokenizer_json())
    with pytest.raises(ValueError, match="4000 tokens: the demo's tokenizer has 4096"):
        stretched_tokenizer(4000)


def test_the_files_are_the_releases_and_go_with_the_context():
    with files_of("synthetic:7") as folder:
        assert folder.name == "synthetic:7, stores=12"
        text = release_config().text_config
        TextTokenizer.load(folder, text.vocab_size)
        assert len(usable_ids(folder)) > 0.99 * text.vocab_size
    assert not folder.parent.exists()
    with files_of("some/folder") as folder:
        assert folder == Path("some/folder")
    with pytest.raises(ConfigError, match="synthetic: and a seed"), files_of("synthetic:x"):
        pass


def test_an_engine_of_noise(small):
    with files_of("synthetic:1") as folder:
        engine = open_engine("synthetic:1", folder, Options(stages=1, context=256))
    assert engine.config.text_config.vocab_size == VOCAB_SIZE
    engine.close()


def test_tune_over_servers_of_noise(small, capsys):
    grid = ("--chunk-rows", "64", "--arena-gib", "0.25", "--stages", "1", "--set", "context=512")
    assert cli.main(["tune", "--model", "synthetic:1", "--prompt-tokens", "100", "--output-tokens", "3", *grid,
                     "--min-headroom-gib", "0", "--json"]) == 0  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["work"]["model"] == "synthetic:1"
    assert [cell["status"] for cell in report["cells"]] == ["done"]
    assert report["cells"][0]["prefill_tokens_per_s"] > 0


def test_no_plan_refuses_a_cell_of_noise(small, monkeypatch, capsys):
    """On cards whose memory the plan would count for every layer."""
    runner = FakeRunner()
    monkeypatch.setattr(tune, "CellRunner", lambda *how: runner)
    words = ["tune", "--model", "synthetic:1", "--prompt-tokens", "8", "--chunk-rows", "64", "--arena-gib", "1,2"]
    assert cli.main([*words, "--device", "hip", "--card-gib", "1"]) == 0
    assert len(runner.called) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["tune", "--model", "synthetic:1", "--prompt-tokens", "8", "--dry-run"], "say --release"),
        (["tune", "--model", "synthetic:", "--prompt-tokens", "8"], "synthetic: and a seed"),
        (["serve", "--model", "synthetic:one"], "synthetic: and a seed"),
        (["serve", "--check", "--model", "synthetic:-1"], "synthetic: and a seed"),
    ],
)
def test_wrong_input(small, capsys, words, why):
    assert cli.main(words) == 2
    assert why in capsys.readouterr().err
