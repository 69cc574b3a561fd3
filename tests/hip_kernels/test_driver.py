"""The driver: memory, copies, streams, events, launches and their errors. On the CPU double unless --hip says else."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from rocline.hip_kernels import driver, kernel, runtime
from rocline.hip_kernels.driver import Event, HostBuffer, copy_async, copy_peer_async, devices, fill_async
from rocline.hip_kernels.kernel import Kernel, launch, launch_counts, layer_kind
from rocline.hip_kernels.runtime import HipError, check_one_runtime

ADD = """
#include "port.hip.h"
RL_KERNEL(64) add(int* out, const int* in, int n, int step) {
  RL_DYN_SHARED(int, lds);
  const int i = rl_bid_x() * 64 + rl_tid();
  lds[rl_tid()] = step * STEP_SCALE;
  if (i < n) out[i] = in[i] + lds[rl_tid()];
}
RL_EXPORT(add)
"""


@pytest.fixture(scope="module")
def add(device, tmp_path_factory):
    source = tmp_path_factory.mktemp("add") / "add.hip"
    source.write_text(ADD)
    return Kernel(source, "add", "PPii", threads=64, defines={"STEP_SCALE": 1}, lds_bytes=256)


def rand_bytes(rng, n):
    return torch.from_numpy(rng.integers(0, 256, n, dtype="uint8"))


@pytest.fixture
def pinned(device):
    """pinned(tensor_or_size): a pinned buffer holding the bytes."""
    held = []

    def make(content):
        buffer = HostBuffer(content if isinstance(content, int) else content.numel())
        held.append(buffer)
        if not isinstance(content, int):
            buffer.tensor().copy_(content)
        return buffer

    yield make
    for buffer in held:
        buffer.free()


@pytest.fixture
def slab(device):
    slab = devices()[0].allocate(1 << 20)
    yield slab
    slab.free()


def test_devices_say_what_they_are(device):
    first = devices()[0]
    assert first.index == 0
    assert first.arch == "cpu" or first.arch.startswith(("sm_", "gfx"))
    assert first.name in repr(first)
    reading = first.memory()
    assert 0 < reading.free_bytes <= reading.total_bytes
    assert first.total_bytes >= reading.total_bytes


def test_memory_is_counted(device):
    gpu = devices()[-1]
    before = gpu.memory()
    slab = gpu.allocate(3 << 20)
    during = gpu.memory()
    assert during.slab_bytes - before.slab_bytes == 3 << 20
    assert during.n_slabs_ever - before.n_slabs_ever == 1
    assert before.free_bytes - during.free_bytes >= 3 << 20
    slab.free()
    after = gpu.memory()
    assert (after.slab_bytes, after.free_bytes) == (before.slab_bytes, before.free_bytes)
    assert after.n_slabs_ever == during.n_slabs_ever
    with pytest.raises(HipError, match="hipFree of 3145728 bytes"):
        slab.free()
    assert gpu.memory().slab_bytes == before.slab_bytes


def test_too_much_memory_says_what_is_free(device):
    gpu = devices()[0]
    free_bytes = gpu.memory().free_bytes
    with pytest.raises(HipError, match=rf"hipMalloc of {1 << 50} bytes on device 0: .* \d+ bytes are free") as caught:
        gpu.allocate(1 << 50)
    assert caught.value.name == "hipErrorOutOfMemory"
    assert gpu.memory().free_bytes == free_bytes


def test_copies_and_fills(device, slab, pinned, rng):
    data = rand_bytes(rng, 4099)
    there, back = pinned(data), pinned(5000)
    back.tensor().fill_(7)
    with devices()[0].stream() as stream:
        copy_async(slab.address + 11, there.address, 4099)
        copy_async(slab.address + 8192, slab.address + 11, 4099)
        fill_async(slab.address + 8192 + 100, 0xAB, 50)
        copy_async(back.address + 1, slab.address + 8192, 4099)
        stream.synchronize()
    data[100:150] = 0xAB
    got = back.tensor()
    assert torch.equal(got[1:4100], data)
    assert got[0] == 7
    assert got[4100:].eq(7).all()


def test_a_slab_is_no_tensor_where_torch_cannot_reach_it(device, slab, monkeypatch):
    monkeypatch.setattr("rocline.hip_kernels.driver.torch_sees_gpus", lambda: False)
    monkeypatch.setattr(slab.device, "is_host", False)
    with pytest.raises(HipError, match="sees no GPU; install its ROCm build"):
        slab.tensor()


def test_a_slab_is_a_tensor_where_torch_reaches_it(device, slab):
    view = slab.tensor()
    assert (view.dtype, view.numel(), view.data_ptr()) == (torch.uint8, slab.n_bytes, slab.address)
    view.fill_(3)
    assert view.sum().item() == 3 * slab.n_bytes


def test_copies_between_devices(device, pinned, rng):
    if len(devices()) < 2:
        pytest.skip("needs two GPUs")
    one, two = devices()[:2]
    one.enable_peer(two)
    one.enable_peer(two)  # again: not an error
    a, b = one.allocate(5000), two.allocate(5000)
    data, back = pinned(rand_bytes(rng, 5000)), pinned(5000)
    ready = None
    with one.stream():
        copy_async(a.address, data.address, 5000)
        copy_peer_async(b.address, two, a.address, one, 5000)
        ready = Event().record()
    with two.stream() as stream:
        stream.wait(ready)
        copy_async(back.address, b.address, 5000)
        stream.synchronize()
    assert torch.equal(back.tensor(), data.tensor())
    a.free()
    b.free()


def test_a_copy_past_its_slab_is_an_error(device, slab, pinned):
    if device.is_card:
        pytest.skip("only the CPU double checks bounds")
    other = devices()[1].allocate(4096)
    with pytest.raises(HipError, match="hipMemcpyAsync of 100 bytes on device 0: hipErrorInvalidValue"):
        copy_async(slab.address + slab.n_bytes - 99, pinned(100).address, 100)
    with pytest.raises(HipError, match="hipMemcpyPeerAsync of 100 bytes from device 0 to 1"):
        copy_peer_async(slab.address, devices()[1], other.address, devices()[0], 100)
    other.free()


def test_events(device, slab):
    with devices()[0].stream() as stream:
        start, end, plain = Event(timed=True), Event(timed=True), Event()
        start.record()
        for _ in range(3):
            fill_async(slab.address, 1, slab.n_bytes)
        end.record()
        plain.record()
        stream.synchronize()
        assert end.done()
        assert plain.done()
        plain.synchronize()
        assert 0 < end.ms_since(start) < 10_000


def test_streams_nest_and_restore(device):
    first, last = devices()[0], devices()[-1]
    outer, inner = first.stream(), last.stream()
    slab = last.allocate(1 << 28)  # tells the two by their free memory

    def current_free_bytes():
        return runtime.hip().hipMemGetInfo()[1]

    with outer:
        with inner:
            assert current_free_bytes() == last.memory().free_bytes
            assert (driver.here.device, driver.here.stream) == (devices()[-1].index, inner.handle)
            if torch.cuda.is_available():
                assert torch.cuda.current_stream().cuda_stream == inner.handle
        assert (driver.here.device, driver.here.stream) == (0, outer.handle)
        assert first is last or first.memory() != last.memory()  # the other device was current meanwhile
        assert current_free_bytes() == first.memory().free_bytes
        with outer:  # again inside itself
            pass
        assert driver.here.stream == outer.handle
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append((driver.here.device, driver.here.stream)))
        thread.start()
        thread.join()
        assert elsewhere == [(0, 0)]  # another thread's place is its own
    assert (driver.here.device, driver.here.stream) == (0, 0)
    with pytest.raises(RuntimeError, match="inside"), outer:
        raise RuntimeError("inside")
    assert driver.here.stream == 0
    slab.free()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_launch(device, add, n):
    values, out = torch.arange(n, dtype=torch.int32), device.full((n + 8,), -1, torch.int32)
    launch(add, grid=(n // 64 + 1, 1), args=(out, device.put(values), n, 5), lds_bytes=256)
    got = device.get(out)
    assert torch.equal(got[:n], values + 5)
    assert got[n:].eq(-1).all()


def test_launch_on_another_device(device, add):
    if len(devices()) < 2:
        pytest.skip("needs two GPUs")
    gpu = devices()[1]
    with gpu.stream() as stream:
        place = f"cuda:{gpu.index}" if device.is_card else "cpu"
        out = torch.zeros(64, dtype=torch.int32, device=place)
        launch(add, grid=(1, 1), args=(out, out, 64, 5), lds_bytes=256)
        stream.synchronize()
    assert out.eq(5).all()


def test_arguments_of_threads_do_not_mix(device, add):
    """One kernel, launched from several threads at once: each packs its own arguments."""
    outs = [device.full((64,), 0, torch.int32) for _ in range(4)]

    def work(i):
        for _ in range(200):
            launch(add, grid=(1, 1), args=(outs[i], outs[i], 64, i + 1), lds_bytes=256)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [device.get(out).unique().tolist() for out in outs] == [[200], [400], [600], [800]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grid": (0, 1)}, "hipErrorInvalidValue"),
        ({"lds_bytes": 257}, "its budget allows 256 bytes of LDS"),
        ({"args": lambda out: (out, out, 3)}, "want PPii: .*4 items"),
        ({"args": lambda out: (out, out, 3, 2**31)}, "want PPii"),
        ({"args": lambda out: (out, out, 3, 0.5)}, "want PPii"),
        ({"args": lambda out: (out, out, 3, 4, 5)}, "want PPii: .*4 items"),
    ],
)
def test_launch_errors_name_the_operator_and_its_arguments(device, add, change, reason):
    out = device.full((4, 16), 0, torch.int32)
    given = {"grid": (1, 1), "lds_bytes": 256, **change}
    given["args"] = change["args"](out) if "args" in change else (out, out, 3, 4)
    with pytest.raises(HipError, match=rf"add on device 0: {reason}") as caught:
        launch(add, **given)
    assert r"arguments (int32 [4, 16], int32 [4, 16], 3" in str(caught.value)
    assert "{'STEP_SCALE': 1}" in str(caught.value)


def test_an_address_is_not_a_tensor(device, add):
    out = device.full((64,), 0, torch.int32)
    with pytest.raises(HipError, match="argument 1 is 4096, not a tensor"):
        launch(add, grid=(1, 1), args=(out, 4096, 64, 1), lds_bytes=256)
    launch(add, grid=(1, 1), args=(out, None, 0, 1), lds_bytes=256)  # a null pointer that is not followed


def test_a_strided_tensor_is_refused(device, add):
    """A kernel gets an address and no strides."""
    out = device.full((8, 16), 0, torch.int32)
    with pytest.raises(HipError, match=r"argument 1 is not contiguous: strides \(16, 1\); .*int32 \[8, 8\]"):
        launch(add, grid=(1, 1), args=(out, out[:, :8], 64, 1), lds_bytes=256)


def test_a_tensor_elsewhere_is_refused(card, add):
    out = card.full((64,), 0, torch.int32)
    with pytest.raises(HipError, match="argument 1 is on cpu, the current stream on device 0"):
        launch(add, grid=(1, 1), args=(out, torch.zeros(64, dtype=torch.int32), 64, 1), lds_bytes=256)


def test_an_entry_point_that_is_not_there(device, add):
    with pytest.raises(HipError, match=r"has add.hip an entry point of that name\?: hipErrorNotFound"):
        launch(Kernel(add.source, "sub", "", threads=64, defines=dict(add.defines)), grid=(1, 1), args=())


def test_kernels_are_checked_where_they_are_declared():
    with pytest.raises(ValueError, match=r"unknown argument letters \['Z'\]"):
        Kernel("x.hip", "x", "PZ", threads=64)
    with pytest.raises(ValueError, match="65537 bytes of LDS"):
        Kernel("x.hip", "x", "P", threads=64, lds_bytes=65537)


def test_launches_are_counted_per_kernel_and_layer_kind(device, add):
    out = device.full((64,), 0, torch.int32)

    def once():
        launch(add, grid=(1, 1), args=(out, out, 64, 1), lds_bytes=256)

    def in_a_thread():
        with layer_kind("ratio 4"):
            once()

    before = launch_counts()
    once()
    with layer_kind("ratio 4"):
        once()
        with layer_kind("window"):
            once()
        once()
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    with pytest.raises(HipError):
        launch(add, grid=(0, 1), args=(out, out, 64, 1), lds_bytes=256)  # not launched, not counted
    assert launch_counts() - before == {("add", ""): 1, ("add", "ratio 4"): 3, ("add", "window"): 1}


MAPS = """\
7f00-7f10 r--p 00000000 08:01 1234 /usr/lib/libc.so.6
7f10-7f20 r--p 00000000 08:01 77 {one}
7f20-7f30 r-xp 00010000 08:01 77 {one}
7f30-7f40 rw-p 00000000 00:00 0
7f40-7f50 r-xp 00000000 08:01 {inode} {two}
"""


def test_one_runtime_is_one_file():
    one = "/opt/rocm/lib/libamdhip64.so.7.2.70200"
    check_one_runtime(MAPS.format(one=one, two=one, inode=77))
    check_one_runtime(MAPS.format(one=one, two="/opt/rocm-7/lib/libamdhip64.so.7", inode=77))  # by another name
    check_one_runtime(MAPS.format(one=one, two="/x/libamdhip64_helper.so", inode=78))


def test_two_runtimes_are_refused():
    one, two = "/opt/rocm/lib/libamdhip64.so.7", "/venv with space/torch/lib/libamdhip64.so"
    with pytest.raises(HipError, match=r"exactly one libamdhip64 .* found 2 \(/opt/rocm.*, /venv with space/torch"):
        check_one_runtime(MAPS.format(one=one, two=two, inode=78))


def test_no_runtime_is_refused():
    with pytest.raises(HipError, match=r"found 0 \(none\)"):
        check_one_runtime(MAPS.format(one="/lib/a.so", two="/lib/b.so", inode=1))


def run_python(code, rocm_path):
    environment = {**os.environ, "ROCM_PATH": str(rocm_path), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


LOAD = "from rocline.hip_kernels import driver\ntry:\n  print(driver.devices())\nexcept RuntimeError as e:\n  print(e)"


def test_without_a_library_the_error_says_what_to_do(tmp_path):
    found = run_python(LOAD, tmp_path)
    if "Device(0" in found.stdout:
        pytest.skip("a HIP runtime is installed system-wide")
    assert found.stdout.startswith("HIP: no runtime library (failed to dlopen"), found
    assert "name its folder in ROCM_PATH, or use the CPU" in found.stdout


def test_a_second_runtime_is_found_at_the_start(device, tmp_path):
    if device.is_card:
        pytest.skip("loads the CPU double twice")
    copy = tmp_path / "libamdhip64.so.7"
    copy.write_bytes((runtime.Path(os.environ["ROCM_PATH"]) / "lib" / "libamdhip64.so").read_bytes())
    found = run_python(f"import ctypes; ctypes.CDLL({str(copy)!r})\n{LOAD}", os.environ["ROCM_PATH"])
    assert "exactly one libamdhip64 in this process, found 2" in found.stdout, found
    assert str(copy) in found.stdout


def test_prepare_compiles_loads_and_reports(device, add, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "_compiler", kernel.Compiler(tmp_path))
    again = Kernel(add.source, "add", "PPii", threads=64, defines={"STEP_SCALE": 2}, lds_bytes=256)
    seen = []
    kernel.prepare([again], lambda *progress: seen.append(progress))
    assert seen == [(1, 1, f"add.hip STEP_SCALE=2 {devices()[0].arch}")]
    kernel.compiler().seal()
    out = device.full((64,), 0, torch.int32)
    launch(again, grid=(1, 1), args=(out, out, 64, 3), lds_bytes=256)
    assert device.get(out).eq(6).all()
    assert (kernel.compiler().n_compiled, kernel.compiler().n_late) == (1, 0)
