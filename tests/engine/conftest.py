"""The micro checkpoint, a copy of it taken apart to be damaged, and a count of launched graphs."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hip_cases import write_fitting_model

from rocline.hip_kernels.graph import Graph


@dataclass
class Stored:
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class ShardFiles:
    """A checkpoint's files as they will be written.

    shards  file name to its tensors, in file order
    index   tensor name to file name
    edits   file name to a change of its finished header or of its finished bytes
    """

    folder: Path
    shards: dict[str, dict[str, Stored]]
    index: dict[str, Any]
    header_edits: dict[str, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    byte_edits: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)

    def drop(self, name: str) -> Stored:
        return self.shards[self.index.pop(name)].pop(name)

    def write(self) -> Path:
        for file, tensors in self.shards.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name, tensor in tensors.items():
                begin, end = end, end + len(tensor.data)
                header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
            self.header_edits.get(file, lambda header: None)(header)
            data = b"".join(tensor.data for tensor in tensors.values())
            whole = self.byte_edits.get(file, lambda whole: whole)(pack(json.dumps(header).encode()) + data)
            (self.folder / file).write_bytes(whole)
        index_path = self.folder / "model.safetensors.index.json"
        index_path.write_text(json.dumps({"metadata": {}, "weight_map": self.index}))
        return self.folder


def pack(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.fixture(scope="session")
def micro_model(data_folder: Path) -> Path:
    return data_folder / "micro" / "model"


@pytest.fixture(scope="session")
def fitting_folder(hip_device: str, micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of micro's kinds of layers whose sizes all kernels take."""
    return write_fitting_model(micro_model, tmp_path_factory.mktemp("fitting") / "model")


@pytest.fixture
def micro_shards(micro_model: Path, tmp_path: Path) -> ShardFiles:
    """The micro checkpoint in two shards, a.safetensors and b.safetensors, not written yet."""
    whole = (micro_model / "model.safetensors").read_bytes()
    (n_header,) = struct.unpack_from("<Q", whole)
    claims = json.loads(whole[8 : 8 + n_header])
    del claims["__metadata__"]
    shards: dict[str, dict[str, Stored]] = {"a.safetensors": {}, "b.safetensors": {}}
    index = {}
    for position, (name, claim) in enumerate(claims.items()):
        file = "a.safetensors" if position < len(claims) // 2 else "b.safetensors"
        begin, end = (8 + n_header + offset for offset in claim["data_offsets"])
        shards[file][name] = Stored(claim["dtype"], claim["shape"], whole[begin:end])
        index[name] = file
    (tmp_path / "config.json").write_bytes((micro_model / "config.json").read_bytes())
    return ShardFiles(tmp_path, shards, index)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs have been launched, by "graphs"."""
    counts, launch = Counter[str](), Graph.launch

    def counted(graph: Graph) -> None:
        counts["graphs"] += 1
        launch(graph)

    monkeypatch.setattr(Graph, "launch", counted)
    return counts
