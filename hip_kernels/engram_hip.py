"""Engram on the GPU: table rows that the host has gathered, and the gated addition (backbone.md section 11.4, 11.5);
of few rows all of it in one launch, with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear_hip import FEW_LDS_BYTES, FEW_TILES, WAVES, segments_of
from rocline.hip_kernels.weight_tiles import STEP, TILE, WeightTiles

THREADS, STREAMS = 256, 4
FEW_ROWS = 2  # one workgroup adds them; at most 8

_DECODE = Kernel("engram_rows.hip", "engram_decode", "PPPi", threads=THREADS)


@cache
def _gate(width: int) -> Kernel:
    lds_bytes, defines = STREAMS * width * 2, {"WIDTH": width}
    arguments = "P" * 11 + "iff"
    return Kernel("engram.hip", "engram_gate", arguments, threads=32 * STREAMS, defines=defines, lds_bytes=lds_bytes)


@cache
def _few(width: int, n_in: int) -> Kernel:
    lds_bytes, defines = _few_lds_bytes(FEW_ROWS, n_in), {"WIDTH": width}
    arguments = "P" * 14 + "iiiiiiff"
    return Kernel("engram.hip", "engram_few", arguments, threads=32 * WAVES, defines=defines, lds_bytes=lds_bytes)


def _few_lds_bytes(n_rows: int, n_in: int) -> int:
    """A word, a tile of columns a wave and so many rounded rows; in the place of these the waves' sums later."""
    return 16 + max(FEW_LDS_BYTES, (WAVES * TILE * (STEP + 8) + n_rows * (n_in + 8)) * 2)


RELEASE_KERNELS = (_DECODE, _gate(5120), _few(5120, 6144))


