"""rocline perplexity: the figure is the model's own, whatever the chunks; limits, buckets, and what is refused."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocline.engine.model import Model
from rocline.engine.text import TextTokenizer
from rocline.tools import cli
from rocline.tools.perplexity import TEXT, Score, judge

N_TOKENS = 150
LOOSE = ["--limit-nats", "99", "--limit-growth", "99"]


@pytest.fixture(scope="module")
def micro(data_folder):
    return data_folder / "micro" / "model"


@pytest.fixture
def scored(micro, capsys):
    """scored(*words): what a run on micro printed, with the limits out of the way."""

    def run(*words, model=micro, n_tokens=N_TOKENS):
        words = ["perplexity", "--model", str(model), "--json", *LOOSE, *map(str, words)]
        assert cli.main([*words, "--max-tokens", str(n_tokens)]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_it_is_the_mean_of_what_the_model_says(micro, scored):
    got = scored("--bucket", 64)
    model = Model.load(micro, kv_tokens=1024)
    ids = TextTokenizer.load(micro, model.config.text_config.vocab_size).encode(TEXT.read_text())[:N_TOKENS]
    parts = model.prefill(model.open(), [model.config.bos_token_id, *ids], mode="full", all_logits=True)
    logits = torch.cat([part.logits_f32 for part in parts])[:-1].double()
    nats = -logits.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert got["nats_per_token"] == pytest.approx(float(nats.mean()), rel=2**-22)  # FP32 log-probabilities
    assert [bucket["first"] for bucket in got["buckets"]] == [0, 64, 128]
    assert [bucket["tokens"] for bucket in got["buckets"]] == [64, 64, 22]
    for bucket, part in zip(got["buckets"], nats.split(64), strict=True):
        assert bucket["nats_per_token"] == pytest.approx(float(part.mean()), rel=2**-22)
    assert got["uniform_nats"] == math.log(model.config.text_config.vocab_size)


def test_chunks_and_stages_change_no_bit(scored):
    runs = [
        scored("--chunk-rows", chunk_rows, "--bucket", 50, "--set", f"stages={stages}")
        for chunk_rows, stages in ((1024, 1), (64, 2), (17, 5))
    ]
    assert [run["chunk_rows"] for run in runs] == [1024, 64, 17]
    assert len({(run["nats_per_token"], str(run["buckets"])) for run in runs}) == 1


def test_cards_say_nearly_what_the_host_does(hip_device, scored):
    words = "--device", "hip", "--set", "arena_gib=0.06"
    on_cards, on_host = scored(*words, n_tokens=40), scored(n_tokens=40)
    assert on_cards["device"] == "hip"
    assert on_cards["nats_per_token"] == pytest.approx(on_host["nats_per_token"], rel=0.1)  # rounding alone: 0.02


def _scales_reversed(folder):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("shared_experts.w2.scale"))
    tensors[name] = tensors[name].view(torch.uint8).flip(0).contiguous().view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _other_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    "breaks",
    [_scales_reversed, _other_config(rope_theta=500), _other_config(compress_rope_theta=500)],
    ids=["scales", "rope", "compressed rope"],
)
def test_a_broken_model_scores_otherwise(micro, tmp_path, scored, breaks):
    """B34 among others: bases of RoPE. Of random weights only single tokens can tell, their mean is noise anyway."""
    broken = shutil.copytree(micro, tmp_path / "broken")
    breaks(broken)
    right, wrong = (scored("--bucket", 1, model=model)["buckets"] for model in (micro, broken))
    apart = [abs(a["nats_per_token"] - b["nats_per_token"]) for a, b in zip(right, wrong, strict=True)]
    assert max(apart) > 0.1


@pytest.mark.parametrize("bucket", [8, 4096])
def test_edges_of_buckets(bucket):
    for n_tokens, sizes in ((bucket - 1, [bucket - 1]), (bucket, [bucket]), (bucket + 1, [bucket, 1])):
        score = Score(bucket)
        for value in range(n_tokens):
            score.add([-float(value)])
        assert [b.n_tokens for b in score.buckets] == sizes
        assert [b.first for b in score.buckets] == [0, bucket][: len(sizes)]
        assert score.buckets[0].nats == sum(range(min(n_tokens, bucket)))
        assert score.n_tokens == n_tokens
        assert score.nats_per_token == (n_tokens - 1) / 2


def test_parts_change_no_bit(rng):
    values = (-rng.exponential(3, 1000)).astype("f4").tolist()
    whole, parted = Score(64), Score(64)
    whole.add(values)
    while values:
        n = int(rng.integers(0, 40))
        parted.add(values[:n])
        values = values[n:]
    assert parted == whole


@pytest.mark.parametrize(
    ("nats", "missed"),
    [
        ([3.0, 3.0, 3.0], []),
        ([2.0, 1.0, 2.4], []),
        ([2.0, 1.0, 2.5], ["25% worse"]),
        ([3.1, 3.1, 3.1], ["3.1000 nats/token, limit 3."]),
        ([2.0, 2.6, 8.0], ["4.2000 nats/token", "from token 16 on 300% worse"]),
        ([math.nan] * 3, ["nan nats/token", "nan% worse"]),
    ],
)
def test_limits(nats, missed):
    score = Score(8)
    score.add(-value for value in nats for _ in range(8))
    found = judge(score, 3.0, 0.2)
    assert len(found) == len(missed)
    assert all(words in text for words, text in zip(missed, found, strict=True))


def test_a_short_last_bucket_is_not_judged():
    score = Score(8)
    score.add([-2.0] * 8 + [-9.0] * 3)
    assert judge(score, 99, 0.2) == []
    score.add([-9.0])
    assert len(judge(score, 99, 0.2)) == 1


def test_a_limit_that_is_missed(micro, capsys):
    assert cli.main(["perplexity", "--model", str(micro), "--max-tokens", "20"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "first,tokens,nats_per_token"
    assert [line.split(",")[:2] for line in out.splitlines()[1:]] == [["0", "20"], ["all", "20"]]
    assert "ln(vocabulary) = 6.2383" in err
    assert "missed:" in err
    assert "swapped nibbles" in err


def test_a_file_of_ones_own(tmp_path, scored):
    (tmp_path / "text").write_text(TEXT.read_text()[:2000])
    got = scored(tmp_path / "text", n_tokens=60)
    assert got["nats_per_token"] == scored(n_tokens=60)["nats_per_token"]
    assert got["file"] == str(tmp_path / "text")


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (b"", [], "empty; name a text"),
        (b"na\xefve", [], "not UTF-8 at byte 2 (0xef); convert it"),
        (b"a b c " * 4000, [], "at most 4,094 fit the context: --max-tokens 4094"),
        (b"a b c " * 4000, ["--max-tokens", "5000"], "5,000 tokens, at most 4,094 fit"),
        (b"a b c", ["--set", "stages=6"], "6 stages"),
        (b"a b c", ["--set", "chunk_rows=0"], "--set chunk_rows=0: must be 1 to 65536"),
        (b"a b c", ["--chunk-rows", "70000"], "--chunk-rows 70000: must be 1 to 65536"),
        (b"a b c", ["--reference-op", "rope"], "--reference-op is for --device hip"),
        (None, [], "No such file"),
    ],
)
def test_wrong_input(micro, tmp_path, capsys, content, words, said):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["perplexity", str(file), "--model", str(micro), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_a_setting_that_is_none(micro, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["perplexity", "--model", str(micro), "--set", "chunks=2"])
    assert stop.value.code == 2
    assert "chunks=2: write NAME=VALUE with a name of device," in capsys.readouterr().err


def test_the_shipped_text():
    """Plain ASCII with line feeds, nothing of the file that it came in, and enough for several buckets."""
    text = TEXT.read_bytes()
    assert set(text) <= {10, *range(32, 127)}
    assert b"Gutenberg" not in text
    assert 100_000 < len(text) < 300_000
    assert TEXT.with_suffix(".md").is_file()
