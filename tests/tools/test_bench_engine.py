"""`rocline bench engine`: labels, counts, windows and rates, one hash over sizes of chunks, over a small checkpoint and
over noise."""

import json
import weakref

import pytest
from hip_cases import write_fitting_model

from rocline.engine import release
from rocline.engine.config import ModelConfig
from rocline.engine.digest import LogitsDigest
from rocline.pipeline.engine import Engine
from rocline.tools import bench_engine, bench_requests, cli

SETTINGS = {"stages": 2, "context": 512, "kv_tokens": 8192, "chunk_rows": 8}
SMALL = ["--output-tokens", "6", *(word for pair in SETTINGS.items() for word in ("--set", "{}={}".format(*pair)))]


@pytest.fixture
def micro_model(data_folder):
    return data_folder / "micro" / "model"


@pytest.fixture
def noise(micro_model, monkeypatch):
    """Words for noise of micro's sizes."""
    monkeypatch.setattr(bench_engine, "release_config", lambda: ModelConfig.load(micro_model))
    return ["--weights", "synthetic:3", "--stores", "2"]


@pytest.fixture
def measure(capsys):
    """measure(words...): (exit status, lines of stdout, stderr)."""

    def run(*words):
        status = cli.main(["bench", "engine", *SMALL, *words])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_the_figures(measure, micro_model):
    words = ["--model", str(micro_model), "--decode", "1,2", "--decode-context", "5", "--prefill", "40"]
    status, (opened, one, two, *on_the_way, prefill), _ = measure(*words, "--report-rows", "8")
    assert status == 0
    assert opened["line"] == "opened"
    assert opened["seconds"] > 0
    assert opened["settings"]["kv_tokens"] == 8192
    assert one["tokens_s"] == pytest.approx(5 / one["seconds"])  # the first token begins the window
    assert (one["streams"], two["streams"]) == (1, 2)
    assert prefill["tokens_s"] == pytest.approx(40 / prefill["seconds"])
    assert all(line["line"] == "rows" and 8 <= line["rows"] < 40 for line in on_the_way)
    assert [line["rows"] for line in on_the_way] == sorted({line["rows"] for line in on_the_way})
    for line in (one, two, prefill):
        assert len(line["output_sha256"]) == 64
        assert line["peak_bytes"][0] > 0
        assert line["least_headroom_bytes"] > 0
        assert line["device_allocs"] == {"driver": None, "torch": None, "card_bytes_fallen": None}  # no devices
        assert len(line["arena_high_water_bytes"]) == len(line["busy_s"]) == 2


def test_every_line_says_what_it_is_of(measure, noise):
    status, lines, _ = measure(*noise, "--prefill", "20", "--report-rows", "8", "--commit", "1234", "--seed", "7")
    assert status == 0
    labels = {"rocline_bench": "engine", "weights": "synthetic:3, stores=2", "seed": 7, "device": "cpu", "devices": 2}
    labels |= {"stages": 2, "chunk_rows": 8, "prefill": "halo", "arena_bytes": [1 << 30] * 2}
    for line in lines:
        assert {name: line[name] for name in labels} == labels
        assert line["commit"]
    assert release.release_config().text_config.num_hidden_layers == 40


def test_the_same_answers_however_it_is_cut(measure, noise):
    """And whatever ran before; another seed, of the weights or of the prompts, has others."""
    words = ["--prefill", "20", "--decode", "1", "--decode-context", "9"]
    hashes = []
    for cut in ([], ["--set", "stages=3", "--prefill", "30,20"], ["--seed", "4"], ["--weights", "synthetic:4"]):
        status, lines, _ = measure(*noise, *words, *cut)
        assert status == 0
        hashes.append([line["output_sha256"] for line in lines if "output_sha256" in line])
    first, longer, *others = hashes
    assert [longer[0], longer[2]] == first
    assert first not in others


def test_a_prefills_hash_is_of_its_logits_too(measure, noise, monkeypatch):
    """One id stays the same when much is wrong."""
    _, (_, line), _ = measure(*noise, "--prefill", "20")
    add = LogitsDigest.add
    monkeypatch.setattr(LogitsDigest, "add", lambda digest, logits_f32: add(digest, logits_f32 + 1e-3))
    _, (_, other), _ = measure(*noise, "--prefill", "20")
    assert line["output_sha256"] != other["output_sha256"]


def test_a_step_of_one_row_reads_the_chosen_experts(measure, micro_model):
    _, (_, one, two), _ = measure("--model", str(micro_model), "--decode", "1,2", "--decode-context", "5",
                                  "--set", "groups=1")  # fmt: skip
    text = ModelConfig.load(micro_model).text_config
    assert one["modelled_a_step"]["rows"] == 1
    assert one["modelled_a_step"]["experts_a_layer"] == text.num_experts_per_tok
    assert two["modelled_a_step"]["experts_a_layer"] < 2 * text.num_experts_per_tok
    assert one["modelled_a_step"]["weight_bytes"] < two["modelled_a_step"]["weight_bytes"]


