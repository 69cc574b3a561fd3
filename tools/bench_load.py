"""python -m rocline.tools.bench_load: how fast weights come to a card and are re-ordered there, as JSON lines.

The experts of one layer at the release's sizes, or as many of them as --experts says: from the host's memory, the same
by copies that are not pinned, and from a file that the page cache holds; beside plain copies in the same run, to the
card and within the host. What they weigh is noise. Each figure is the median of the repeats; the first run, which
compiles, is not counted.

of_transfer  the rate over that of pinned copies
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rocline.engine.checkpoint import Checkpoint, StoredStack
from rocline.engine.home import shapes_of
from rocline.engine.layout import TensorSpec
from rocline.engine.release import release_config
from rocline.engine.shards import StoredTensor
from rocline.hip_kernels.dispatch import Place
from rocline.hip_kernels.driver import HostBuffer, copy_async, devices
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.hip_kernels.runtime import HipError
from rocline.hip_kernels.uploader import PART_BYTES, PARTS, READ_BYTES, READERS
from rocline.pipeline.worker import SWITCH_INTERVAL_S

NOISE_BYTES = 64 << 20
SCALES, ONE = (119, 122), 127  # E8M0 codes
Matrices = tuple[Fp4Weight, Fp4Weight, Fp4Weight]


class Layer:
    """Experts in the host's memory: w1, w3 and w2 of [I, D], [I, D] and [D, I], as a checkpoint stores them."""

    def __init__(self, n_experts: int, width: int, inner: int) -> None:
        generator = torch.Generator().manual_seed(5)
        noise_u8 = torch.randint(0, 256, (NOISE_BYTES,), generator=generator, dtype=torch.uint8)

        def stack(n_out: int, n_in: int) -> Fp4Weight:
            n_bytes = n_experts * n_out * n_in // 2
            codes_u8 = noise_u8.repeat(-(-n_bytes // NOISE_BYTES))[:n_bytes]
            scales = torch.randint(*SCALES, (n_experts, n_out, n_in // 32), generator=generator, dtype=torch.uint8)
            return Fp4Weight(codes_u8.view(n_experts, n_out, n_in // 2), scales)

        def shared(n_out: int, n_in: int) -> Fp8Weight:
            codes_u8 = noise_u8[: n_out * n_in].view(n_out, n_in) & 0x3F  # no NaN
            return Fp8Weight(codes_u8, torch.full((-(-n_out // 32), n_in // 32), ONE - 8, dtype=torch.uint8))

        shapes = (inner, width), (inner, width), (width, inner)
        first, second, third = (stack(*shape) for shape in shapes)
        self.routed: Matrices = (first, second, third)
        self.shared = tuple(shared(*shape) for shape in shapes)
        self.n_bytes = sum(tensor.nbytes for weight in (*self.routed, *self.shared) for tensor in weight)

    def stored(self, folder: Path) -> tuple[Checkpoint, Matrices]:
        """The codes of routed experts in a file, expert after expert as in the release."""
        path, tensors, end = folder / "experts", dict[str, StoredTensor](), 0
        with path.open("wb") as file:
            for expert in range(len(self.routed[0].codes_e2m1x2)):
                for number, (codes_e2m1x2, _) in enumerate(self.routed):
                    spec = TensorSpec("I8", tuple(codes_e2m1x2.shape[1:]), "experts", shard=1, layer=0)
                    tensors[f"{number}.{expert}"] = StoredTensor(path, end, spec)
                    end += file.write(codes_e2m1x2[expert].numpy().data)
        checkpoint = Checkpoint(folder, tensors)

        def stack(number: int) -> Fp4Weight:
            names = [name for name in tensors if name.startswith(f"{number}.")]
            codes: Any = StoredStack(checkpoint, names, lambda n_bytes: None)
            return Fp4Weight(codes, self.routed[number].scales_e8m0)

        return checkpoint, (stack(0), stack(1), stack(2))


class Bench:
    """Works on the first card."""

    def __init__(self, repeats: int) -> None:
        self.place, self._repeats = Place(devices()[0], shapes_of(release_config().text_config)), repeats
        self._transfer = 0.0

    def report(self, what: str, n_bytes: int, call: Callable[[], object]) -> float:
        """Print and return GB/s."""
        with torch.inference_mode(), self.place.work(_no_workspace):
            seconds = [self._seconds(call) for _ in range(1 + self._repeats)][1:]
        rate = n_bytes / median(seconds) / 1e9
        of_transfer = {"of_transfer": round(rate / self._transfer, 3)} if self._transfer else {}
        facts = {"what": what, "gb": round(n_bytes / 1e9, 3), "gb_per_s": round(rate, 3), **of_transfer}
        print(json.dumps(facts), flush=True)
        return rate

    def _seconds(self, call: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        kept = call()
        self.place.stream.synchronize()
        took_s = time.perf_counter() - began_s
        del kept  # what a layer was made into: the next run finds its memory
        return took_s

    def copies(self, n_bytes: int) -> None:
        """Rates of one large copy after the other."""
        pinned, target = HostBuffer(n_bytes), self.place.device.allocate(n_bytes)
        pageable_u8 = torch.ones(n_bytes, dtype=torch.uint8)
        pinned.tensor().fill_(1)
        self._transfer = self.report(
            "copies from pinned memory", n_bytes, lambda: copy_async(target.address, pinned.address, n_bytes)
        )
        self.report(
            "copies from pageable memory", n_bytes, lambda: copy_async(target.address, pageable_u8.data_ptr(), n_bytes)
        )
        target.free()
        self.host_copies(pageable_u8, pinned)
        pinned.free()

        began_s = time.perf_counter()
        for buffer in [HostBuffer(PART_BYTES) for _ in range(PARTS)]:
            buffer.free()
        facts = {"what": "pinning, once a card", "gb": round(PARTS * PART_BYTES / 1e9, 3)}
        print(json.dumps(facts | {"ms": round(1e3 * (time.perf_counter() - began_s), 1)}), flush=True)

    def host_copies(self, pageable_u8: Tensor, pinned: HostBuffer) -> None:
        """What the readers do before a copy to the card can begin, all of it, and nothing else."""
        source_u8, target_u8 = pageable_u8.numpy(), pinned.tensor().numpy()
        with ThreadPoolExecutor(READERS) as readers:

            def copy() -> None:
                parts = [slice(start, start + READ_BYTES) for start in range(0, len(source_u8), READ_BYTES)]
                list(readers.map(lambda part: np.copyto(target_u8[part], source_u8[part]), parts))

            self.report(f"copies to pinned memory by {READERS} threads", len(source_u8), copy)

    def load(self, what: str, layer: Layer, routed: Matrices, is_pinned: bool = True) -> None:
        """Pinned memory is there from the first run on, as for a card's later layers."""
        with self.place.stream, self.place.uploading() if is_pinned else nullcontext():
            prepare = partial(self.place.prepare, "experts", routed, layer.shared)
            self.report(f"load and re-order {what}", layer.n_bytes, prepare)


def _no_workspace(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raise AssertionError(f"a workspace of {list(shape)} {dtype} while loading")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_load", description=__doc__)
    parser.add_argument("--experts", type=int, default=128, help="of a layer's 384 (default: %(default)s, 2.4 GB)")
    parser.add_argument("--width", type=int, default=5120, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2304, help="of an expert (default: %(default)s)")
    parser.add_argument("--copy-mib", type=int, default=1024, help="of a plain copy (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="for the file of experts (default: the system's for temporary files)"
    )
    args = parser.parse_args(argv)
    stored_bytes = 3 * args.experts * args.width * args.inner * 17 // 32
    needed_bytes, free_bytes = 2 * stored_bytes + (2 * args.copy_mib << 20), psutil.virtual_memory().available
    if 1.05 * needed_bytes > free_bytes:
        free = f"{free_bytes / 1e9:.1f} GB of memory are free, {needed_bytes / 1e9:.1f} wanted"
        print(f"bench_load: {free}; lower --experts {args.experts}", file=sys.stderr)
        return 1
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as where a model is served: readers take turns with who launches
    try:
        bench = Bench(args.repeats)
    except HipError as error:
        print(f"bench_load: {error}", file=sys.stderr)
        return 1
    bench.copies(args.copy_mib << 20)
    layer = Layer(args.experts, args.width, args.inner)
    bench.load("from memory", layer, layer.routed)
    bench.load("from memory, by pageable copies", layer, layer.routed, is_pinned=False)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoint, routed = layer.stored(Path(folder))
        with checkpoint:
            bench.load("from a file in the page cache", layer, routed)
    bench.place.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
