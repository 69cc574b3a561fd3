"""The doctor's work on the cards themselves: copies by data, a kernel by bits, and memory that stays as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations, product
from statistics import median

import torch
from torch import Tensor

from rocline.hip_kernels.driver import Device, Event, HostBuffer, Slab, copy_async, copy_peer_async, fill_async
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import TILE_BYTES, VECTORS, index_prepare
from rocline.hip_kernels.index_score import History, Queries, RowTiles, index_score_hip, prepared_scores_ref
from rocline.hip_kernels.kernel import compiler
from rocline.hip_kernels.runtime import HipError, torch_sees_gpus
from rocline.pipeline.transport import check_pairs
from rocline.tools.doctor_checks import Cards, Check, gb_per_s, listed

RATE_BYTES, RATE_COPIES = 64 << 20, 3  # the fastest of so many copies
SLOW_PART = 0.5  # of the median: a pair below it goes another way than the others

CANARY_BYTES = 64 << 20
CROWD_BYTES = (1 << 20, 96 << 20, 2 << 20, 5 << 20)  # beside it: torch's small and large blocks, and whole segments

ROWS, HEADS, CHANNELS, POSITIONS, PAGE_ROWS = 17, 32, 128, 300, 32  # two tiles of rows, two workgroups, ten pages


def peer_copies(found: Cards) -> Check:
    """Every ordered pair of cards by data, as the engine checks them at its start, and how fast each is."""
    it = Check("peer copies")
    if not found.devices:
        it.not_applicable("no card")
        return it
    bad = _bad_pairs(it, found.devices)
    try:
        host, pairs = _rates(found.devices, bad)
    except HipError as error:
        it.problem(str(error), "the copies that are checked go, longer ones do not: see the kernel's log (dmesg)")
        return it
    it.values["from_host_bytes_per_s"] = {str(card): rates[0] for card, rates in host.items()}
    it.values["to_host_bytes_per_s"] = {str(card): rates[1] for card, rates in host.items()}
    it.values["pairs"] = [{"from": a, "to": b, "bytes_per_s": rate} for (a, b), rate in pairs.items()]
    _say_rates(it, "from host memory", {card: rates[0] for card, rates in host.items()})
    _say_rates(it, "to host memory", {card: rates[1] for card, rates in host.items()})
    if pairs:
        _say_pairs(it, pairs)
    return it


def _bad_pairs(it: Check, devices: Sequence[Device]) -> set[tuple[int, int]]:
    """Pairs that do not copy directly; says so, and counts the good ones."""
    try:
        verdicts = check_pairs(devices)
    except HipError:  # the first pair that nothing helps ends it: look at each
        return _lost_pairs(it, devices)
    bad = {pair: verdict.problem for pair, verdict in verdicts.items() if verdict.route == "host"}
    it.values["through_host"] = [{"from": a, "to": b, "problem": problem} for (a, b), problem in bad.items()]
    for (source, target), problem in bad.items():
        it.warning(
            f"from card {source} to {target}: {problem}",
            "it works through host memory, slower; for direct copies see `PCIe settings`: iommu=pt, ACS, large BAR",
        )
    if n_good := len(verdicts) - len(bad):
        it.ok(f"{n_good} of {len(verdicts)} ordered pairs, each card with itself too, copy directly and to the bit")
    return set(bad)


def _lost_pairs(it: Check, devices: Sequence[Device]) -> set[tuple[int, int]]:
    """When there is a pair that even host memory does not help."""
    advice = "leave one of them out with HIP_VISIBLE_DEVICES; `PCIe settings` may say why"
    lost: set[tuple[int, int]] = set()
    alone = [device for device in devices if _copies(it, [device], "leave the card out with HIP_VISIBLE_DEVICES")]
    for one, other in product(alone, repeat=2):
        if one.index < other.index and not _copies(it, [one, other], advice):
            lost |= {(one.index, other.index), (other.index, one.index)}
    unusable = {device.index for device in devices} - {device.index for device in alone}
    it.values["lost_pairs"], it.values["lost_cards"] = sorted(map(list, lost)), sorted(unusable)
    return lost | {(a.index, b.index) for a, b in product(devices, repeat=2) if {a.index, b.index} & unusable}


def _copies(it: Check, devices: Sequence[Device], advice: str) -> bool:
    try:
        check_pairs(devices)
        return True
    except HipError as error:
        it.problem(str(error), advice)
        return False


def _rates(
    devices: Sequence[Device], bad: set[tuple[int, int]]
) -> tuple[dict[int, tuple[float, float]], dict[tuple[int, int], float]]:
    """Bytes per second from and to host memory by card, and between cards where copies are direct."""
    host: dict[int, tuple[float, float]] = {}
    pairs: dict[tuple[int, int], float] = {}
    with _rooms(devices, 2 * RATE_BYTES) as (slabs, buffer):
        for device in devices:
            if (device.index, device.index) in bad:
                continue
            slab = slabs[device.index].address
            with device.stream():
                host[device.index] = (
                    _rate(partial(copy_async, slab, buffer.address, RATE_BYTES)),
                    _rate(partial(copy_async, buffer.address, slab, RATE_BYTES)),
                )
        for source, target in permutations(devices, 2):
            if (source.index, target.index) in bad:
                continue
            start, end = slabs[source.index].address, slabs[target.index].address + RATE_BYTES
            with target.stream():
                copy = partial(copy_peer_async, end, target, start, source, RATE_BYTES)
                pairs[source.index, target.index] = _rate(copy)
    return host, pairs


@contextmanager
def _rooms(devices: Sequence[Device], n_bytes: int) -> Iterator[tuple[dict[int, Slab], HostBuffer]]:
    """A slab on each device, and a pinned buffer of half as much."""
    with ExitStack() as stack:
        slabs = {}
        for device in devices:
            slabs[device.index] = device.allocate(n_bytes)
            stack.callback(slabs[device.index].free)
        buffer = HostBuffer(n_bytes // 2)
        stack.callback(buffer.free)
        yield slabs, buffer


def _rate(copy: Callable[[], None]) -> float:
    """Bytes per second of the fastest of a few copies of RATE_BYTES on the current stream."""
    least_ms = float("inf")
    for _ in range(RATE_COPIES):
        before, after = Event(timed=True).record(), Event(timed=True)
        copy()
        after.record().synchronize()
        least_ms = min(least_ms, after.ms_since(before))
    return RATE_BYTES / max(least_ms, 1e-3) * 1e3


def _say_rates(it: Check, what: str, rates: dict[int, float]) -> None:
    if not rates:
        return
    usual = median(rates.values())
    if slow := [card for card, rate in rates.items() if rate < SLOW_PART * usual]:
        it.warning(
            f"{what}: {listed(slow)} at {gb_per_s(min(rates.values()))}, the others at {gb_per_s(usual)}",
            "see `PCIe links` and in which slot the card is",
        )
    it.ok(f"{what}: {gb_per_s(min(rates.values()))} to {gb_per_s(max(rates.values()))} a card")


def _say_pairs(it: Check, pairs: dict[tuple[int, int], float]) -> None:
    usual = median(pairs.values())
    if slow := {pair: rate for pair, rate in pairs.items() if rate < SLOW_PART * usual}:
        (source, target), least = min(slow.items(), key=lambda item: item[1])
        it.warning(
            f"{len(slow)} pairs are slower than half the median of {gb_per_s(usual)}, the slowest from card {source} "
            f"to {target} at {gb_per_s(least)}",
            "see `PCIe links`, and `PCIe settings` for ACS; order the cards so that neighbours are fast",
        )
    it.ok(f"between cards: {gb_per_s(min(pairs.values()))} to {gb_per_s(max(pairs.values()))}")


def kernel(found: Cards) -> Check:
    """Index scores, the kernel with integer matrix products, on each card, bit for bit what torch says on the CPU."""
    it = Check("kernel")
    if not found.devices:
        it.not_applicable("no card")
        return it
    queries, history = _operands()
    want_f32 = prepared_scores_ref(queries, history)
    compiled_before, began_s = compiler().n_compiled, time.monotonic()
    right = []
    for device in found.devices:
        try:
            problem = _difference(_scores(device, queries, history), want_f32)
            advice = f"leave the card out; if all differ, nothing that runs by kernels can be trusted on {device.arch}"
        except HipError as error:
            problem, advice = str(error), "see `versions`: hiprtc and the driver must be of one ROCm"
        if problem:
            it.problem(f"card {device.index}: index_score: {problem}", advice)
        else:
            right.append(device.index)
    took_s, n_compiled = time.monotonic() - began_s, compiler().n_compiled - compiled_before
    it.values |= {"right": right, "compiled": n_compiled, "took_s": round(took_s, 3), "scores": want_f32.numel()}
    if right:
        how = f"compiled and run in {took_s:.1f} s" if n_compiled else "compiled earlier"
        it.ok(f"index_score on {listed(right)}: {want_f32.numel():,} scores equal to the bit, {how}")
    return it


def _operands() -> tuple[Queries, History]:
    """On the CPU, the same every time."""
    random = torch.Generator().manual_seed(1)
    row = RowFormat("index_key", CHANNELS)
    n_pages = -(-POSITIONS // PAGE_ROWS)
    q_rows_u8 = row.pack(torch.randn(ROWS, HEADS, CHANNELS, generator=random).bfloat16())
    k_rows_u8 = row.pack(torch.randn(n_pages * PAGE_ROWS, 1, CHANNELS, generator=random).bfloat16())
    q_tiles_u8 = torch.zeros(-(-ROWS // VECTORS), HEADS, TILE_BYTES, dtype=torch.uint8)
    k_tiles_u8 = torch.zeros(n_pages * PAGE_ROWS // VECTORS, 1, TILE_BYTES, dtype=torch.uint8)
    index_prepare(q_rows_u8, q_tiles_u8)
    index_prepare(k_rows_u8, k_tiles_u8)
    visible_i32 = torch.arange(ROWS, dtype=torch.int32) * POSITIONS // (ROWS - 1)  # from none to all
    weights_bf16 = torch.randn(ROWS, HEADS, generator=random).bfloat16()
    tables_i32 = torch.randperm(n_pages, generator=random).int()[None]
    keys_u8 = k_tiles_u8.view(n_pages, PAGE_ROWS // VECTORS, TILE_BYTES)
    queries = Queries(q_tiles_u8, weights_bf16, visible_i32, RowTiles.of([ROWS]))
    return queries, History(keys_u8, tables_i32, POSITIONS)


def _scores(device: Device, queries: Queries, history: History) -> Tensor:
    def put(tensor: Tensor) -> Tensor:
        return tensor.to(device.torch_device)

    with device.stream() as stream:
        tiles = RowTiles(
            put(queries.row_tiles.tiles_i32), put(queries.row_tiles.sequences_i32), queries.row_tiles.first
        )
        there = Queries(put(queries.tiles_u8), put(queries.weights_bf16), put(queries.visible_i32), tiles)
        keys = History(put(history.keys_u8), put(history.page_tables_i32), history.n_positions)
        scores_f32 = put(torch.full((ROWS, POSITIONS), float("nan")))  # unwritten shows
        index_score_hip(there, keys, scores_f32)
        stream.synchronize()
        return scores_f32.cpu()


def _difference(got_f32: Tensor, want_f32: Tensor) -> str:
    wrong = (got_f32.view(torch.int32) != want_f32.view(torch.int32)).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {want_f32.numel()} scores differ, the first at {at}: {got_f32[at]}, want {want_f32[at]}"


def canary(found: Cards) -> Check:
    """Whether memory stays what was written while other memory comes and goes beside it (cases B41, B42)."""
    it = Check("canary")
    if not found.devices:
        it.not_applicable("no card")
        return it
    whole = []
    for device in found.devices:
        try:
            problem = _loss(device)
        except HipError as error:
            problem = str(error)
        if problem:
            it.problem(f"card {device.index}: {problem}", "see `environment`; try another driver; leave the card out")
        else:
            whole.append(device.index)
    it.values["cards"] = whole
    if whole:
        beside = "slabs and torch's tensors" if torch_sees_gpus() else "slabs"
        it.ok(f"{listed(whole)}: {CANARY_BYTES >> 20} MiB stayed as written while {beside} came and went")
    return it


def _loss(device: Device) -> str:
    """What is wrong with a slab that lay there meanwhile, or with what came and went; empty if nothing."""
    n_words = CANARY_BYTES // 8
    pattern_i64 = (torch.arange(n_words) + (device.index << 40)) * 0x5851_F42D_4C95_7F2D  # another word everywhere
    slab, buffer = device.allocate(CANARY_BYTES), HostBuffer(CANARY_BYTES)
    try:
        words_i64 = buffer.tensor().view(torch.int64)
        words_i64.copy_(pattern_i64)
        with device.stream() as stream:
            copy_async(slab.address, buffer.address, CANARY_BYTES)
            stream.synchronize()
            beside = _crowd(device)
            words_i64.zero_()
            copy_async(buffer.address, slab.address, CANARY_BYTES)
            stream.synchronize()
        wrong = (words_i64 != pattern_i64).nonzero()[:, 0]
        if not len(wrong):
            return beside
        first = int(wrong[0])
        return (
            f"{len(wrong)} of {n_words} words of a slab changed while others came and went, the first at byte "
            f"{8 * first}: {int(words_i64[first]) & 0xFFFF_FFFF_FFFF_FFFF:#018x}"
        )
    finally:
        buffer.free()
        slab.free()


def _crowd(device: Device) -> str:
    """Take, fill and give back memory beside the canary; what of it did not hold, empty if all did."""
    buffer = HostBuffer(max(CROWD_BYTES))
    try:
        for byte, n_bytes in enumerate(CROWD_BYTES, start=1):
            slab = device.allocate(n_bytes)
            try:
                fill_async(slab.address, byte, n_bytes)
                copy_async(buffer.address, slab.address, n_bytes)
                device.synchronize()
            finally:
                slab.free()
            if not bool((buffer.tensor()[:n_bytes] == byte).all()):
                return f"a slab of {n_bytes} bytes filled with {byte} reads otherwise"
    finally:
        buffer.free()
    return _torch_crowd(device) if torch_sees_gpus() else ""


def _torch_crowd(device: Device) -> str:
    """As _crowd, by torch's allocator."""
    place = device.torch_device
    kept = [torch.full((n_bytes,), byte, dtype=torch.uint8, device=place) for byte, n_bytes in enumerate(CROWD_BYTES)]
    for byte in range(0, len(kept), 2):  # holes, which the next ones fill
        kept[byte] = torch.full((CROWD_BYTES[byte] // 2,), byte, dtype=torch.uint8, device=place)
    if wrong := [byte for byte, tensor in enumerate(kept) if not bool((tensor == byte).all())]:
        return f"torch's tensors of {[kept[byte].nbytes for byte in wrong]} bytes read other than they were filled"
    del kept
    torch.cuda.empty_cache()
    return ""
