"""A model's edges: wrong prompts, rows that are not finite, Engram's two homes, weights that cannot be used."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocline.arena.spans import ArenaFull
from rocline.engine.handoff import RowKind
from rocline.engine.model import Model, PromptError, split_layers
from rocline.engine.routes import StageLayers
from rocline.engine.shards import CheckpointError


@pytest.fixture(scope="module")
def folder(data_folder):
    return data_folder / "micro" / "model"


@pytest.fixture(scope="module")
def model(folder):
    return Model.load(folder)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty prompt"),
        ([9, 512], r"token id 512: must be 0\.\.511"),
        ([9, -1], r"token id -1: must be 0\.\.511"),
        ([9] * 4097, r"4097 tokens: the model's context is max_position_embeddings = 4096"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(model, ids, message):
    handle = model.open()
    with pytest.raises(PromptError, match=message):
        model.prefill(handle, ids)
    assert handle.length == 0
    assert handle.page_table == []
    model.close(handle)


def test_the_context_counts_what_is_already_there(model):
    handle = model.open()
    model.prefill(handle, [9] * 5)
    with pytest.raises(PromptError, match="4097 tokens"):
        model.prefill(handle, [9] * 4092)
    assert handle.length == 5
    model.close(handle)


def test_wrong_options_are_named(model):
    handle = model.open()
    with pytest.raises(ValueError, match="chunk_rows = 0: must be at least 1"):
        model.prefill(handle, [9], chunk_rows=0)
    with pytest.raises(ValueError, match="only 'full' runs every row"):
        model.prefill(handle, [9], all_logits=True)
    with pytest.raises(PromptError, match="9 rows to verify: at most 8"):
        model.verify(handle, [9] * 9)
    model.close(handle)


def test_all_logits_are_each_positions_own(model, rng):
    ids = rng.integers(9, 500, 70).tolist()
    handle = model.open()
    parts = model.prefill(handle, ids, mode="full", all_logits=True, chunk_rows=33)
    rows = torch.cat([part.logits_f32 for part in parts])
    assert [position for part in parts for _, position in part.rows] == list(range(70))
    model.close(handle)
    for position in (0, 32, 33, 69):
        handle = model.open()
        last = model.prefill(handle, ids[: position + 1])[-1]
        assert torch.equal(last.logits_f32[0], rows[position])
        model.close(handle)


def test_a_chunk_that_does_not_fit_ends_its_sequence_and_no_other(model, rng):
    small = Model(model.config, model.weights, kv_tokens=3 * 2048, arena_bytes=400_000, poison=True)
    kept, other = small.open(), small.open()
    ids = rng.integers(9, 500, 40).tolist()
    small.prefill(kept, ids, chunk_rows=8)
    with pytest.raises(ArenaFull, match=r"no room for .* MiB; .* lower --chunk-rows or raise --arena-gib"):
        small.prefill(other, rng.integers(9, 500, 300).tolist(), chunk_rows=300)
    assert list(small.sequences) == [kept.number]
    assert small.stages[0].memory.arena.stats().used_bytes == 0
    with pytest.raises(PromptError, match=r"sequence 1 is closed"):
        small.prefill(other, ids)
    small.close(other)
    handle = model.open()
    model.prefill(handle, ids)
    assert torch.equal(small.decode([(kept, 11)]).logits_f32, model.decode([(handle, 11)]).logits_f32)
    model.close(handle)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other(model, rng, bad):
    embed = model.weights.embed_bf16.clone()
    embed[300] = bad
    broken = Model(model.config, replace(model.weights, embed_bf16=embed), kv_tokens=3 * 2048)
    clean, poisoned = ([int(i) for i in rng.integers(9, 299, n)] for n in (45, 30))
    poisoned[20] = 300
    alone = broken.open()
    want = broken.extend([(alone, clean)], RowKind.PREFILL).logits_f32
    one, other = broken.open(), broken.open()
    both = broken.extend([(one, poisoned), (other, clean)], RowKind.PREFILL)
    assert both.finite_u8[:20].all()
    assert not both.finite_u8[20]
    assert both.finite_u8[30:].all()
    assert torch.equal(both.logits_f32[30:], want)
    assert both.rows[20] == (one.number, 20)


def test_engram_tables_may_stay_in_the_file(folder, model, rng):
    ids = rng.integers(9, 500, 50).tolist()
    mapped = Model.load(folder, engram="mmap")
    out = []
    for m in (model, mapped):
        handle = m.open()
        out.append(m.prefill(handle, ids)[-1].logits_f32)
        m.close(handle)
    assert torch.equal(*out)


@pytest.fixture
def changed(folder, tmp_path):
    """A copy of the checkpoint with one tensor changed by a function of it."""

    def change(name, how):
        shutil.copytree(folder, tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        tensors = load_file(file)
        raw = tensors[name].view(torch.uint8) if tensors[name].element_size() == 1 else tensors[name]
        how(raw)
        save_file(tensors, file)
        return tmp_path / "model"

    return change


def test_a_nan_scale_is_refused_by_name(changed):
    path = changed("layers.2.attn.wq_a.scale", lambda t: t[0].fill_(255))
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.wq_a\.weight") as error:
        Model.load(path)
    assert "255" in str(error.value)


def test_an_expert_scale_out_of_range_is_refused_by_name(changed):
    path = changed("layers.3.ffn.experts.5.w2.scale", lambda t: t.fill_(1))
    with pytest.raises(CheckpointError, match=r"layers\.3\.ffn\.experts\.5\.w2\.weight"):
        Model.load(path)


def test_a_weight_that_is_not_finite_is_refused_by_name(changed):
    path = changed("layers.0.attn_norm.weight", lambda t: t[3:4].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_norm\.weight"):
        Model.load(path)


def test_a_key_value_side_stays_with_its_engram_layer(model):
    """Engram changes the streams that the source reads, so micro's layer 1 cannot be split."""
    assert model.config.text_config.layers[1].engram == 0
    with pytest.raises(ValueError, match="layer 1 adds Engram"):
        Model(
            model.config, model.weights, [StageLayers((0,), frozenset({1})), StageLayers((1, 2, 3, 4), frozenset({2}))]
        )
    assert [s.kv_sides for s in split_layers(model.config, 5, early_kv_side=True)] == [
        frozenset(),
        frozenset({1, 2}),
        frozenset(),
        frozenset(),
        frozenset(),
    ]