def test_sizes_of_chunks_one_after_another(measure, noise):
    status, lines, _ = measure(*noise, "--prefill", "20", "--chunk-rows", "5,8")
    assert status == 0
    assert [(line["line"], line["chunk_rows"]) for line in lines] == [
        ("opened", 5),
        ("prefill", 5),
        ("opened", 8),
        ("prefill", 8),
        ("hashes", [5, 8]),
    ]
    assert lines[1]["output_sha256"] == lines[3]["output_sha256"]


def test_another_hash_ends_the_sweep(measure, noise, monkeypatch):
    """With a status of its own; the lines before it stay."""
    prefill = bench_requests.Requests.prefill

    def by_chunk(self, n_tokens, report_rows):
        prefill(self, n_tokens, report_rows)
        return f"hash of {min(self._engine.options.chunk_rows, 6)}"

    monkeypatch.setattr(bench_requests.Requests, "prefill", by_chunk)
    status, lines, err = measure(*noise, "--prefill", "20", "--chunk-rows", "8,9,5,7")
    assert status == 3
    assert [line["line"] for line in lines] == ["opened", "prefill"] * 3
    assert "prefill of 20: hash of 5 with chunks of 5 rows, hash of 6 with 8" in err


def test_a_size_that_fails_is_told_and_the_next_one_runs(measure, noise):
    arena = ["--set", "arena_gib=0.001"]
    status, lines, err = measure(*noise, *arena, "--prefill", "400", "--chunk-rows", "400,8")
    assert status == 1
    assert [line["line"] for line in lines] == ["opened", "failed", "opened", "prefill"]
    assert "no room" in lines[1]["why"]
    assert lines[1]["what"] == "prefill of 400"
    assert "prefill of 400, chunks of 400 rows: arena of stage" in err


def test_streams_that_never_meet_have_no_rate(measure, micro_model):
    """Told, and the next request runs all the same."""
    words = ["--model", str(micro_model), "--decode", "2,1", "--decode-context", "9", "--set", "kv_tokens=2048"]
    status, lines, err = measure(*words)
    assert status == 1
    assert [line["line"] for line in lines] == ["opened", "failed", "decode"]
    assert "never decoded at the same time" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "stages=0"], "stages=0: must be"),
        (["--set", "stage=2"], "NAME=VALUE with a name of"),
        (["--chunk-rows", "70000"], "chunk_rows = 70000: must be"),
        (["--weights", "noise"], "synthetic:SEED"),
        (["--weights", "synthetic:x"], "a number from 0"),
        (["--decode", "1", "--decode-context", "600"], "the context holds 512"),
        (["--prefill", "512"], "the context holds 512"),
        (["--set", "context=4097"], "--set context=4097: must be 1 to 4096, the model's limit"),
        (["--decode", "9", "--decode-context", "5"], "8 run at a time"),
        (["--decode", "1", "--output-tokens", "1"], "2 at least"),
        (["--prefill", ""], "nothing to do"),
        (["--profile"], "--device hip"),
    ],
)
def test_wrong_input(measure, noise, words, why):
    status, lines, err = measure(*noise, "--prefill", "20", *words)
    assert (status, lines) == (2, [])
    assert err.startswith("bench: ")
    assert why in err


def test_a_folder_that_is_not_there(measure):
    status, _, err = measure("--model", "nowhere", "--prefill", "20")
    assert status == 2
    assert "nowhere" in err


def test_on_a_device_nothing_is_allocated(measure, micro_model, hip_device, tmp_path):
    model = write_fitting_model(micro_model, tmp_path / "model")
    words = ["--device", "hip", "--set", "devices=1", "--set", "running=1", "--set", "arena_gib=0.06"]
    requests = ["--prefill", "20", "--decode", "1", "--decode-context", "5"]
    status, (opened, *results), err = measure("--model", str(model), *words, *requests)
    assert status == 0, err
    assert opened["devices"] == 1
    nothing = {"driver": 0, "torch": None if hip_device == "cpu" else 0, "card_bytes_fallen": 0}
    for line in results:
        assert line["device"] != "cpu"
        assert line["device_allocs"] == nothing
        assert line["peak_bytes"][0] >= sum(line["arena_bytes"])


def test_an_engine_goes_before_the_next_one_comes(measure, noise, monkeypatch):
    """Two of them would not fit a card."""
    opened, alive = [], []

    def open_engine(*how):
        alive.append(sum(ref() is not None for ref in opened))
        engine = Engine(*how)
        opened.extend(map(weakref.ref, (engine, engine.weights)))
        return engine

    monkeypatch.setattr(bench_engine, "Engine", open_engine)
    status, _, _ = measure(
        *noise, "--prefill", "20", "--decode", "2", "--decode-context", "5", "--chunk-rows", "5,8,20"
    )
    assert (status, alive) == (0, [0, 0, 0])


def test_what_was_typed_is_quoted_as_it_is(measure):
    """Not read as markup, and `:x:` is no picture."""
    status, _, err = measure("--weights", "synthetic:x:[b]", "--decode", "1")
    assert (status, "synthetic:x:[b]: write synthetic: and a seed" in err) == (2, True)
