"""Low-rank queries and window rows on the GPU: two products and the norms after them (backbone.md section 5.1, 5.2)."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear_hip import WAVES, segments_of
from rocline.hip_kernels.weight_tiles import STEP, TILE, WeightTiles

FEW_ROWS = 2  # at most 8; one workgroup norms them, and more rows are quicker in two launches
LDS_BYTES = WAVES * TILE * (STEP + 8) * 2 + 4


@cache
def _kernel(width: int, query_width: int) -> Kernel:
    """For window rows of 64, 128, 256 or 512 channels."""
    arguments = "PPPPPPiif" + "PPP" + "PPPPPP" + "iiiii"
    defines = {"WIDTH": width, "QUERY_WIDTH": query_width}
    return Kernel("latents.hip", "latents_few", arguments, threads=32 * WAVES, defines=defines, lds_bytes=LDS_BYTES)


RELEASE_KERNELS = (_kernel(512, 1280),)


def latents_few_hip(
    rounded_bf16: Tensor,
    wq_a: WeightTiles,
    qr_bf16: Tensor,
    wkv: WeightTiles,
    projected_bf16: Tensor,
    q_norm_bf16: Tensor,
    kv_norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None,
    rounded_qr_bf16: Tensor | None,
    counter_i32: Tensor,
) -> None:
    """layer_ops.latents on the current stream, for at most FEW_ROWS rows, rounded_bf16 [R, K] through act_round8_hip.

    The bits are those of fp8_linear_hip and latent_norms_hip. rounded_qr_bf16 [R, q_lora] is filled with the normed
    queries through ActQuant8. counter_i32 [1] holds 0, and does so again afterwards. Raises BindError.
    """
    query_width, width = wq_a.n_out, wkv.n_out
    row_bytes = RowFormat("window", width).row_bytes
    wanted = {
        f"rounded_bf16 R {wq_a.n_in}": rounded_bf16,
        f"qr_bf16 R {query_width}": qr_bf16,
        f"rounded_qr_bf16 R {query_width}": rounded_qr_bf16,
        f"projected_bf16 R {width}": projected_bf16,
        f"q_norm_bf16 {query_width}": q_norm_bf16,
        f"kv_norm_bf16 {width}": kv_norm_bf16,
        "cos_f32 R I": cos_f32,
        "sin_f32 R I": sin_f32,
        f"rows_u8 {'R' if slots_i32 is None else 'N'} {row_bytes}": rows_u8,
        "slots_i32 R": slots_i32,
        "counter_i32 1": counter_i32,
    }
    given = {spec: tensor for spec, tensor in wanted.items() if tensor is not None}
    n_rows, n_pairs = bind_dims("latents", "R I", given)
    if n_rows > FEW_ROWS or wkv.n_in != wq_a.n_in or query_width % STEP:
        raise BindError(
            f"latents: {n_rows} rows of {wq_a.n_in} and {wkv.n_in} channels to queries of {query_width}; "
            f"want at most {FEW_ROWS}, the same rows for both, and whole groups of {STEP} to round"
        )
    if not n_rows:
        return
    (segments_q, segment_q), (segments_kv, segment_kv) = segments_of(wq_a), segments_of(wkv)
    n_groups = sum(
        -(-(n_out // TILE) // (WAVES // segments))
        for n_out, segments in ((query_width, segments_q), (width, segments_kv))
    )
    window = (rows_u8, projected_bf16, kv_norm_bf16, cos_f32, sin_f32, slots_i32, n_rows, n_pairs, eps)
    queries = (qr_bf16, rounded_qr_bf16, q_norm_bf16)
    weights = (rounded_bf16, wq_a.codes_u8, wq_a.scales_u8, wkv.codes_u8, wkv.scales_u8, counter_i32)
    sizes = (wq_a.n_blocks, segment_q, segments_q, segment_kv, segments_kv)
    args = (*window, *queries, *weights, *sizes)
    launch(_kernel(width, query_width), grid=(n_groups, 1), args=args, lds_bytes=LDS_BYTES)
