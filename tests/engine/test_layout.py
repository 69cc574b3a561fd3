"""The layout is the release's own (spec/backbone.md section 12) and that of every golden checkpoint."""

from collections import Counter

import pytest
from safetensors import safe_open

from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.engine.release import release_config


@pytest.fixture(scope="module")
def release():
    return expected_tensors(release_config())


def test_release_totals(release):
    assert len(release) == 96_085
    assert sum(spec.n_bytes for spec in release.values()) == 510_286_023_000


def test_release_counts_per_layer(release):
    counts = Counter(spec.layer for spec in release.values())
    special = {1: 2_340, 14: 2_348, 20: 2_341} | dict.fromkeys((2, 8), 2_342) | dict.fromkeys((24, 28, 32, 36), 2_337)
    assert {layer: counts[layer] for layer in range(40)} == {layer: special.get(layer, 2_334) for layer in range(40)}
    trees = Counter(name.split(".")[0].split("_")[0] for name in release)
    assert trees == {
        "layers": 93_415,
        "mtp": 2_401,
        "vision": 259,
        "aligner": 4,
        "image": 3,
        "embed": 1,
        "norm": 1,
        "head": 1,
    }


def test_release_bytes_by_dtype_and_component(release):
    dtypes, components = Counter(), Counter()
    for spec in release.values():
        dtypes[spec.dtype] += spec.n_bytes
        components[spec.component] += spec.n_bytes
    rounded = {dtype: round(n_bytes / 1e9, 1) for dtype, n_bytes in dtypes.items()}
    assert rounded == {"I8": 278.6, "F8_E4M3": 204.0, "F8_E8M0": 23.6, "BF16": 4.0, "F32": 0.2}
    want = {
        "experts": 288.78,
        "engram": 203.07,
        "draft": 7.93,
        "attention": 5.11,
        "shared": 1.42,
        "embed": 1.32,
        "head": 1.32,
        "vision": 0.97,
        "gate": 0.16,
        "hc": 0.16,
        "indexer": 0.05,
    }
    assert {component: round(components[component] / 1e9, 2) for component in want} == want
    assert sum(components[rest] for rest in components.keys() - want.keys()) < 1e6


def test_release_shard_map(release):
    """1 vision, 2 embed and delimiters, 3..42 layers, 43 head, 44..46 drafts, 47, 48 Engram (section 12)."""
    names: dict[int, set[str]] = {}
    for name, spec in release.items():
        names.setdefault(spec.shard, set()).add(".".join(name.split(".")[:3]))
    assert sorted(names) == list(range(1, 49))
    assert names[2] == {"embed.weight", "image_start", "image_newline", "image_end"}
    assert names[43] == {"head.weight", "norm.weight"}
    assert {name.split(".")[0] for name in names[1]} == {"vision", "aligner"}
    for layer in range(40):
        assert all(name.startswith(f"layers.{layer}.") for name in names[layer + 3])
        assert f"layers.{layer}.engram" not in names[layer + 3]
    for stage in range(3):
        assert all(name.startswith(f"mtp.{stage}.") for name in names[44 + stage])
    assert (names[47], names[48]) == ({"layers.1.engram"}, {"layers.14.engram"})


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "scale"),
    [
        ("layers.0.attn.wo_a", "F8_E4M3", (8192, 4096), (256, 128)),
        ("layers.39.ffn.experts.383.w2", "I8", (5120, 1152), (5120, 72)),
        ("layers.14.engram.embed", "F8_E4M3", (384_016_682, 256), (384_016_682, 8)),
        ("layers.36.attn.indexer.wq_b", "F8_E4M3", (4096, 1280), (128, 40)),
        ("mtp.0.main_proj", "F8_E4M3", (5120, 15360), (160, 480)),
        ("mtp.2.ffn.experts.127.w1", "I8", (2304, 2560), (2304, 160)),
    ],
)
def test_release_quantised_tensors(release, name, dtype, shape, scale):
    assert (release[f"{name}.weight"].dtype, release[f"{name}.weight"].shape) == (dtype, shape)
    assert (release[f"{name}.scale"].dtype, release[f"{name}.scale"].shape) == ("F8_E8M0", scale)


def test_release_plain_tensors(release):
    assert release["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)
    assert release["vision.patch_embed.proj.weight"].shape == (1024, 588)
    assert release["aligner.w1.weight"].shape == (5120, 9216)
    assert release["layers.7.hc_ffn_fn"].shape == (24, 20480)
    # The two biases share a prefix and must not share a use: image rows only, and in drafts nobody's.
    biases = [release[f"{block}.ffn.gate.{bias}"] for block in ("layers.3", "mtp.1") for bias in ("bias", "bias_vl")]
    assert [bias.component for bias in biases] == ["gate", "gate_vl", "draft", "unused"]


@pytest.mark.parametrize("name", ["micro", "tiny", "tiny40", "dspark"])
def test_golden_checkpoint_has_this_layout(golden_or_skip, name):
    """dspark brings draft stages and a vision tower."""
    folder = golden_or_skip(f"{name}/model")
    stored = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  not a mapping
                part = file.get_slice(key)
                stored[key] = (part.get_dtype(), tuple(part.get_shape()))
    expected = expected_tensors(ModelConfig.load(folder))
    assert {key: (spec.dtype, spec.shape) for key, spec in expected.items()} == stored
