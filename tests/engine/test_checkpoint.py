"""Reading: the file's own bytes, whatever the buffers and readers; failures stop it; nothing is forgotten."""

import os
import threading
import time

import pytest
import torch
from safetensors import safe_open

from rocline.engine import checkpoint as checkpoint_module
from rocline.engine.checkpoint import MAX_STAGING_BYTES, Checkpoint, new_staging
from rocline.engine.config import ModelConfig
from rocline.engine.shards import CheckpointError

NAME = "layers.1.engram.embed.weight"  # uint8 [6658, 32], the largest


@pytest.fixture
def checkpoint(micro_shards):
    folder = micro_shards.write()
    with Checkpoint.open(folder, ModelConfig.load(folder)) as opened:
        yield opened


def collect(checkpoint, names=None, **options):
    """Every tensor put together from its row ranges, and the ranges in the order of delivery."""
    rows, order = {}, []

    def deliver(name, row_start, tensor):
        order.append((name, row_start, tensor.shape[0]))
        rows.setdefault(name, []).append(tensor.clone())

    checkpoint.read(checkpoint.tensors if names is None else names, deliver, **options)
    return {name: torch.cat(parts) for name, parts in rows.items()}, order


def as_safetensors(folder):
    """The same tensors by the safetensors library, quantised ones as bytes."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                tensor = file.get_tensor(name)
                tensors[name] = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return tensors


@pytest.mark.parametrize("n_readers", [1, 2, 5])
@pytest.mark.parametrize(("n_buffers", "buffer_bytes"), [(1, 1 << 20), (3, 4096), (10, 9001), (2, 64 << 20)])
def test_same_tensors_as_safetensors(checkpoint, n_readers, n_buffers, buffer_bytes):
    got, order = collect(checkpoint, staging=new_staging(n_buffers, buffer_bytes), n_readers=n_readers)
    want = as_safetensors(checkpoint.folder)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    places = [(checkpoint.tensors[name].path, checkpoint.tensors[name].offset, row) for name, row, _ in order]
    assert places == sorted(places)


def test_default_staging(checkpoint):
    got, order = collect(checkpoint)
    assert len(order) == len(got) == len(checkpoint.tensors)
    assert sum(buffer.nbytes for buffer in new_staging()) <= MAX_STAGING_BYTES


def test_large_tensor_comes_in_row_ranges(checkpoint):
    """Ranges follow each other, keep to tiles of 32 rows, and a tensor that fits is never cut."""
    buffer_bytes = 5000  # 156 rows of 32 bytes: 128 are four tiles
    got, order = collect(checkpoint, staging=new_staging(4, buffer_bytes))
    ranges = [(row, n_rows) for name, row, n_rows in order if name == NAME]
    assert ranges == [(row, min(128, 6658 - row)) for row in range(0, 6658, 128)]
    assert got[NAME].shape == (6658, 32)
    for name, _, n_rows in order:
        stored = checkpoint.tensors[name].spec
        assert n_rows == stored.shape[0] or stored.n_bytes > buffer_bytes


def test_only_the_given_staging_is_used(checkpoint):
    """Every tensor lies in a buffer of the caller's, and no more bytes are in flight than it has."""
    buffers = new_staging(3, 8192)
    spans = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers]
    used = set()

    def deliver(name, row_start, tensor):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        (span,) = [span for span in spans if span[0] <= begin and end <= span[1]]
        used.add(span)

    checkpoint.read(checkpoint.tensors, deliver, staging=buffers)
    assert used == set(spans)


def test_staging_limits(checkpoint):
    def never(*part):
        raise AssertionError

    too_large = torch.zeros(1, dtype=torch.uint8).expand(MAX_STAGING_BYTES + 1)
    with pytest.raises(ValueError, match="2,147,483,649"):
        checkpoint.read([NAME], never, staging=[too_large])
    with pytest.raises(ValueError, match=r"buffers of 31 bytes, a row of layers\.1.* has 32"):
        checkpoint.read([NAME], never, staging=new_staging(2, 31))
    with pytest.raises(ValueError, match="staging of 0 bytes"):
        checkpoint.read([NAME], never, staging=[])