def engram_decode_hip(codes_e4m3: Tensor, scales_e8m0: Tensor, out_bf16: Tensor) -> None:
    """Fill out_bf16 [N, d] from table rows as the host gathered them, on the current stream; exact.

    codes_e4m3 [N, d], scales_e8m0 [N, d/32]. A token's columns are d = 256 each; N is tokens times columns.
    """
    n_rows, width, n_groups = bind_dims(
        "engram_decode",
        "N D G",
        {"codes_e4m3 N D": codes_e4m3, "scales_e8m0 N G": scales_e8m0, "out_bf16 N D": out_bf16},
    )
    if width != 32 * n_groups:
        raise BindError(f"engram_decode: rows of {width} codes with {n_groups} scales; want one for every 32")
    if n_pieces := n_rows * width // 8:
        launch(_DECODE, grid=(-(-n_pieces // THREADS), 1), args=(out_bf16, codes_e4m3, scales_e8m0, n_pieces))


def engram_gate_hip(
    streams_bf16: Tensor,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    alive_u8: Tensor,
    eps: float,
    out_bf16: Tensor,
    gates_f32: Tensor,
) -> None:
    """engram.engram_gate on the current stream, for 4 streams of D channels, a multiple of 8.

    Sums have an order of their own and the sigmoid is explog.py's; given equal gates the streams have equal bits.
    """
    wanted = {"alive_u8 R": alive_u8, "out_bf16 R 4 D": out_bf16}
    n_rows, width = _bind_gate(streams_bf16, kv_bf16, q_weight_bf16, k_weight_bf16, gates_f32, wanted)
    if n_rows:
        operands = (streams_bf16, None, None, None, kv_bf16, q_weight_bf16, k_weight_bf16, None, alive_u8)
        launch(_gate(width), grid=(n_rows, 1), args=(out_bf16, gates_f32, *operands, 0, eps, width**-0.5))


def engram_merge_hip(
    streams_bf16: Tensor,
    sublayer_bf16: Tensor | None,
    post_f32: Tensor | None,
    comb_f32: Tensor | None,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    lookback_i32: Tensor,
    eps: float,
    gates_f32: Tensor,
) -> None:
    """engram.engram_merge on the current stream: the bits of mhc_merge and engram_gate_hip."""
    wanted = {
        "sublayer_bf16 R D": sublayer_bf16,
        "post_f32 R 4": post_f32,
        "comb_f32 R 4 4": comb_f32,
        "lookback_i32 R N": lookback_i32,
    }
    given = {spec: tensor for spec, tensor in wanted.items() if tensor is not None}
    n_rows, width = _bind_gate(streams_bf16, kv_bf16, q_weight_bf16, k_weight_bf16, gates_f32, given)
    if n_rows:
        merging = (sublayer_bf16, post_f32, comb_f32)
        operands = (streams_bf16, *merging, kv_bf16, q_weight_bf16, k_weight_bf16, lookback_i32, None)
        numbers = (lookback_i32.shape[1], eps, width**-0.5)
        lds_bytes = 0 if sublayer_bf16 is None else STREAMS * width * 2
        launch(_gate(width), grid=(n_rows, 1), args=(streams_bf16, gates_f32, *operands, *numbers), lds_bytes=lds_bytes)


def engram_few_hip(
    codes_e4m3: Tensor,
    scales_e8m0: Tensor,
    wkv: WeightTiles,
    kv_bf16: Tensor,
    streams_bf16: Tensor,
    sublayer_bf16: Tensor | None,
    post_f32: Tensor | None,
    comb_f32: Tensor | None,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    lookback_i32: Tensor,
    eps: float,
    gates_f32: Tensor,
    counter_i32: Tensor,
) -> None:
    """engram.engram_add on the current stream, for at most FEW_ROWS rows.

    The bits are those of engram_decode_hip, act_round8_hip, fp8_linear_hip and engram_merge_hip.
    codes_e4m3 [R, K], scales_e8m0 [R, K/32]; kv_bf16 [R, 5 D] is filled. counter_i32 [1] holds 0, and does so again
    afterwards. Raises BindError.
    """
    wanted = {
        f"codes_e4m3 R {wkv.n_in}": codes_e4m3,
        f"scales_e8m0 R {wkv.n_blocks}": scales_e8m0,
        "sublayer_bf16 R D": sublayer_bf16,
        "post_f32 R 4": post_f32,
        "comb_f32 R 4 4": comb_f32,
        "lookback_i32 R N": lookback_i32,
        "counter_i32 1": counter_i32,
    }
    given = {spec: tensor for spec, tensor in wanted.items() if tensor is not None}
    n_rows, width = _bind_gate(streams_bf16, kv_bf16, q_weight_bf16, k_weight_bf16, gates_f32, given)
    if n_rows > FEW_ROWS or wkv.shape[:2] != (1, 5 * width):
        raise BindError(
            f"engram_few: {n_rows} rows, a weight of {wkv.groups} x {wkv.n_out} columns; want at most {FEW_ROWS}, and "
            f"{5 * width}"
        )
    if not n_rows:
        return
    n_segments, segment = segments_of(wkv)
    n_tiles = -(-wkv.n_out // TILE)
    n_groups = -(-n_tiles // (WAVES // n_segments * FEW_TILES))
    merging = (sublayer_bf16, post_f32, comb_f32)
    tensors = (streams_bf16, gates_f32, *merging, kv_bf16, q_weight_bf16, k_weight_bf16, lookback_i32)
    operands = (codes_e4m3, scales_e8m0, wkv.codes_u8, wkv.scales_u8, counter_i32)
    sizes = (n_rows, lookback_i32.shape[1], n_groups, wkv.n_blocks, segment, n_segments)
    launch(
        _few(width, wkv.n_in),
        grid=(n_groups, 1),
        args=(*tensors, *operands, *sizes, eps, width**-0.5),
        lds_bytes=_few_lds_bytes(n_rows, wkv.n_in),
    )


def _bind_gate(
    streams_bf16: Tensor,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    gates_f32: Tensor,
    more: Mapping[str, Tensor],
) -> tuple[int, int]:
    width = streams_bf16.shape[2]
    wanted = {
        "streams_bf16 R 4 D": streams_bf16,
        f"kv_bf16 R {5 * width}": kv_bf16,
        "q_weight_bf16 4 D": q_weight_bf16,
        "k_weight_bf16 4 D": k_weight_bf16,
        "gates_f32 R 4": gates_f32,
    }
    n_rows, width = bind_dims("engram_gate", "R D", {**wanted, **more})
    return n_rows, width
