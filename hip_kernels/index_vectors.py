"""Index queries, keys and head weights: what scoring history compares (backbone.md section 6 and 7, steps 1 and 2)."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.compressor_hip import Places
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear import linear_ref
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref

WAVES = 8  # vectors a workgroup
_QUERY = Kernel("index_vectors.hip", "index_query", "PPPPPPiif", threads=32 * WAVES)
_KEY = Kernel("index_vectors.hip", "index_key", "PPPPPPPPPPiiif", threads=32 * WAVES)
RELEASE_KERNELS = (_QUERY, _KEY)


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


def index_query_hip(
    q_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor | None,
    tiles_u8: Tensor | None = None,
    weights_bf16: Tensor | None = None,
) -> None:
    """index_query on the current stream, the same bytes, for 128 channels of which 64 rotate.

    tiles_u8 [ceil(R/16), H, 2112], where given, is filled with what index_prepare makes of the rows; weights_bf16
    [R, H] are scaled in place as index_weights does it.
    """
    wanted = {
        "q_bf16 R H 128": q_bf16,
        "cos_f32 R 32": cos_f32,
        "sin_f32 R 32": sin_f32,
        "rows_u8 R H 68": rows_u8,
        f"tiles_u8 {-(-len(q_bf16) // 16)} H 2112": tiles_u8,
        "weights_bf16 R H": weights_bf16,
    }
    given = {spec: tensor for spec, tensor in wanted.items() if tensor is not None}
    n_rows, n_heads = bind_dims("index_query", "R H", given)
    if n_rows:
        scale = weight_scale(128, n_heads)
        args = (rows_u8, tiles_u8, weights_bf16, q_bf16, cos_f32, sin_f32, n_rows, n_heads, scale)
        launch(_QUERY, grid=(-(-n_rows * n_heads // WAVES), 1), args=args)


def weight_scale(head_dim: int, n_heads: int) -> float:
    """Of the index heads' weights."""
    return float(head_dim**-0.5 * n_heads**-0.5)


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

    def slab(latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        key = rmsnorm_ref(linear_ref(latent, weight_bf16).bfloat16(), norm_bf16, eps)
        return row_format.pack(rope_ref(key[:, None], cos, sin)[:, 0])

    run_slabs(slab, (latent_bf16, cos_f32, sin_f32), rows_u8)


def index_key_hip(
    projected_bf16: Tensor,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor | None,
    places: Places | None = None,
    prepared_u8: Tensor | None = None,
) -> None:
    """Norm, rotation and ActQuant4 of projected keys [J, 128], on the current stream; the norm's sum has its own order.

    rows_u8      [J, 68], or None
    places       where stored keys go too: Places of a pool [pages, S, 68]
    prepared_u8  [pages, S / 16, 2112] the same places in the form that scoring reads
    """
    wanted = {
        "projected_bf16 J 128": projected_bf16,
        "norm_bf16 128": norm_bf16,
        "cos_f32 J 32": cos_f32,
        "sin_f32 J 32": sin_f32,
        "rows_u8 J 68": rows_u8,
    }
    through: tuple[Tensor | None, ...] = (None, None, None)
    sizes, pool_u8 = (1, 0), None
    if places:
        pool_u8, *others = places.pool_u8, places.positions_i32, places.sequences_i32, places.page_tables_i32
        through, sizes = tuple(others), (pool_u8.shape[1], places.page_tables_i32.shape[1])
        wanted |= {"pool_u8 P S 68": pool_u8, "positions_i32 J": others[0], "sequences_i32 J": others[1]}
        wanted |= {"page_tables_i32 Q W": others[2], f"prepared_u8 P {sizes[0] // 16} 2112": prepared_u8}
    given = {spec: tensor for spec, tensor in wanted.items() if tensor is not None}
    (n_rows,) = bind_dims("index_key", "J", given)
    if n_rows:
        outs = (rows_u8, pool_u8, prepared_u8)
        args = (*outs, projected_bf16, norm_bf16, cos_f32, sin_f32, *through, n_rows, *sizes, eps)
        launch(_KEY, grid=(-(-n_rows // WAVES), 1), args=args)


@operator
def index_weights(u_bf16: Tensor, weight_bf16: Tensor, head_dim: int, out_bf16: Tensor, scaled: bool = True) -> None:
    """Fill out_bf16 [R, H]: weights_proj of u_bf16 [R, D], rounded, times head_dim^-0.5 * H^-0.5, rounded again.

    Without the factor and the second rounding where they come later.
    """
    _, n_heads = bind_dims(
        "index_weights",
        "R H",
        {"u_bf16 R D": u_bf16, "weight_bf16 H D": weight_bf16, "out_bf16 R H": out_bf16},
    )
    scale = weight_scale(head_dim, n_heads) if scaled else 1.0
    run_slabs(lambda u: linear_ref(u, weight_bf16).bfloat16().float() * scale, (u_bf16,), out_bf16)