def test_subset_and_progress(checkpoint):
    names = ["norm.weight", NAME, "layers.3.hc_attn_fn"]
    advanced = []
    got, _ = collect(checkpoint, names, staging=new_staging(2, 50_000), advance=advanced.append)
    assert got.keys() == set(names)
    assert sum(advanced) == sum(checkpoint.tensors[name].spec.n_bytes for name in names)
    assert len(advanced) > len(names)


def test_tensor_at_an_odd_offset(micro_shards):
    """The format does not promise alignment: here an F32 tensor follows 6,658 scale bytes."""
    scale, sink = "layers.1.engram.embed.scale", "layers.0.attn.attn_sink"
    moved = {name: micro_shards.drop(name) for name in (scale, sink)}
    micro_shards.shards["a.safetensors"] = moved | micro_shards.shards["a.safetensors"]
    micro_shards.index |= dict.fromkeys(moved, "a.safetensors")
    folder = micro_shards.write()
    with Checkpoint.open(folder, ModelConfig.load(folder)) as opened:
        assert opened.tensors[sink].offset - opened.tensors[scale].offset == 6658
        got, _ = collect(opened, moved)
    assert got[sink].dtype == torch.float32
    assert got[sink].numpy().tobytes() == moved[sink].data


def test_several_readers_read_at_once(checkpoint, monkeypatch):
    """Two ranges are being read at the same time: each waits for the other."""
    meet, read = threading.Barrier(2), os.preadv
    threads = set()

    def preadv(*args):
        threads.add(threading.current_thread())
        if meet.n_waiting or len(threads) <= 2:
            meet.wait(timeout=20)
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    names = ["norm.weight", "layers.3.hc_attn_fn"]
    deliverers = set()
    checkpoint.read(
        names,
        lambda *part: deliverers.add(threading.current_thread()),
        staging=new_staging(2, 1 << 20),
        n_readers=2,
    )
    assert len(threads) == 2
    assert deliverers == {threading.current_thread()}


def test_short_reads_are_continued(checkpoint, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:1000]], at))
    got, _ = collect(checkpoint, [NAME])
    assert torch.equal(got[NAME], as_safetensors(checkpoint.folder)[NAME])


def live_readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-reader")]


def test_failed_read_is_named_and_stops_the_readers(checkpoint, monkeypatch):
    read, calls = os.preadv, []

    def preadv(fd, views, at):
        calls.append(at)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match=r"a\.safetensors at byte [\d,]+, near .*: Input/output error"):
        collect(checkpoint, staging=new_staging(4, 4096))
    assert not live_readers()
    assert len(calls) <= 5 + 4
    assert len(checkpoint.unread()) > 400


def test_file_cut_after_opening(checkpoint):
    os.truncate(checkpoint.tensors[NAME].path, checkpoint.tensors[NAME].offset + 1000)
    with pytest.raises(CheckpointError, match="the file ends here"):
        collect(checkpoint, [NAME])


def test_callers_error_stops_the_readers(checkpoint, monkeypatch):
    """The range being read when the caller fails is the last: the six that wait are not begun."""
    read, calls, second = os.preadv, [], threading.Event()

    def preadv(*args):
        calls.append(args)
        if len(calls) > 1:
            second.set()
            time.sleep(0.2)
        return read(*args)

    class Stop(Exception):
        pass

    def deliver(name, row_start, tensor):
        assert second.wait(20)
        raise Stop(name)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(Stop):
        checkpoint.read(checkpoint.tensors, deliver, staging=new_staging(8, 4096), n_readers=1)
    assert not live_readers()
    assert len(calls) == 2
    assert len(checkpoint.unread()) == len(checkpoint.tensors)


