"""The rungs of rocline bring-up below the whole model: what passes, what fails, and whom they name."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocline.engine.config import ModelConfig
from rocline.engine.release import write_release_skeleton
from rocline.hip_kernels import device_ops
from rocline.pipeline.options import Options
from rocline.tools import bring_up_cards, bring_up_layers
from rocline.tools.bring_up_site import Site
from rocline.tools.doctor_checks import Card, Cards, System, find_cards

W7900D = Card(0, "W7900D", "gfx1100", 48 << 30, 47 << 30)


@pytest.fixture(scope="module")
def micro(data_folder):
    return data_folder / "micro" / "model"


def site_of(folder, found=None, **options):
    kind = "hip" if found else "cpu"
    return Site(folder, ModelConfig.load(folder), Options(device=kind, stages=2, **options), found or Cards())


@pytest.fixture
def on_double(hip_device, micro):
    if hip_device != "cpu":
        pytest.skip("breaks kernels of the CPU double")
    found = find_cards(System())
    return site_of(micro, Cards(found.cards[:1], found.devices[:1]))


def said(check):
    return "\n".join(f"{entry.found} {entry.advice}" for entry in check.entries)


# -- layers ------------------------------------------------------------------------------------------------------


def test_layers_are_the_hosts(on_double):
    check = bring_up_layers.layers(on_double)
    assert check.verdict == "ok"
    assert "layers 0 to 2, 48 rows, on 1 card as on the host" in said(check)
    assert {row["verdict"] for row in check.values["card 0"]} == {"exact", "within"}
    assert {row["item"].split()[0] for row in check.values["card 0"]} == {"L0", "L1", "L2"}


def test_only_those_layers_are_read(micro, tmp_path, on_double):
    """Of everything else there need be no more than headers: what they promise may be NaN."""
    folder = shutil.copytree(micro, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.startswith(("layers.3.", "layers.4.", "head.")) and tensors[name].dtype.is_floating_point:
            tensors[name] = torch.full_like(tensors[name].float(), float("nan")).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert bring_up_layers.layers(replace(on_double, folder=folder)).verdict == "ok"


def test_a_wrong_kernel_is_named(on_double, monkeypatch):
    right = device_ops.KERNELS["attend"]

    def wrong(q_bf16, *args):
        right(q_bf16, *args)
        args[-1][:1].mul_(3)

    monkeypatch.setitem(device_ops.KERNELS, "attend", wrong)
    check = bring_up_layers.layers(on_double)
    assert check.verdict == "problem"
    assert check.values["culprit"] == "attention"
    assert "fields beyond their limits: L0 o: " in said(check)
    assert "with --reference-op attention layer 0 is right: the kernel of attention, or of attend" in said(check)


@pytest.mark.parametrize("name", ["act_round8", "experts", "window_row"])
def test_one_of_all_is_found(name):
    tried = []

    def is_right(reference_ops):
        tried.append(reference_ops)
        return name in reference_ops

    assert bring_up_layers.culprit_of(is_right) == name
    assert len(tried) <= 8  # each costs a card's weights once more


def test_two_at_once_are_not_one():
    assert bring_up_layers.culprit_of(lambda names: {"act_round8", "window_row"} <= set(names)) is None
    assert bring_up_layers.culprit_of(lambda names: False) is None


def test_without_cards_there_is_nothing_to_compare(micro):
    assert bring_up_layers.layers(site_of(micro)).verdict == "not applicable"


# -- operators ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """checkout(text): a checkout whose one file of operator tests is that."""

    def make(text):
        tests = tmp_path / "tests" / "hip_kernels"
        tests.mkdir(parents=True)
        (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--hip')\n")
        (tests / "test_experts_hip.py").write_text(text)
        monkeypatch.setattr(bring_up_cards, "ROOT", tmp_path)
        monkeypatch.setattr(bring_up_cards, "TESTS", tests)

    return make


SEES = """
import os
def test_it(request):
    assert os.environ["HIP_VISIBLE_DEVICES"] == {!r}
    assert request.config.option.hip == "rocm"
