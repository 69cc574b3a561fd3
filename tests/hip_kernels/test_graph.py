"""Captured graphs: what a launch of one does, when, to which memory, and what a capture refuses."""

import gc
import threading
from pathlib import Path

import pytest
import torch

from rocline.hip_kernels.binding import shapes_only
from rocline.hip_kernels.driver import Event, HostBuffer, copy_async, copy_peer_async, devices, fill_async, wait_for
from rocline.hip_kernels.graph import capture
from rocline.hip_kernels.kernel import Kernel, launch, launch_counts, layer_kind
from rocline.hip_kernels.runtime import HipError, hip
from rocline.hip_kernels.staging import Staging, fetch

SCALE = """
#include "port.hip.h"
RL_KERNEL(64) scale(int* out, float factor, const int* in, rl_i64 step, int n) {
  const int i = rl_bid_x() * 64 + rl_tid();
  if (i < n) out[i] = (int)(in[i] * factor) + (int)(step >> 32);
}
RL_EXPORT(scale)
"""
N = 100


@pytest.fixture(scope="module")
def kernel(device, tmp_path_factory):
    source = tmp_path_factory.mktemp("scale") / "scale.hip"
    source.write_text(SCALE)
    kernel = Kernel(source, "scale", "PfPqi", threads=64)
    for gpu in devices():
        kernel.function_on(gpu.index)  # a capture loads nothing
    return kernel