def test_a_large_tensor_is_read_in_place(checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "READ_BYTES", 10_000)
    out, advanced = torch.empty((6658, 32), dtype=torch.uint8), []
    checkpoint.read_whole(NAME, out, advance=advanced.append)
    assert torch.equal(out, as_safetensors(checkpoint.folder)[NAME])
    assert advanced == [10_000] * 21 + [6658 * 32 - 210_000]
    assert NAME not in checkpoint.unread()


def test_a_large_tensor_of_a_cut_file(checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "READ_BYTES", 10_000)
    path, advanced = checkpoint.tensors[NAME].path, []
    os.truncate(path, checkpoint.tensors[NAME].offset + 45_000)
    out = torch.empty((6658, 32), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"near {NAME}: the file ends here"):
        checkpoint.read_whole(NAME, out, advance=advanced.append)
    assert advanced == [10_000] * 4
    assert NAME in checkpoint.unread()


def test_unread_tensors_are_refused_unless_left_out(checkpoint, monkeypatch):
    """Case B45 as well: the page cache is dropped, of every file, and only when all is read."""
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: dropped.append((fd, *args)))
    components = {name: stored.spec.component for name, stored in checkpoint.tensors.items()}
    collect(checkpoint, [name for name in components if components[name] != "gate_vl"])
    with pytest.raises(CheckpointError, match=r"unread tensors \(5\)") as caught:
        checkpoint.finish()
    assert caught.value.problems["unread tensors"] == [f"layers.{layer}.ffn.gate.bias_vl" for layer in range(5)]
    assert not dropped
    checkpoint.finish(skip_components=["gate_vl"])
    assert len({fd for fd, *_ in dropped}) == 2
    assert all(rest == [0, 0, os.POSIX_FADV_DONTNEED] for _, *rest in dropped)


def test_half_read_tensor_counts_as_unread(checkpoint):
    class Stop(Exception):
        pass

    def deliver(name, row_start, tensor):
        if row_start > 1000:
            raise Stop

    with pytest.raises(Stop):
        checkpoint.read([NAME], deliver, staging=new_staging(2, 8192))
    assert NAME in checkpoint.unread()


def test_mapped_plane(checkpoint):
    want = as_safetensors(checkpoint.folder)
    plane = checkpoint.map_plane(NAME)
    wide = checkpoint.map_plane("layers.1.engram.q_weight")
    checkpoint.close()
    assert torch.equal(torch.from_numpy(plane.copy()), want[NAME])
    assert wide.shape == (4, 256)
    assert wide.tobytes() == want["layers.1.engram.q_weight"].view(torch.uint8).numpy().tobytes()
    assert not plane.flags.writeable
    assert NAME not in checkpoint.unread()


def test_names_of_another_checkpoint(checkpoint):
    with pytest.raises(KeyError, match=r"layers\.99"):
        collect(checkpoint, ["layers.99.attn_norm.weight"])


def test_ranges_end_with_their_file(micro_shards):
    """Here the first shard's bytes end at the offset where the second one's begin."""
    meet = 2_000_000

    def longer_header(whole, n_header):
        old = int.from_bytes(whole[:8], "little")
        return n_header.to_bytes(8, "little") + whole[8 : 8 + old].ljust(n_header) + whole[8 + old :]

    n_bytes = sum(len(tensor.data) for tensor in micro_shards.shards["a.safetensors"].values())
    micro_shards.byte_edits["a.safetensors"] = lambda whole: longer_header(whole, meet - n_bytes - 8)
    micro_shards.byte_edits["b.safetensors"] = lambda whole: longer_header(whole, meet - 8)
    folder = micro_shards.write()
    with Checkpoint.open(folder, ModelConfig.load(folder)) as opened:
        assert (folder / "a.safetensors").stat().st_size == min(
            stored.offset for stored in opened.tensors.values() if stored.path.name == "b.safetensors"
        )
        got, _ = collect(opened)
    want = as_safetensors(folder)
    assert all(torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)
