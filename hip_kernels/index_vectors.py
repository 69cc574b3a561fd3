"""Index queries, keys and head weights: what scoring history compares (backbone.md section 6 and 7, steps 1 and 2)."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs, run_tiles
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear import linear_ref
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref

WAVES = 8  # vectors a workgroup
_QUERY = Kernel("index_vectors.hip", "index_query", "PPPPii", threads=32 * WAVES)
RELEASE_KERNELS = (_QUERY,)


@operator
def index_query(q_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor) -> None:
    """Fill rows_u8 [R, H, d/2 + d/32]: q_bf16 [R, H, d] rotated at its own position, then ActQuant4 (E8M0)."""
    bind_dims(
        "index_query",
        "R",
        {"q_bf16 R H D": q_bf16, "cos_f32 R I": cos_f32, "sin_f32 R I": sin_f32, "rows_u8 R H B": rows_u8},
    )
    row_format = RowFormat("index_key", q_bf16.shape[2])
    run_slabs(lambda q, cos, sin: row_format.pack(rope_ref(q, cos, sin)), (q_bf16, cos_f32, sin_f32), rows_u8)


def index_query_hip(q_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor) -> None:
    """index_query on the current stream, the same bytes, for 128 channels of which 64 rotate. Keys are H = 1."""
    n_rows, n_heads = bind_dims(
        "index_query",
        "R H",
        {"q_bf16 R H 128": q_bf16, "cos_f32 R 32": cos_f32, "sin_f32 R 32": sin_f32, "rows_u8 R H 68": rows_u8},
    )
    if n_rows:
        args = (rows_u8, q_bf16, cos_f32, sin_f32, n_rows, n_heads)
        launch(_QUERY, grid=(-(-n_rows * n_heads // WAVES), 1), args=args)


@operator
def index_key(
    latent_bf16: Tensor,
    weight_bf16: Tensor,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
) -> None:
    """Fill rows_u8 [J, d/2 + d/32] from the un-rotated latent: projection, norm, rotation, ActQuant4 (E8M0).

    latent_bf16 [J, D], weight_bf16 [d, D], norm_bf16 [d], cos_f32 and sin_f32 [J, rope_dim/2] at j * ratio.
    """
    bind_dims(
        "index_key",
        "J",
        {
            "latent_bf16 J D": latent_bf16,
            "weight_bf16 K D": weight_bf16,
            "norm_bf16 K": norm_bf16,
            "cos_f32 J I": cos_f32,
            "sin_f32 J I": sin_f32,
            "rows_u8 J B": rows_u8,
        },
    )
    row_format = RowFormat("index_key", weight_bf16.shape[0])

    def tile(latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        key = rmsnorm_ref(linear_ref(latent, weight_bf16).bfloat16(), norm_bf16, eps)
        return row_format.pack(rope_ref(key[:, None], cos, sin)[:, 0])

    run_tiles(tile, (latent_bf16, cos_f32, sin_f32), (rows_u8,))


@operator
def index_weights(u_bf16: Tensor, weight_bf16: Tensor, head_dim: int, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, H]: weights_proj of u_bf16 [R, D], rounded, times head_dim^-0.5 * H^-0.5, rounded again."""
    _, n_heads = bind_dims(
        "index_weights",
        "R H",
        {"u_bf16 R D": u_bf16, "weight_bf16 H D": weight_bf16, "out_bf16 R H": out_bf16},
    )
    scale = head_dim**-0.5 * n_heads**-0.5
    run_tiles(lambda u: (linear_ref(u, weight_bf16).bfloat16().float() * scale).bfloat16(), (u_bf16,), (out_bf16,))