@pytest.fixture
def scale(kernel):
    """scale(out, in, factor, step): out = in * factor + step."""

    def run(out, source, factor, step):
        launch(kernel, grid=(-(-N // 64), 1), args=(out, factor, source, step << 32, N))

    return run


@pytest.fixture
def stream(device):
    with devices()[0].stream() as stream:
        yield stream


@pytest.fixture
def ints(device):
    """ints(value): [N] int32 on the device."""

    def make(value):
        made = device.full((N,), value, torch.int32)
        devices()[0].synchronize()  # torch made it on another stream
        return made

    return make


def values(tensor):
    return sorted(set(fetch(tensor).tolist()))


def set_to(tensor, value):
    """Once, on the current stream."""
    fill_async(tensor.data_ptr(), value, tensor.nbytes)  # every byte


def test_nothing_runs_before_the_launch_and_everything_at_each(stream, scale, ints):
    source, out = ints(5), ints(-1)
    with capture() as graph:
        scale(out, source, 3.0, 7)
    assert values(out) == [-1]
    graph.launch()
    assert values(out) == [22]
    set_to(source, 1)  # 0x01010101
    graph.launch()
    assert values(out) == [int(torch.tensor(0x01010101).float().mul(3.0)) + 7]  # memory as it is at the launch
    graph.close()


def test_arguments_are_those_of_the_capture(stream, scale, ints):
    """The kernel's own buffer for arguments is written again by every launch."""
    source, first, second = ints(1), ints(0), ints(0)
    with capture() as graph:
        scale(first, source, 2.0, 10)
        scale(second, source, 3.0, 20)
    scale(ints(0), source, 9.0, 90)
    for _ in range(2):
        set_to(first, 0)
        graph.launch()
        assert (values(first), values(second)) == ([12], [23])


def test_copies_fills_and_kernels_go_in_their_order(stream, scale, ints):
    source, between, out = ints(2), ints(0), ints(0)
    pinned = HostBuffer(out.nbytes)
    with capture() as graph:
        scale(between, source, 1.0, 1)
        copy_async(out.data_ptr(), between.data_ptr(), out.nbytes)
        fill_async(between.data_ptr(), 0, between.nbytes)
        scale(source, out, 2.0, 0)
        copy_async(pinned.address, source.data_ptr(), source.nbytes)
    seen = []
    for _ in range(3):
        graph.launch()
        stream.synchronize()
        seen.append([values(between), values(out), values(source), int(pinned.tensor().view(torch.int32)[N - 1])])
    assert seen == [[[0], [3], [6], 6], [[0], [7], [14], 14], [[0], [15], [30], 30]]
    pinned.free()


def test_two_graphs_and_single_launches_on_one_stream(stream, scale, ints):
    x = ints(1)
    with capture() as twice:
        scale(x, x, 2.0, 0)
    with capture() as plus_three:
        scale(x, x, 1.0, 3)
    twice.launch()
    plus_three.launch()
    scale(x, x, 10.0, 0)
    twice.launch()
    twice.close()
    assert values(x) == [100]
    plus_three.launch()
    assert values(x) == [103]


def test_another_stream_of_its_device_may_launch_it(stream, scale, ints):
    x = ints(1)
    with capture() as graph:
        scale(x, x, 1.0, 1)
    graph.launch()
    passed = Event().record()
    with devices()[0].stream() as other:
        other.wait(passed)
        graph.launch()
        assert values(x) == [3]


def test_a_stream_of_another_device_may_not(stream, scale, ints):
    if len(devices()) < 2:
        pytest.skip("needs two GPUs")
    x = ints(1)
    with capture() as graph:
        scale(x, x, 1.0, 1)
    with devices()[1].stream(), pytest.raises(HipError, match=r"graph of device 0: .* of device 1; enter a stream"):
        graph.launch()


def test_launches_count_as_what_they_stand_for(stream, scale, ints):
    x = ints(1)
    before = launch_counts()
    with capture() as graph:
        scale(x, x, 1.0, 1)
        with layer_kind("full"):
            scale(x, x, 1.0, 1)
            scale(x, x, 1.0, 1)
    assert launch_counts() == before
    assert graph.launches == {("scale", ""): 1, ("scale", "full"): 2}
    graph.launch()
    with layer_kind("not theirs"):
        graph.launch()
    scale(x, x, 1.0, 1)
    assert launch_counts() - before == {("scale", ""): 3, ("scale", "full"): 4}
    assert values(x) == [8]


def test_other_threads_are_not_captured(stream, scale, ints):
    x, theirs = ints(1), ints(1)
    found = []

    def work():
        with devices()[0].stream() as own:
            scale(theirs, theirs, 1.0, 1)
            slab = devices()[0].allocate(4096)  # they may wait, and ask for memory
            own.synchronize()
            slab.free()
            found.append(values(theirs))

    with capture() as graph:
        scale(x, x, 1.0, 1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        scale(x, x, 1.0, 1)
    assert found == [[2]]
    graph.launch()
    assert (values(x), values(theirs)) == ([3], [2])


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda kept: kept["event"].synchronize(), "hipEventSynchronize"),
        (lambda kept: kept["event"].done(), "hipEventQuery"),
        (lambda kept: kept["event"].record(), "hipEventRecord"),
        (lambda kept: wait_for(kept["event"]), "hipStreamWaitEvent"),
        (lambda kept: kept["stream"].wait(kept["event"]), "hipStreamWaitEvent on Device"),
        (lambda kept: kept["stream"].synchronize(), "hipStreamSynchronize on Device"),
        (lambda kept: devices()[0].synchronize(), "hipDeviceSynchronize of Device"),
        (lambda kept: devices()[0].allocate(4096), "hipMalloc of 4096 bytes on Device"),
        (lambda kept: kept["slab"].free(), "hipFree of 64 bytes on Device"),
        (lambda kept: HostBuffer(16), "hipHostMalloc of 16 bytes"),
        (lambda kept: kept["pinned"].free(), "hipHostFree of 32 bytes"),
        (lambda kept: kept["staging"].put(torch.zeros(4), kept["x"][:4].view(torch.float32)), "put of 16 bytes"),
        (lambda kept: fetch(kept["x"]), "fetch of 400 bytes"),
        (
            lambda kept: copy_peer_async(kept["slab"].address, devices()[0], 0, devices()[0], 8),
            "hipMemcpyPeerAsync of 8",
        ),
        (lambda kept: devices()[0].stream().__enter__(), "entering another stream, of Device"),
        (lambda kept: kept["graph"].launch(), "launching a graph"),
        (lambda kept: capture().__enter__(), "a capture in a capture"),
        (lambda kept: launch(kept["not loaded"], grid=(1, 1), args=(None, 1.0, None, 0, 0)), "loading Kernel"),
    ],
    ids=lambda value: value.split(" of ")[0].replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_the_host_waits_for_is_refused_and_the_capture_goes_on(stream, kernel, scale, ints, refused, words):
    x = ints(1)
    with capture() as empty:
        pass
    kept = {"event": Event().record(), "stream": stream, "x": x, "graph": empty, "staging": Staging()}
    kept |= {"slab": devices()[0].allocate(64), "pinned": HostBuffer(32)}
    kept["not loaded"] = Kernel(kernel.source, "scale", "PfPqi", threads=64, defines={"ANOTHER": 1})
    with capture() as graph:
        scale(x, x, 1.0, 1)
        with pytest.raises(
            HipError, match=rf"^{words}.*: this thread is capturing a graph on device 0, .* do it before"
        ):
            refused(kept)
        scale(x, x, 1.0, 1)
    graph.launch()
    assert values(x) == [3]
    for name in ("slab", "pinned"):
        kept[name].free()
    kept["staging"].close()


def test_what_the_runtime_finds_wrong_is_said_where_the_capture_ends(stream, scale, ints):
    x = ints(1)
    capturing = capture()
    graph = capturing.__enter__()
    scale(x, x, 1.0, 1)
    hip().hipStreamSynchronize(stream.handle)  # as a library might
    with pytest.raises(HipError, match=r"capture on device 0: hipStreamEndCapture, .*: hipErrorStreamCapture"):
        capturing.__exit__(None, None, None)
    with pytest.raises(HipError, match="its capture still goes on or has failed"):
        graph.launch()
    scale(x, x, 1.0, 4)
    assert values(x) == [5]


def test_an_exception_drops_the_graph_and_frees_the_stream(stream, scale, ints):
    x = ints(1)
    before = launch_counts()
    graphs = []

    def broken():
        with capture() as graph:
            graphs.append(graph)
            scale(x, x, 1.0, 1)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        broken()
    assert (values(x), launch_counts()) == ([1], before)
    with pytest.raises(HipError, match="capture it again"):
        graphs[0].launch()
    graphs[0].close()
    with capture() as again:
        scale(x, x, 1.0, 2)
    again.launch()
    assert values(x) == [3]


def test_inside_its_own_block_and_when_closed_it_cannot_be_launched(stream, scale, ints):
    x = ints(1)
    with capture() as graph:
        scale(x, x, 1.0, 1)
        with pytest.raises(HipError, match="launching a graph"):
            graph.launch()
    graph.close()
    graph.close()  # again: nothing
    with pytest.raises(HipError, match="graph: it is closed"):
        graph.launch()
    assert values(x) == [1]


def test_the_null_stream_is_refused(device):
    with pytest.raises(HipError, match="HIP captures no null stream; enter a stream of the device first"), capture():
        pass


def test_a_failing_kernel_is_an_error_of_the_launch(device, stream):
    if device.is_card:
        pytest.skip("misuse that only the CPU double answers")
    probe = Kernel(Path(__file__).with_name("shim_probes.hip"), "some_miss_a_wave_barrier", "", threads=64)
    probe.function_on(0)
    with capture() as graph:
        launch(probe, grid=(1, 1), args=())
    before = launch_counts()
    with pytest.raises(HipError, match="hipGraphLaunch on device 0: hipErrorLaunchFailure"):
        graph.launch()
    assert launch_counts() == before


def test_on_paper_a_capture_does_nothing():
    before = launch_counts()
    with shapes_only():
        with capture() as graph, capture():  # also where HIP itself would refuse
            copy_async(0, 0, 10)
        graph.launch()
        graph.close()
    assert launch_counts() == before


def test_a_graph_is_destroyed_once(stream, scale, ints, monkeypatch):
    """By close, or with the last reference to it."""
    destroyed = []
    destroy = hip().hipGraphExecDestroy
    monkeypatch.setattr(hip(), "hipGraphExecDestroy", lambda handle: destroyed.append(handle) or destroy(handle))
    x = ints(0)
    with capture() as closed:
        scale(x, x, 1.0, 1)
    with capture() as dropped:
        scale(x, x, 1.0, 1)
    for graph in (closed, dropped):
        graph.launch()
    stream.synchronize()
    assert destroyed == []
    closed.close()
    assert len(destroyed) == 1
    del closed, dropped, graph
    gc.collect()
    assert len(set(destroyed)) == len(destroyed) == 2
