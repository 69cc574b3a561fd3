"""Window key/value rows: norm, rotation, ActQuant8 over the whole width (backbone.md section 5.2)."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator, run_slabs
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref

ROWS = 4  # a workgroup's


@cache
def _kernel(width: int) -> Kernel:
    """For rows of 64, 128, 256 or 512 channels."""
    return Kernel("window_row.hip", "window_row", "PPPPPPiif", threads=32 * ROWS, defines={"WIDTH": width})


@cache
def _norms(width: int, query_width: int) -> Kernel:
    defines = {"WIDTH": width, "QUERY_WIDTH": query_width}
    return Kernel("window_row.hip", "latent_norms", "PPPPPPiifPPP", threads=32 * ROWS, defines=defines, lds_bytes=16)


RELEASE_KERNELS = (_kernel(512), _norms(512, 1280))


@operator
def window_row(
    projected_bf16: Tensor,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None = None,
) -> None:
    """Fill rows_u8 [R, D + D/32] from projected_bf16 [R, D], norm_bf16 [D], cos_f32 and sin_f32 [R, rope_dim/2].

    With slots_i32 [R], row r goes to rows_u8 [N, D + D/32] at slots_i32[r], or nowhere where that is negative.
    """
    _bind(projected_bf16, norm_bf16, cos_f32, sin_f32, rows_u8, slots_i32)
    row_format = RowFormat("window", projected_bf16.shape[1])

    def slab(projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return row_format.pack(rope_ref(rmsnorm_ref(projected, norm_bf16, eps)[:, None], cos, sin)[:, 0])

    packed_u8 = rows_u8 if slots_i32 is None else rows_u8.new_empty((len(projected_bf16), rows_u8.shape[1]))
    run_slabs(slab, (projected_bf16, cos_f32, sin_f32), packed_u8)
    if slots_i32 is not None:
        stored = slots_i32 >= 0
        rows_u8[slots_i32[stored].long()] = packed_u8[stored]


def window_row_hip(
    projected_bf16: Tensor,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None = None,
) -> None:
    """window_row on the current stream: the same bytes wherever the norm's sum, in an order of its own, is the same."""
    n_rows, width, n_pairs = _bind(projected_bf16, norm_bf16, cos_f32, sin_f32, rows_u8, slots_i32)
    if n_rows:
        args = (rows_u8, projected_bf16, norm_bf16, cos_f32, sin_f32, slots_i32, n_rows, n_pairs, eps)
        launch(_kernel(width), grid=(-(-n_rows // ROWS), 1), args=args)


def latent_norms_hip(
    qr_bf16: Tensor,
    q_norm_bf16: Tensor,
    kv_bf16: Tensor,
    kv_norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None = None,
    rounded_bf16: Tensor | None = None,
) -> None:
    """rmsnorm_hip of qr_bf16 [R, q_lora] in place and window_row_hip, in one launch; the same bits.

    rounded_bf16 [R, q_lora], where given, is filled with the normed queries as act_round8_hip makes them.
    """
    n_rows, width, n_pairs = _bind(kv_bf16, kv_norm_bf16, cos_f32, sin_f32, rows_u8, slots_i32)
    wanted = {f"qr_bf16 {n_rows} Q": qr_bf16, "q_norm_bf16 Q": q_norm_bf16}
    if rounded_bf16 is not None:
        wanted[f"rounded_bf16 {n_rows} Q"] = rounded_bf16
    (query_width,) = bind_dims("latent_norms", "Q", wanted)
    if rounded_bf16 is not None and query_width % 32:
        raise BindError(f"latent_norms: rows of {query_width} channels to round; ActQuant8 wants a multiple of 32")
    if n_rows:
        args = (rows_u8, kv_bf16, kv_norm_bf16, cos_f32, sin_f32, slots_i32, n_rows, n_pairs, eps)
        queries = (qr_bf16, rounded_bf16, q_norm_bf16)
        grid = (n_rows + -(-n_rows // ROWS), 1)
        launch(_norms(width, query_width), grid=grid, args=(*args, *queries), lds_bytes=16)


def _bind(
    projected_bf16: Tensor,
    norm_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None,
) -> tuple[int, int, int]:
    row_bytes = RowFormat("window", projected_bf16.shape[1]).row_bytes
    wanted = {
        "projected_bf16 R D": projected_bf16,
        "norm_bf16 D": norm_bf16,
        "cos_f32 R I": cos_f32,
        "sin_f32 R I": sin_f32,
    }
    if slots_i32 is None:
        wanted[f"rows_u8 R {row_bytes}"] = rows_u8
    else:
        wanted |= {f"rows_u8 N {row_bytes}": rows_u8, "slots_i32 R": slots_i32}
    n_rows, width, n_pairs = bind_dims("window_row", "R D I", wanted)
    return n_rows, width, n_pairs
