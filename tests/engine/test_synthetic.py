"""Noise at a model's own sizes: the same for the same seed, in stores, and alive."""

import pytest
import torch
from hip_cases import OPTIONS, write_fitting_model

from rocline.engine.config import ModelConfig
from rocline.engine.home import HipHome, HostHome, Part
from rocline.engine.model import Model
from rocline.engine.synthetic import SyntheticWeights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(micro_model, tmp_path_factory):
    return ModelConfig.load(write_fitting_model(micro_model, tmp_path_factory.mktemp("fitting") / "model"))


def stacks(weights, layer):
    return [part for weight in weights.layer(layer).experts.routed for part in weight]


def test_the_same_seed_gives_the_same_weights(config):
    first, again, other = (SyntheticWeights(config, seed, 2, CPU) for seed in (1, 1, 2))
    for a, b in zip(stacks(first, 1), stacks(again, 1), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(stacks(first, 1)[0], stacks(other, 1)[0])
    assert torch.equal(first.head_bf16, again.head_bf16)


def test_layers_of_a_store_have_its_experts_and_nothing_else_in_common(config):
    weights = SyntheticWeights(config, 1, 2, CPU)
    shared = [weights.layer(layer).experts.shared for layer in range(3)]
    for a, b, c in zip(*shared, strict=True):  # whichever of them a card places first
        assert not torch.equal(a.codes_e4m3, b.codes_e4m3)
        assert torch.equal(a.codes_e4m3, c.codes_e4m3)
    for a, b, c in zip(stacks(weights, 0), stacks(weights, 2), stacks(weights, 1), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or a.unique().numel() == 1  # scales are one number
    codes = stacks(weights, 0)[0]
    assert len({bytes(expert.numpy().tobytes()) for expert in codes}) == len(codes)  # no two experts alike
    assert not torch.equal(weights.layer(0).experts.gate_bf16, weights.layer(2).experts.gate_bf16)
    assert [weights.expert_store(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert str(weights) == "synthetic:1, stores=2"


def test_experts_of_a_store_are_placed_once(hip_device, config):
    home = HipHome(config.text_config)
    placed = home.weights(config.text_config, SyntheticWeights(config, 1, 2, CPU), Part.whole(config.text_config))
    first, second, third = (placed.layer(layer).experts for layer in range(3))
    assert first.routed is third.routed
    assert first.routed is not second.routed


def test_activations_neither_vanish_nor_saturate(hip_device, config, rng):
    """And all kinds of layers read what they shall: logits differ by position and say something."""
    text = config.text_config
    weights = HostHome().weights(text, SyntheticWeights(config, 3, 2, CPU), Part.whole(text))
    logits, streams, ids = {}, {}, rng.integers(9, 500, 24).tolist()
    for name, home in (("host", None), ("hip", HipHome(text))):
        model = Model(config, weights, home=home, **OPTIONS)
        rows = {}

        def record(layer, field, value, rows=rows):
            if field == "x_out":
                rows[layer] = value.float().std().item()

        handle = model.open()
        (out,) = model.prefill(handle, ids, mode="full", all_logits=True, record=record)
        model.close(handle)
        logits[name], streams[name] = out.logits_f32, rows
    assert logits["host"].isfinite().all()
    assert 1 < logits["host"].std() < 10
    assert logits["host"].argmax(1).unique().numel() > 5
    assert all(0.3 < deviation < 10 for deviation in streams["host"].values())
    assert (logits["host"] - logits["hip"]).abs().median() < 0.1
