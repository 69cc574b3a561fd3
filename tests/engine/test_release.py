"""The release's outline at full size: 510 GB of headers open and check on a small machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rocline.engine.config import ModelConfig
from rocline.engine.release import release_config, write_release_skeleton

OPEN = """
import json, resource, sys, time
start_s = time.perf_counter()
from rocline.engine.checkpoint import Checkpoint
from rocline.engine.config import ModelConfig
with Checkpoint.open(sys.argv[1], ModelConfig.load(sys.argv[1])) as checkpoint:
    n_bytes = sum(stored.spec.n_bytes for stored in checkpoint.tensors.values())
    zeros = []
    def deliver(name, row_start, tensor):
        zeros.append(int(tensor.count_nonzero()))
    checkpoint.read(["layers.39.attn.attn_sink"], deliver)
    row = checkpoint.map_plane("layers.14.engram.embed.weight")[384_016_681]
print(json.dumps({
    "n_tensors": len(checkpoint.tensors), "n_bytes": n_bytes, "zeros": zeros, "row": int(row.sum()),
    "seconds": time.perf_counter() - start_s,
    "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    try:
        with (folder / "probe").open("wb") as probe:
            probe.truncate(100 << 30)
        sparse = (folder / "probe").stat().st_blocks < 1 << 20
    except OSError as error:
        pytest.skip(f"release outline: the file system of {folder} takes no file of 100 GiB: {error}")
    finally:
        (folder / "probe").unlink(missing_ok=True)
    if not sparse:
        pytest.skip(f"release outline: no sparse files in {folder}")
    write_release_skeleton(folder)
    return folder


def test_files_are_the_releases_in_size_only(skeleton):
    shards = sorted(skeleton.glob("model-*-of-00048.safetensors"))
    assert len(shards) == 48
    assert sum(path.stat().st_size for path in shards) > 510_286_023_000
    assert sum(path.stat().st_blocks * 512 for path in shards) < 100e6
    index = json.loads((skeleton / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 96_085
    assert index["metadata"]["total_size"] == 510_286_023_000
    assert ModelConfig.load(skeleton) == release_config()


def test_opening_takes_under_20_seconds_and_1_gib(skeleton):
    """Imports included. Reads go to the right place of 100 GB files."""
    child = subprocess.run([sys.executable, "-c", OPEN, str(skeleton)], capture_output=True, text=True, check=True)
    got = json.loads(child.stdout)
    assert (got["n_tensors"], got["n_bytes"]) == (96_085, 510_286_023_000)
    assert (got["zeros"], got["row"]) == ([0], 0)
    assert got["seconds"] < 20
    assert got["max_rss_bytes"] < 1 << 30
    print(f"{got['seconds']:.1f} s, {got['max_rss_bytes'] / 2**20:.0f} MiB")
