"""Compressed KV on the GPU: pooling, norm, rotation, quantisation and the write into pages in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch

ROWS = 4  # a workgroup's


@cache
def _kernel(width: int) -> Kernel:
    """For rows of 64, 128, 256 or 512 channels."""
    arguments = "P" * 15 + "iiiiif"
    return Kernel("compressor.hip", "compress", arguments, threads=32 * ROWS, defines={"WIDTH": width})


RELEASE_KERNELS = (_kernel(512),)


@dataclass(frozen=True)
class Pairs:
    """Closed pairs of a ratio-2 source's tokens.

    values_f32, gates_f32  [T, D] of this call's tokens
    held_f32               [N, 2, D] value and gate of tokens of earlier calls, or None
    pair_i32               [J, 2] tokens of each pair: an index into this call's, or -1 - i for held i; None: 2j, 2j + 1
    slot_i32               [T] where in held_f32 this call's tokens go, no slot that a pair reads; negative: nowhere
    """

    values_f32: Tensor
    gates_f32: Tensor
    held_f32: Tensor | None = None
    pair_i32: Tensor | None = None
    slot_i32: Tensor | None = None


@dataclass(frozen=True)
class Places:
    """Where rows go in a pool of pages.

    pool_u8          [pages, S, D/2 + D/16]
    positions_i32    [J] a row's place in its sequence; negative: nowhere
    sequences_i32    [J]
    page_tables_i32  [sequences, W] page ids
    """

    pool_u8: Tensor
    positions_i32: Tensor
    sequences_i32: Tensor
    page_tables_i32: Tensor


def compress_hip(
    source: Pairs | Tensor,
    norm_bf16: Tensor | None,
    eps: float,
    latent_bf16: Tensor | None,
    turn: tuple[Tensor, Tensor] | None = None,
    rows_u8: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Latents and compressed rows of J groups, on the current stream.

    source       Pairs to pool, or BF16 [J, D] of a ratio-1 source
    norm_bf16    [D]; None where the source is normed
    latent_bf16  [J, D] filled with the normed, un-rotated latents; None: not wanted
    turn         cosines, sines FP32 [J, rope_dim/2] at each group's first token, for rows
    rows_u8      [J, D/2 + D/16] filled with packed rows; None: not wanted
    places       where packed rows go in a pool; None: nowhere

    Rotation and quantisation have the reference's bits; pooling takes exp from explog.py's sequence and the norm sums
    in an order of its own. Raises BindError.
    """
    if (turn is None) != (rows_u8 is None and places is None):
        raise BindError("compress: rows need cosines and sines, which serve nothing else; give both or None for both")
    n_rows, n_tokens, width, origin, wanted = _origin(source)
    cos_f32, sin_f32 = turn or (None, None)
    row_bytes = RowFormat("compressed", width).row_bytes
    wanted |= {"latent_bf16 J D": latent_bf16, "norm_bf16 D": norm_bf16, f"rows_u8 J {row_bytes}": rows_u8}
    wanted |= {"cos_f32 J I": cos_f32, "sin_f32 J I": sin_f32}
    pool: tuple[Tensor | None, ...] = (None, None, None, None)
    sizes = (1, 0)
    if places:
        pool = (places.pool_u8, places.positions_i32, places.sequences_i32, places.page_tables_i32)
        sizes = (places.pool_u8.shape[1], places.page_tables_i32.shape[1])
        specs = (f"pool_u8 P S {row_bytes}", "positions_i32 J", "sequences_i32 J", "page_tables_i32 Q W")
        wanted |= dict(zip(specs, pool, strict=True))
    bind_dims("compress", "", {spec: tensor for spec, tensor in wanted.items() if tensor is not None})
    if n_rows or n_tokens:
        n_pairs = 0 if cos_f32 is None else cos_f32.shape[1]
        args = (
            rows_u8,
            pool[0],
            latent_bf16,
            *origin,
            norm_bf16,
            cos_f32,
            sin_f32,
            *pool[1:],
            n_rows,
            n_tokens,
            n_pairs,
        )
        launch(_kernel(width), grid=(-(-(n_rows + n_tokens) // ROWS), 1), args=(*args, *sizes, eps))


def _origin(source: Pairs | Tensor) -> tuple[int, int, int, tuple[Tensor | None, ...], dict[str, Tensor | None]]:
    """J, tokens to be held, D, the kernel's six pointers and their specs."""
    if not isinstance(source, Pairs):
        n_rows, width = source.shape
        return n_rows, 0, width, (source, None, None, None, None, None), {"source_bf16 J D": source}
    n_tokens, width = source.values_f32.shape
    if source.pair_i32 is None and n_tokens % 2:
        raise BindError(f"compress: {n_tokens} tokens are not whole pairs; say which with pair_i32")
    if source.slot_i32 is not None and source.held_f32 is None:
        raise BindError("compress: slots for tokens and nothing to hold them in; give held_f32, or None for slot_i32")
    pointers = (None, source.values_f32, source.gates_f32, source.held_f32, source.pair_i32, source.slot_i32)
    specs = ("values_f32 T D", "gates_f32 T D", "held_f32 N 2 D", "pair_i32 J 2", "slot_i32 T")
    n_rows = n_tokens // 2 if source.pair_i32 is None else len(source.pair_i32)
    n_held = 0 if source.slot_i32 is None else n_tokens
    return n_rows, n_held, width, pointers, dict(zip(specs, pointers[1:], strict=True))


def pool_pairs_hip(values_f32: Tensor, gates_f32: Tensor, weight_bf16: Tensor, eps: float, latent_bf16: Tensor) -> None:
    """compressor.pool_pairs on the current stream: pairs [J, 2, D] to latents [J, D]."""
    compress_hip(Pairs(values_f32.flatten(0, 1), gates_f32.flatten(0, 1)), weight_bf16, eps, latent_bf16)


def compressed_row_hip(latent_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor) -> None:
    """compressor.compressed_row on the current stream, the same bytes."""
    compress_hip(latent_bf16, None, 0.0, None, (cos_f32, sin_f32), rows_u8)
