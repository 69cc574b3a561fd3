"""linear.py's operators on the GPU: the binding of linear.hip.

Sums are in the order of wmma_gemm.hip.h. Where segments are cut depends on a weight's shape alone (segments_of), so
rows come out the same alone or among 4,096, from whichever of the kernels. Rows of a quantised linear come rounded, by
act_quant.act_round8_hip or the product that made them (round_out), or are so on their way in (round_rows).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Argument, Kernel, launch
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.weight_tiles import STEP, TILE, Kind, WeightTiles, check_scales

THREADS, WAVES, COLS = 256, 8, 128
FEW_ROWS, MID_ROWS = 16, 64
# By the rows of a workgroup: fewer workgroups than this leave much of a card idle, and segments go to workgroups of
# their own. Up to 64 rows need many loads on their way; of more, the sums of segments are a lot to move. The rule, and
# that of FEW_WORKGROUPS, where tactics.py has not measured.
ENOUGH_WORKGROUPS = {64: 192, 128: 64}
FEW_TILES = 2  # of columns, a wave; one where fewer workgroups than this would have them
FEW_WORKGROUPS = 64
FEW_LDS_BYTES = WAVES * FEW_TILES * TILE * TILE * 4  # the waves' sums, before them a tile a wave
# With rows that are rounded in LDS, as 16 of 1,280 channels need it: to round more in every workgroup takes longer than
# a launch before.
ROUND_LDS_BYTES = 51456

# How many segments K is cut into, by (N, K) of a group; a power of two up to WAVES. More of them keep more of one row's
# weight in flight; fewer cost less when rows are many. Where the columns alone fill a card one is enough.
_SEGMENTS: dict[tuple[int, int], int] = {
    (32768, 1280): 2,  # wq_b
    (25600, 6144): 2,  # engram.wkv
    (129280, 5120): 1,  # head
}
DEFAULT_SEGMENTS = 8


def tiled_lds_bytes(rows: int) -> int:
    """Of a workgroup with so many rows: two buffers of them, and a tile of columns a wave."""
    return (2 * rows + COLS) * (STEP + 8) * 2


def _kernel(name: str, lds_bytes: int) -> Kernel:
    arguments = "PPiiii" + "PPPPiii" + "PPiii" + "PPPPiii"  # rows; a product; how it finishes; another product
    return Kernel("linear.hip", name, arguments, threads=THREADS, lds_bytes=lds_bytes)


def _kernels(kind: str) -> dict[int, Kernel]:
    """By the rows of a workgroup."""
    return {
        FEW_ROWS: _kernel(f"{kind}_few", FEW_LDS_BYTES),
        **{rows: _kernel(f"{kind}_{rows}", tiled_lds_bytes(rows)) for rows in (64, 128)},
    }


_LINEAR = {"e4m3": _kernels("e4m3"), "bf16": _kernels("bf16")}
_ROUND_FEW = _kernel("e4m3_few_round", ROUND_LDS_BYTES)
_SUM = Kernel("linear.hip", "linear_sum", "Pi" + "PPPii" + "PPiii" + "PPPii", threads=THREADS)
_PREPARE_E4M3 = Kernel("linear.hip", "prepare_e4m3", "PPPPiii", threads=THREADS)
_PREPARE_BF16 = Kernel("linear.hip", "prepare_bf16", "PPiii", threads=THREADS)
RELEASE_KERNELS = (
    *_LINEAR["e4m3"].values(),
    *_LINEAR["bf16"].values(),
    _ROUND_FEW,
    _SUM,
    _PREPARE_E4M3,
    _PREPARE_BF16,
)


def segments_of(tiles: WeightTiles) -> tuple[int, int]:
    """How many segments K is cut into, waves that share a tile of columns where rows are few; a segment's length in
    blocks of 32 channels."""
    return _segments_of(tiles.n_out, tiles.n_blocks)


def _segments_of(n_out: int, n_blocks: int) -> tuple[int, int]:
    n = _SEGMENTS.get((n_out, n_blocks * STEP), DEFAULT_SEGMENTS)
    return n, -(-n_blocks // n)


def prepare_fp8_weight(weight: Fp8Weight, groups: int = 1) -> WeightTiles:
    """Tiles of codes_e4m3 [groups * N, K], whose scale tiles count rows of the whole tensor. At load: waits for the
    device. Raises BindError for a shape or scale that has no tiles."""
    n_rows, n_in = weight.codes_e4m3.shape
    check_scales("prepare_fp8_weight", "e4m3", weight.scales_e8m0)
    bind_dims(
        "prepare_fp8_weight",
        "",
        {
            "codes_e4m3 N K": weight.codes_e4m3,
            f"scales_e8m0 {-(-n_rows // 32)} {n_in // 32}": weight.scales_e8m0,
        },
    )
    tiles = WeightTiles.empty("e4m3", groups, n_rows // groups, n_in, weight.codes_e4m3.device)
    if n_rows != groups * tiles.n_out:
        raise BindError(f"prepare_fp8_weight: {n_rows} rows in {groups} groups; want the same number in each")
    args = (tiles.codes_u8, tiles.scales_u8, *weight, tiles.n_out, groups, tiles.n_blocks)
    launch(_PREPARE_E4M3, grid=(-(-tiles.n_lanes // THREADS), 1), args=args)
    return tiles


def prepare_bf16_weight(weight_bf16: Tensor) -> WeightTiles:
    """Tiles of weight_bf16 [N, K], at load. Raises BindError for a shape that has no tiles."""
    n_out, n_in = bind_dims("prepare_bf16_weight", "N K", {"weight_bf16 N K": weight_bf16})
    tiles = WeightTiles.empty("bf16", 1, n_out, n_in, weight_bf16.device)
    args = (tiles.codes_u8, weight_bf16, n_out, 1, tiles.n_blocks)
    launch(_PREPARE_BF16, grid=(-(-tiles.n_lanes // THREADS), 1), args=args)
    return tiles


class Turn(NamedTuple):
    """The rotation of the last 2 * I channels of each head of an output, as `rope` does it.

    cos_f32, sin_f32 [R, I]; head_width a multiple of 8, I of 4.
    """

    cos_f32: Tensor
    sin_f32: Tensor
    head_width: int


class Product(NamedTuple):
    """A weight, and where the rows' product with it goes: out [R, groups * N], BF16 or FP32."""

    tiles: WeightTiles
    out: Tensor


