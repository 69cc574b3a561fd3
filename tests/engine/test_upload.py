"""Weights from a checkpoint's files to a GPU: the bytes that any other way gives, all read, nothing left behind."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rocline.engine import checkpoint, weights
from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
from rocline.engine.home import HipHome, Part
from rocline.engine.shards import CheckpointError
from rocline.engine.synthetic import SyntheticWeights
from rocline.engine.weights import NOT_LOADED, StoredWeights, load_weights
from rocline.hip_kernels import experts_hip, uploader
from rocline.hip_kernels.driver import HostBuffer, devices
from rocline.hip_kernels.uploader import PARTS


@pytest.fixture(autouse=True)
def pinned(hip_device, monkeypatch) -> list[int]:
    """Bytes of each buffer that is pinned; parts are so small that experts go through many."""
    monkeypatch.setattr(uploader, "PART_BYTES", 16 << 10)
    monkeypatch.setattr(experts_hip, "PREPARED_BYTES", 15 << 10)
    monkeypatch.setattr(uploader, "READ_BYTES", 3000)
    monkeypatch.setattr(weights, "WHOLE_BYTES", 40 << 10)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 9000)
    monkeypatch.setattr(uploader, "SMALL_BYTES", 1 << 10)
    held = []

    class Counted(HostBuffer):
        def __init__(self, n_bytes):
            super().__init__(n_bytes)
            held.append(n_bytes)
            assert len(held) <= PARTS

        def free(self):
            super().free()
            held.remove(self.n_bytes)

    monkeypatch.setattr(uploader, "HostBuffer", Counted)
    return held


@contextmanager
def stored(folder, advance=lambda n_bytes: None) -> Iterator[StoredWeights]:
    config = ModelConfig.load(folder)
    text = config.text_config
    with Checkpoint.open(folder, config) as opened:
        yield StoredWeights(opened, text, np.zeros(text.vocab_size, dtype=np.int32), "ram", advance)


def leaves(placed) -> Iterator[Tensor]:
    """Tensors of prepared weights, on the host, in order."""
    if isinstance(placed, Tensor):
        yield placed.cpu()
    elif is_dataclass(placed):
        for field in fields(placed):
            yield from leaves(getattr(placed, field.name))
    elif isinstance(placed, dict | tuple | list):
        for part in placed.values() if isinstance(placed, dict) else placed:
            yield from leaves(part)


def on_card(folder, source, reference_ops=()):
    config = ModelConfig.load(folder).text_config
    return HipHome(config, reference_ops=reference_ops).weights(config, source, Part.whole(config))


def put_plainly(folder, reference_ops, monkeypatch):
    """Read whole into the host's memory, and from there as torch copies."""
    config = ModelConfig.load(folder)
    home = HipHome(config.text_config, reference_ops=reference_ops)
    with monkeypatch.context() as patch, Checkpoint.open(folder, config) as opened:
        patch.setattr(type(home.place), "uploading", contextmanager(lambda place: iter([None])))
        id_map = np.zeros(config.text_config.vocab_size, dtype=np.int32)
        whole = load_weights(opened, config.text_config, id_map)
        return home.weights(config.text_config, whole, Part.whole(config.text_config))


@pytest.mark.parametrize("reference_ops", [(), ("experts", "fp8_linear", "head")], ids=["kernels", "references"])
def test_the_same_bytes_as_from_the_hosts_memory(micro_shards, reference_ops, monkeypatch, pinned):
    folder, advanced, threads = micro_shards.write(), [], set()

    def advance(n_bytes):
        advanced.append(n_bytes)
        threads.add(threading.current_thread().name)

    with stored(folder, advance) as source:
        got = list(leaves(on_card(folder, source, reference_ops)))
        source.finish()
        served = [s.spec for s in source._checkpoint.tensors.values() if s.spec.component not in NOT_LOADED]
        assert sum(advanced) == sum(spec.n_bytes for spec in served)
    assert {name.rpartition("_")[0] for name in threads} == {"layer-ahead", "weight-reader", ""}  # the last: this one
    want = list(leaves(put_plainly(folder, reference_ops, monkeypatch)))
    assert len(got) == len(want) > 100
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    assert pinned == []


def test_synthetic_weights_too(hip_device, micro_model, pinned):
    """In stores that several layers share."""
    config = ModelConfig.load(micro_model)
    source = SyntheticWeights(config, 3, 2, devices()[0].torch_device)
    got = on_card(micro_model, source)
    assert got.layer(3).experts.routed is got.layer(1).experts.routed
    assert got.layer(0).experts.routed.w1.codes_u8.shape[0] == config.text_config.n_routed_experts
    assert pinned == []


def change(shards, name, at, byte):
    """One byte of a tensor."""
    for tensors in shards.shards.values():
        if name in tensors:
            data = bytearray(tensors[name].data)
            data[at] = byte
            tensors[name].data = bytes(data)


EXPERT = "layers.3.ffn.experts.5.w1"


@pytest.mark.parametrize(
    ("name", "byte", "message"),
    [
        (f"{EXPERT}.scale", 255, r"experts\.5\.w1\.weight[\s\S]*scale byte 255 \(NaN\) at scale \[0, 1\]"),
        (f"{EXPERT}.scale", 253, r"code byte 0x.. times scale byte 253 at \[0, \d+\] is no normal BF16"),
        ("layers.3.attn.wq_a.weight", 0x7F, r"layers\.3\.attn\.wq_a\.weight[\s\S]*code 0x7F \(NaN\) at \[0, 1\]"),
    ],
)
def test_a_broken_weight_is_refused_by_name(micro_shards, pinned, name, byte, message):
    change(micro_shards, name, 1, byte)
    folder = micro_shards.write()
    with stored(folder) as source, pytest.raises(CheckpointError, match=message):
        on_card(folder, source)
    assert pinned == []


def test_a_scale_at_the_edge_is_judged_by_its_codes(micro_shards, pinned):
    """253 goes with a group of zeros, and with nothing else."""
    change(micro_shards, f"{EXPERT}.scale", 0, 253)
    for at in range(16):
        change(micro_shards, f"{EXPERT}.weight", at, 0)
    folder = micro_shards.write()
    with stored(folder) as source, pytest.raises(ValueError, match=r"code 253.*the weight is broken"):
        on_card(folder, source)  # no kernel takes it either, but that is what says so
    assert pinned == []


def test_a_file_cut_while_it_is_read(micro_shards, pinned):
    folder, n_advanced = micro_shards.write(), []

    def advance(n_bytes):
        n_advanced.append(n_bytes)
        if len(n_advanced) == 20:
            for path in folder.glob("*.safetensors"):
                with path.open("r+b") as file:
                    file.truncate(9000)

    with stored(folder, advance) as source, pytest.raises(CheckpointError, match="the file ends here"):
        on_card(folder, source)
    assert pinned == []


@pytest.mark.parametrize("after", [3, 40, 150])
def test_an_interrupt_ends_the_readers(micro_shards, pinned, after):
    folder, n_told, gpu = micro_shards.write(), [], devices()[0]
    gc.collect()
    before = gpu.memory().slab_bytes

    def advance(n_bytes):
        n_told.append(n_bytes)
        if len(n_told) == after:
            raise KeyboardInterrupt

    with stored(folder, advance) as source:
        with pytest.raises(KeyboardInterrupt):
            on_card(folder, source)
        with pytest.raises(RuntimeError, match="nobody waits"):
            source.layer(0)
    assert not [t for t in threading.enumerate() if t.name.startswith(("layer-ahead", "weight-reader"))]
    gc.collect()
    assert (pinned, gpu.memory().slab_bytes) == ([], before)
