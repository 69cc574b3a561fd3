"""Work of one stream captured once and launched whole, which costs the host one call instead of one for each kernel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rocline.hip_kernels import kernel
from rocline.hip_kernels.binding import is_shapes_only
from rocline.hip_kernels.driver import here, refuse_in_capture
from rocline.hip_kernels.runtime import HipError, check, hip


class Graph:
    """What capture() has captured, to be launched when the `with` of its capture has ended.

    device    its index
    launches  the kernel launches that one launch() stands for: {(kernel name, layer kind): n}
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.launches: dict[tuple[str, str], int] = {}
        self._executable = 0  # a hipGraphExec_t
        self._destroy: weakref.finalize[Any, Graph] | None = None

    def launch(self) -> None:
        """Put all of it on the current stream, any of its device, in its order; count its launches. Does not wait.

        Two launches of one graph must not run at once: they would write the same memory. Raises HipError.
        """
        if is_shapes_only():
            return
        refuse_in_capture("launching a graph")
        if not self._executable:
            raise HipError("graph: it is closed, or its capture still goes on or has failed; capture it again")
        if here.device != self.device:
            raise HipError(
                f"graph of device {self.device}: the current stream is of device {here.device}; "
                "enter a stream of the graph's device"
            )
        check(hip().hipGraphLaunch(self._executable, here.stream), "hipGraphLaunch on device %d", self.device)
        kernel.count(self.launches)

    def close(self) -> None:
        """Forget it. Its launches must have passed. A second call does nothing."""
        self._executable = 0
        if self._destroy:
            self._destroy()

    def _become(self, executable: int) -> None:
        self._executable = executable
        self._destroy = weakref.finalize(self, hip().hipGraphExecDestroy, executable)
        self._destroy.atexit = False


@contextmanager
def capture() -> Iterator[Graph]:
    """Capture what this thread puts on the current stream meanwhile; none of it runs before the graph is launched.

    Captured are kernel launches, copy_async and fill_async; torch's operators too where torch sees the GPUs, if they
    ask for no memory. A launch of the graph does them again, with the same addresses and arguments, on memory as it
    then is. So all memory that took part, temporaries and pinned host memory too, must stay until the graph is closed
    and its last launch has passed. What changes from launch to launch is read from that memory.

    Other threads go on working on their own streams. The kernels must be loaded (kernel.prepare). The null stream, and
    whatever the host would wait for, raise HipError: events, memory from the runtime, uploads through Staging.
    A block that ends by an exception drops the graph and leaves the stream as before. Within shapes_only nothing is
    captured, and launches do nothing.
    """
    graph = Graph(here.device)
    if is_shapes_only():
        yield graph
        return
    refuse_in_capture("a capture in a capture")
    stream, where = here.stream, f"capture on device {here.device}"
    if not stream:
        raise HipError(f"{where}: HIP captures no null stream; enter a stream of the device first")
    # Of this thread alone: in HIP's global mode another thread's hipMalloc or wait would spoil the capture.
    mode = hip().hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
    check(hip().hipStreamBeginCapture(stream, mode), f"{where}: hipStreamBeginCapture")
    here.captures = True
    try:
        with kernel.count_apart() as graph.launches:
            yield graph
    except BaseException:
        status, captured = hip().hipStreamEndCapture(stream)
        if status == 0:
            hip().hipGraphDestroy(captured)
        raise
    finally:
        here.captures = False
    captured = check(
        hip().hipStreamEndCapture(stream),
        f"{where}: hipStreamEndCapture, which reports what no graph can hold; capture only kernels, copies and fills",
    )
    made = hip().hipGraphInstantiateWithFlags(captured, 0)
    hip().hipGraphDestroy(captured)
    graph._become(int(check(made, f"{where}: hipGraphInstantiateWithFlags")))
    # Now, and not with the first launch: it takes device memory, and the host as long as fifty launches.
    check(hip().hipGraphUpload(graph._executable, stream), f"{where}: hipGraphUpload")
