"""The demo checkpoint: complete, small, repeatable, of the release's architecture, and alive."""

import hashlib
import json
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
from rocline.engine.engram import compressed_id_map
from rocline.engine.layout import expected_tensors
from rocline.engine.model import Model
from rocline.engine.release import release_config
from rocline.tools import cli, demo_checkpoint, demo_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SAFETENSORS_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    assert cli.main(["demo-checkpoint", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def config(folder) -> ModelConfig:
    return ModelConfig.load(folder)


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_seed_gives_every_byte(folder, tmp_path):
    start_s = time.perf_counter()
    assert cli.main(["demo-checkpoint", str(tmp_path / "again"), "--seed", "0"]) == 0
    assert time.perf_counter() - start_s < 10
    first = file_hashes(folder)
    assert file_hashes(tmp_path / "again") == first

    assert cli.main(["demo-checkpoint", str(tmp_path / "other"), "--seed", "1"]) == 0
    other = file_hashes(tmp_path / "other")
    assert other.keys() == first.keys()
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith("safetensors")}


def test_it_is_small(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 40e6


def test_layers_have_the_releases_roles(config):
    text, release = config.text_config, release_config().text_config
    assert text.layers == release.layers
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids"):
        assert getattr(text, field) == getattr(release, field)
    assert text.compress_ratios == release.compress_ratios[:40]


def test_context_is_long_and_candidates_are_few(config):
    text = config.text_config
    yarn = text.rope_scaling
    assert text.max_position_embeddings >= 65536
    assert text.max_position_embeddings == yarn.factor * yarn.original_max_position_embeddings
    assert text.candidate_topk_blocks * text.candidate_block_size <= 1024


def test_token_ids_are_the_tokenizers(folder, config):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = config.text_config
    assert text.vocab_size == tokenizer.get_vocab_size()
    assert text.engram_compressed_vocab_size == len(set(compressed_id_map(tokenizer).tolist()))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    for role in ("bos", "eos", "pad"):
        assert tokenizer.token_to_id(names[f"{role}_token"]) == getattr(config, f"{role}_token_id")
    assert config.image_token_id == tokenizer.token_to_id(demo_tokenizer.IMAGE)


def test_tensors_are_the_expected_ones(folder, config):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, n_bytes = {}, 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  not a mapping
                tensor = shard.get_tensor(name)
                found[name] = (SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))
                n_bytes += tensor.nbytes
                assert index["weight_map"].pop(name) == path.name
    assert found == {name: (spec.dtype, spec.shape) for name, spec in expected_tensors(config).items()}
    assert index == {"metadata": {"total_size": n_bytes}, "weight_map": {}}
    Checkpoint.open(folder, config).close()  # refuses what the release's reader would


def test_only_markers_are_silent(folder, config):
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(folder / weight_map["head.weight"], "pt") as shard:
        head_bf16 = shard.get_tensor("head.weight")
    silent = (head_bf16 == 0).all(dim=1).nonzero()[:, 0].tolist()
    assert silent == sorted(demo_tokenizer.load().get_added_tokens_decoder())


def test_the_model_is_alive(folder, config):
    """Loads (so every product is a normal BF16), and over real text no part of it is idle or saturated."""
    text = config.text_config
    n_rows = 600  # past the 512 candidate positions
    ids = demo_tokenizer.load().encode((ROOT / "LICENSE").read_text()).ids[:n_rows]
    assert len(ids) == n_rows
    seen: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)

    def record(layer: int, field: str, value: torch.Tensor) -> None:
        if field in ("x_in", "router.ids", "engram.gate", "index_score", "sel"):
            seen[layer, field].append(value.clone())

    model = Model.load(folder, kv_tokens=2048)
    (logits,) = model.prefill(model.open(), ids, mode="full", record=record)
    assert 1 < logits.logits_f32.std() < 6

    for layer in range(text.num_hidden_layers):
        rms = torch.cat(seen[layer, "x_in"]).float().square().mean().sqrt()
        assert 0.5 < rms < 4, layer
        chosen = torch.cat(seen[layer, "router.ids"]).flatten()
        per_expert = torch.bincount(chosen, minlength=text.n_routed_experts)
        assert per_expert.min() > 0, layer
        assert per_expert.max() <= 3 * chosen.numel() / text.n_routed_experts, layer
    for layer in text.engram_layer_ids:
        gates = torch.cat(seen[layer, "engram.gate"])
        assert 0.02 < gates.min() < gates.max() < 0.98
        assert gates.std() > 0.1
    for role in text.layers:
        if role.reads_candidates:
            best = seen[role.layer, "index_score"][-1][-1].topk(text.index_topk).indices.sort().values
            assert not torch.equal(best, seen[role.layer, "sel"][-1][-1].long()), role.layer


def test_a_folder_with_files_needs_force(folder, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["demo-checkpoint", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert cli.main(["demo-checkpoint", str(tmp_path), "--force"]) == 0
    (tmp_path / "notes.txt").unlink()
    assert file_hashes(tmp_path) == file_hashes(folder)


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for name, reason in (("file", "File exists"), ("file/model", "Not a directory")):
        assert cli.main(["demo-checkpoint", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"demo-checkpoint: {tmp_path / name}: {reason}\n"


def test_an_unfinished_folder_has_no_config(tmp_path, monkeypatch, capsys):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_checkpoint, "save_file", full_disk)
    assert cli.main(["demo-checkpoint", str(target), "--force"]) == 1
    assert capsys.readouterr().err == f"demo-checkpoint: {target}: No space left on device\n"
    assert not (target / "config.json").exists()


def test_release_skeleton_writes_the_releases_headers(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(demo_checkpoint, "write_release_skeleton", written.append)
    assert cli.main(["demo-checkpoint", "--release-skeleton", str(tmp_path)]) == 0
    assert written == [tmp_path]
    with pytest.raises(SystemExit) as stop:  # a skeleton has no weights to seed
        cli.main(["demo-checkpoint", "--release-skeleton", str(tmp_path), "--seed", "3"])
    assert stop.value.code == 2