"""


def test_the_tests_see_one_card_each(micro, checkout, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,7")
    checkout(SEES.format("7"))
    check = bring_up_cards.operators(site_of(micro, Cards((replace(W7900D, index=1),), ())))
    assert check.verdict == "ok", said(check)
    assert "card 1, pytest tests/hip_kernels --hip rocm: 1 passed" in said(check)


def test_tests_that_fail_end_the_rung(micro, checkout, monkeypatch):
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    checkout("def test_a(): pass\ndef test_b(): assert 0\n")
    cards = W7900D, replace(W7900D, index=1)
    check = bring_up_cards.operators(site_of(micro, Cards(cards, ())))
    assert check.verdict == "problem"
    assert check.values.keys() == {"card 0"}  # the next card's would say the same
    assert "1 failed, 1 passed" in said(check)
    assert "HIP_VISIBLE_DEVICES=0 pytest --hip rocm 'tests/hip_kernels/test_experts_hip.py::test_b'" in said(check)
    assert "its operator, here one of experts" in said(check)


def test_an_installed_package_has_no_tests(micro, monkeypatch, tmp_path):
    monkeypatch.setattr(bring_up_cards, "TESTS", tmp_path / "none")
    check = bring_up_cards.operators(site_of(micro, Cards((W7900D,), ())))
    assert check.verdict == "not applicable"
    assert "an installed package has none, a checkout does" in said(check)


# -- golden data -------------------------------------------------------------------------------------------------


def test_no_golden_data(micro, monkeypatch, tmp_path):
    monkeypatch.setattr(bring_up_cards, "DATA", bring_up_cards.ROOT / "none")
    assert bring_up_cards.golden(site_of(micro)).verdict == "not applicable"
    check = bring_up_cards.golden(replace(site_of(micro), golden=tmp_path / "none"))
    assert check.verdict == "problem"
    assert "no such folder" in said(check)


def test_golden_data_that_differs(micro, monkeypatch, tmp_path, data_folder):
    tables = load_file(data_folder / "ops.safetensors")
    tables["rmsnorm.y"] = -tables["rmsnorm.y"]
    save_file(tables, tmp_path / "ops.safetensors")
    monkeypatch.setattr(bring_up_cards, "DATA", tmp_path)
    check = bring_up_cards.golden(site_of(micro))
    assert check.verdict == "problem"
    assert f"rocline conform {tmp_path} --device cpu: " in said(check)
    assert "1 failed" in said(check)
    assert "ops rmsnorm y: " in said(check)
    assert "--reference-op" in said(check)


# -- shards ------------------------------------------------------------------------------------------------------


def test_shards_of_a_small_model(micro):
    check = bring_up_cards.shards(site_of(micro))
    assert check.verdict == "ok"
    assert "in 1 file; every header as it must be" in said(check)
    assert "another model than the release: of other vocab_size, hidden_size" in said(check)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The outline of the release's checkpoint: headers, and holes for weights."""
    folder = tmp_path_factory.mktemp("release")
    try:
        write_release_skeleton(folder)
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    return folder


def test_shards_of_the_release(release):
    check = bring_up_cards.shards(site := site_of(release))
    assert check.verdict == "ok"
    assert check.values["files"] == 48
    assert site.is_release
    assert "config.json" not in said(check)


def test_a_shard_that_is_missing(release):
    shard = release / "model-00007-of-00048.safetensors"
    shard.rename(release / "away")
    check = bring_up_cards.shards(site_of(release))
    (release / "away").rename(shard)
    assert check.verdict == "problem"
    assert shard.name in said(check)


def test_another_rope_base_is_named(release):
    """B34: before perplexity tells."""
    site = site_of(release)
    site.config = replace(site.config, text_config=replace(site.config.text_config, compress_rope_theta=10_000.0))
    check = bring_up_cards.shards(site)
    assert check.verdict == "warning"
    assert "the release's tensors with another config.json: compress_rope_theta get the release's" in said(check)
    assert site.is_release  # so it must foretell as well


def test_the_release_in_other_shards(micro, monkeypatch):
    monkeypatch.setattr(Site, "is_release", True)
    check = bring_up_cards.shards(site_of(micro))
    assert check.verdict == "problem"
    assert "1 shards: the release has 48" in said(check)


def test_a_shard_that_was_cut(micro, tmp_path):
    folder = shutil.copytree(micro, tmp_path / "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    check = bring_up_cards.shards(site_of(folder))
    assert check.verdict == "problem"
    assert "short shards" in said(check)