class _Plan(NamedTuple):
    rows: int  # of a workgroup
    wave_tiles: int  # of columns, where rows are few
    grid: tuple[int, int]
    # By product:
    segments: tuple[int, ...]  # the length of one
    parts: tuple[int, ...]  # waves, or workgroups, that share a sum
    floats: tuple[int, ...]  # of workspace, for sums of parts


class Launched(NamedTuple):
    """One or two products in one launch: the kind and the WeightTiles.shape of their weights.

    finishes  the first output is rounded or turned on its way out
    """

    kind: Kind
    shapes: tuple[tuple[int, int, int], ...]
    finishes: bool = False

    def key(self, n_rows: int) -> str:
        """For use_forms: of all row counts up to the next power of two."""
        names = "+".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.kind} {names} rows {1 << (n_rows - 1).bit_length()}"


def forms(of: Launched, n_rows: int) -> tuple[int, ...]:
    """The forms that a launch may have, all of the same bits: of at most FEW_ROWS rows tiles of columns a wave, of more
    launches, two of which the first leaves sums of parts. First the rule's, which wants the most workspace."""
    if n_rows <= FEW_ROWS:
        if of.finishes:
            return (FEW_TILES,)
        rule = FEW_TILES if _few_workgroups(of, FEW_TILES) >= FEW_WORKGROUPS else 1
        return rule, FEW_TILES + 1 - rule
    rows = 64 if n_rows <= MID_ROWS else 128
    widths = [groups * -(-n_out // COLS) for groups, n_out, _ in of.shapes]
    return (1,) if -(-n_rows // rows) * sum(widths) >= ENOUGH_WORKGROUPS[rows] else (2, 1)


def _few_workgroups(of: Launched, wave_tiles: int) -> int:
    own_cols = [TILE * wave_tiles * (WAVES // _segments_of(n_out, n_blocks)[0]) for _, n_out, n_blocks in of.shapes]
    return sum(groups * -(-n_out // own) for (groups, n_out, _), own in zip(of.shapes, own_cols, strict=True))


_measured: Mapping[str, int] = {}
_asked: dict[Launched, None] | None = None


def use_forms(measured: Mapping[str, int]) -> None:
    """Launches take these forms from now on, by Launched.key(); one that a launch cannot have is passed over. Of the
    whole process: before memory is lent by workspace_floats, or after all of that is back."""
    global _measured
    _measured = measured
    _plan.cache_clear()


@contextmanager
def asked() -> Iterator[Collection[Launched]]:
    """What is multiplied meanwhile. For a thread that is alone."""
    global _asked
    _asked = {}
    _plan.cache_clear()
    try:
        yield _asked
    finally:
        _asked = None


@lru_cache(4096)  # of shapes and row counts, while decoding the same few over and over
def _plan(n_rows: int, of: Launched) -> _Plan:
    if _asked is not None:
        _asked[of] = None
    may_be = forms(of, n_rows)
    form = _measured.get(of.key(n_rows), may_be[0])
    if form not in may_be:
        form = may_be[0]
    cuts = [_segments_of(n_out, n_blocks) for _, n_out, n_blocks in of.shapes]
    waves, segments = (tuple(values) for values in zip(*cuts, strict=True))
    if n_rows <= FEW_ROWS:
        return _Plan(FEW_ROWS, form, (_few_workgroups(of, form), 1), segments, waves, (0,) * len(of.shapes))
    rows = 64 if n_rows <= MID_ROWS else 128
    parts = tuple(
        1 if form == 1 else -(-shape[2] // segment) for shape, segment in zip(of.shapes, segments, strict=True)
    )
    widths = [groups * -(-n_out // COLS) for groups, n_out, _ in of.shapes]
    sizes = [n_rows * groups * n_out for groups, n_out, _ in of.shapes]
    floats = tuple(size * n if n > 1 else 0 for size, n in zip(sizes, parts, strict=True))
    return _Plan(rows, 1, (-(-n_rows // rows), sum(map(mul, widths, parts))), segments, parts, floats)


def workspace_floats(n_rows: int, *weights: WeightTiles) -> int:
    """FP32 elements of workspace that a call with so many rows and these weights needs; often 0."""
    return sum(_plan(n_rows, Launched(weights[0].kind, tuple([tiles.shape for tiles in weights]))).floats)


def _staged_lds_bytes(n_rows: int, n_in: int) -> int:
    """A tile of columns a wave, and so many rounded rows; in their place the waves' sums later."""
    return max(FEW_LDS_BYTES, (WAVES * TILE * (STEP + 8) + n_rows * (n_in + 8)) * 2)


def rounds_rows(n_rows: int, n_in: int) -> bool:
    """Whether a product can take its rows [n_rows, n_in] through ActQuant8 itself."""
    return n_rows <= FEW_ROWS and _staged_lds_bytes(n_rows, n_in) <= ROUND_LDS_BYTES


def multiply_together(
    op: str,
    x_bf16: Tensor,
    products: Sequence[Product],
    workspace_f32: Tensor | None = None,
    *,
    round_rows: bool = False,
    round_out: bool = False,
    turn: Turn | None = None,
    finite_u8: Tensor | None = None,
) -> None:
    """One or two products of the same rows on the current stream by one launch, two where sums are in parts.

    x_bf16         [R, groups * K]; two weights are of one kind and K, of one group
    workspace_f32  1-D, at least workspace_floats(R, ...) elements
    round_rows     x_bf16 goes through ActQuant8 first; for FP8 weights, where rounds_rows(R, K)
    round_out      the first output is BF16 and goes through ActQuant8, in groups of 32 channels; N a multiple of 32
    turn           the first output is BF16, and its heads rotate
    finite_u8      [R] gets a 0 where a row has an output that is no number

    The bits are those of single products, and of act_round8 and rope before and after. Raises BindError.
    """
    tiles, n_rows = products[0].tiles, _bind(op, x_bf16, products)
    if n_rows == 0:
        return
    finish = _finish(op, products[0], round_out, turn)
    shapes = tuple([product.tiles.shape for product in products])
    plan = _plan(n_rows, Launched(tiles.kind, shapes, finish is not _NO_FINISH))
    kernel = _LINEAR[tiles.kind][plan.rows]
    lds_bytes = kernel.lds_bytes
    if round_rows:
        if tiles.kind != "e4m3" or not rounds_rows(n_rows, tiles.n_in):
            raise BindError(
                f"{op}: {n_rows} rows of {tiles.n_in} to be rounded, {tiles.kind}; act_round8_hip is for them"
            )
        kernel, lds_bytes = _ROUND_FEW, _staged_lds_bytes(n_rows, tiles.n_in)
    sums = _sums(op, n_rows, plan, workspace_f32)
    targets = [_target(*each) for each in zip(products, plan.segments, plan.parts, sums, strict=True)]
    own = finish if sums[0] is None else _NO_FINISH
    rows = (x_bf16, finite_u8, n_rows, tiles.groups, tiles.n_blocks, plan.wave_tiles)
    second = targets[1] if len(targets) > 1 else _NO_PRODUCT
    launch(kernel, grid=plan.grid, args=(*rows, *targets[0], *own, *second), lds_bytes=lds_bytes)
    if any(plan.floats):
        _add_parts(n_rows, products, plan, sums, finish, finite_u8)


_NO_PRODUCT: tuple[Argument, ...] = (None, None, None, None, 0, 1, 1)
_NO_SUM: tuple[Argument, ...] = (None, None, None, 0, 0)
_NO_FINISH: tuple[Argument, ...] = (None, None, 1, 0, 0)


def _by_dtype(out: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """As BF16, as FP32."""
    return (None, out) if out.dtype == torch.float32 else (out, None)


def _target(product: Product, segment: int, parts: int, part_f32: Tensor | None) -> tuple[Argument, ...]:
    """The kernels' arguments."""
    tiles, out = product
    to = _by_dtype(out) if part_f32 is None else (None, part_f32)
    return *to, tiles.codes_u8, tiles.scales_u8, tiles.n_out, segment, parts


def _sums(op: str, n_rows: int, plan: _Plan, workspace_f32: Tensor | None) -> list[Tensor | None]:
    """By product: where the sums of its parts go."""
    n_floats = sum(plan.floats)
    if not n_floats:
        return [None] * len(plan.floats)
    if workspace_f32 is None or workspace_f32.numel() < n_floats:
        has = 0 if workspace_f32 is None else workspace_f32.numel()
        raise BindError(f"{op}: a workspace of {has} floats, {n_rows} rows need {n_floats}; take workspace_floats()")
    places = workspace_f32[:n_floats].split(list(plan.floats))
    return [place if n else None for place, n in zip(places, plan.floats, strict=True)]


def _add_parts(
    n_rows: int,
    products: Sequence[Product],
    plan: _Plan,
    sums: Sequence[Tensor | None],
    finish: tuple[Argument, ...],
    finite_u8: Tensor | None,
) -> None:
    in_parts: list[tuple[Argument, ...]] = []
    n_groups = 0
    for product, parts, part_f32 in zip(products, plan.parts, sums, strict=True):
        if part_f32 is not None:
            width = product.out.shape[1]
            in_parts.append((*_by_dtype(product.out), part_f32, width, parts))
            n_groups += -(-n_rows * width // THREADS)
    own = _NO_FINISH if sums[0] is None else finish
    second = in_parts[1] if len(in_parts) > 1 else _NO_SUM
    launch(_SUM, grid=(n_groups, 1), args=(finite_u8, n_rows, *in_parts[0], *own, *second))


def _bind(op: str, x_bf16: Tensor, products: Sequence[Product]) -> int:
    """The number of rows."""
    first = products[0].tiles
    wanted = {f"x_bf16 R {first.groups * first.n_in}": x_bf16}
    for i, (tiles, out) in enumerate(products):
        name = "out_f32" if out.dtype == torch.float32 else "out_bf16"
        wanted[f"{'' if i == 0 else 'second_'}{name} R {tiles.groups * tiles.n_out}"] = out
        if i and (tiles.kind, tiles.n_in, tiles.groups, first.groups, i) != (first.kind, first.n_in, 1, 1, 1):
            raise BindError(
                f"{op}: weights of {first.groups} x {first.n_in} channels in {first.kind} and of "
                f"{tiles.groups} x {tiles.n_in} in {tiles.kind}; want two alike, of one group, or call for each"
            )
    return bind_dims(op, "R", wanted)[0]


def _finish(op: str, product: Product, round_out: bool, turn: Turn | None) -> tuple[Argument, ...]:
    """The kernels' arguments."""
    tiles, out = product
    if not round_out and turn is None:
        return _NO_FINISH
    if out.dtype != torch.bfloat16 or (round_out and (turn is not None or tiles.n_out % 32)):
        raise BindError(
            f"{op}: {tiles.n_out} channels in {out.dtype} to be rounded or to rotate, not both; want BF16, and groups "
            "of 32 to round"
        )
    if turn is None:
        return (*_NO_FINISH[:-1], 1)
    of_rows = {"out_bf16 R N": out, "cos_f32 R I": turn.cos_f32, "sin_f32 R I": turn.sin_f32}
    (n_pairs,) = bind_dims(op, "I", of_rows)
    if turn.head_width % 8 or n_pairs % 4 or 2 * n_pairs > turn.head_width or tiles.n_out % turn.head_width:
        raise BindError(
            f"{op}: {n_pairs} pairs of {turn.head_width} channels of {tiles.n_out} rotate; want whole heads, in eights"
        )
    return turn.cos_f32, turn.sin_f32, turn.head_width, 2 * n_pairs, 0


def multiply_tiles(
    op: str,
    x_bf16: Tensor,
    tiles: WeightTiles,
    out: Tensor,
    workspace_f32: Tensor | None,
    finite_u8: Tensor | None = None,
) -> None:
    """out [R, groups * N], BF16 or FP32: each group's K channels of x_bf16 [R, groups * K] times its weight rows.

    finite_u8 [R], where given, gets a 0 where a row has an output that is no number.
    """
    multiply_together(op, x_bf16, [Product(tiles, out)], workspace_f32, finite_u8=finite_u8)


def fp8_linear_hip(
    x_bf16: Tensor,
    tiles: WeightTiles,
    out_bf16: Tensor,
    workspace_f32: Tensor | None = None,
    *,
    round_rows: bool = False,
    turn: Turn | None = None,
) -> None:
    """fp8_linear on the current stream: rows [R, K], out_bf16 [R, N]; FP32 sums, in another order.

    The rows have been through act_round8_hip, or go through it here with round_rows, where rounds_rows(R, K). turn
    rotates the heads of the output. workspace_f32, 1-D, has at least workspace_floats(R, tiles) elements.
    Raises BindError.
    """
    products = [Product(tiles, out_bf16)]
    multiply_together("fp8_linear", x_bf16, products, workspace_f32, round_rows=round_rows, turn=turn)


def bf16_linear_hip(x_bf16: Tensor, tiles: WeightTiles, out_bf16: Tensor, workspace_f32: Tensor | None = None) -> None:
    """bf16_linear on the current stream: x_bf16 [R, K], out_bf16 [R, N]; FP32 sums, in another order."""
    multiply_tiles("bf16_linear", x_bf16, tiles, out_bf16, workspace_f32)


def f32_linear_hip(x_bf16: Tensor, tiles: WeightTiles, out_f32: Tensor, workspace_f32: Tensor | None = None) -> None:
    """f32_linear on the current stream: x_bf16 [R, K], out_f32 [R, N]; FP32 sums, in another order."""
    multiply_tiles("f32_linear", x_bf16, tiles, out_f32, workspace_f32)
