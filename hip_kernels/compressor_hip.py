"""Compressed KV on the GPU: pooling, norm, rotation, quantisation and the write into pages in one kernel, which makes
the index keys of few groups too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Argument, Kernel, launch
from rocline.hip_kernels.linear_hip import WAVES
from rocline.hip_kernels.weight_tiles import STEP, TILE, WeightTiles

ROWS = 4  # a workgroup's
FEW_KEYS = 4  # groups whose keys are made along with them, at most 16: of more, all in each workgroup take longer
KEY_WIDTH = 128
_ARGUMENTS = "P" * 15 + "iiiiiif"


@cache
def _kernel(width: int) -> Kernel:
    """For rows of 64, 128, 256 or 512 channels."""
    return Kernel("compressor.hip", "compress", _ARGUMENTS, threads=32 * ROWS, defines={"WIDTH": width})


@cache
def _with_keys(width: int) -> Kernel:
    """As _kernel."""
    return Kernel(
        "compressor.hip",
        "compress_keys",
        _ARGUMENTS + "P" * 7,
        threads=32 * WAVES,
        defines={"WIDTH": width},
        lds_bytes=_keys_lds_bytes(width, FEW_KEYS),
    )


def _keys_lds_bytes(width: int, n_rows: int) -> int:
    """A tile of columns a wave, a word, and so many latents."""
    return WAVES * TILE * (STEP + 8) * 2 + 16 + n_rows * (width + 8) * 2


RELEASE_KERNELS = (_kernel(512), _with_keys(512))


@dataclass(frozen=True)
class Pairs:
    """Closed pairs of a ratio-2 source's tokens.

    values_f32, gates_f32  [T, D] of this call's tokens, whose rows may be as far apart as one likes, in both alike
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


@dataclass(frozen=True)
class Keys:
    """Index keys of the groups that a call makes, of 128 channels of which 64 rotate.

    weight          [128, D]; norm_bf16 [128]
    projected_bf16  [J, 128] room
    rows_u8         [J, 68] filled
    pool_u8         [pages, S, 68] filled where compressed rows go in theirs, and so is
    prepared_u8     [pages, S / 16, 2112], or None
    """

    weight: WeightTiles
    norm_bf16: Tensor
    projected_bf16: Tensor
    rows_u8: Tensor
    pool_u8: Tensor
    prepared_u8: Tensor | None


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
    n_jobs, width, args = _bound(source, norm_bf16, eps, latent_bf16, turn, rows_u8, places, {})
    if n_jobs:
        launch(_kernel(width), grid=(-(-n_jobs // ROWS), 1), args=args)


def compress_keys_hip(
    source: Pairs | Tensor,
    norm_bf16: Tensor,
    eps: float,
    latent_bf16: Tensor,
    turn: tuple[Tensor, Tensor],
    rows_u8: Tensor,
    places: Places,
    keys: Keys,
    counter_i32: Tensor,
) -> None:
    """compress_hip and the groups' index keys, for 1 to FEW_KEYS groups: the bits of bf16_linear_hip and index_key_hip.

    counter_i32 [1] holds 0, and does so again afterwards. Raises BindError.
    """
    n_groups, rows_per_page = len(latent_bf16), places.pool_u8.shape[1]
    wanted = {
        "projected_bf16 J 128": keys.projected_bf16,
        "k_norm_bf16 128": keys.norm_bf16,
        "key_rows_u8 J 68": keys.rows_u8,
        f"key_pool_u8 P {rows_per_page} 68": keys.pool_u8,
        f"prepared_u8 P {rows_per_page // 16} 2112": keys.prepared_u8,
        "cos_f32 J 32": turn[0],
        "counter_i32 1": counter_i32,
    }
    n_jobs, width, args = _bound(source, norm_bf16, eps, latent_bf16, turn, rows_u8, places, wanted)
    if not 1 <= n_groups <= FEW_KEYS or keys.weight.shape != (1, KEY_WIDTH, width // STEP):
        raise BindError(
            f"compress_keys: {n_groups} groups, a weight of {keys.weight.groups} x [{keys.weight.n_out}, "
            f"{keys.weight.n_in}]; want 1 to {FEW_KEYS}, and [{KEY_WIDTH}, {width}]"
        )
    outs = (keys.rows_u8, keys.pool_u8, keys.prepared_u8, keys.projected_bf16)
    launch(
        _with_keys(width),
        grid=(KEY_WIDTH // TILE + -(-n_jobs // WAVES), 1),
        args=(*args, *outs, keys.weight.codes_u8, keys.norm_bf16, counter_i32),
        lds_bytes=_keys_lds_bytes(width, n_groups),
    )


def _bound(
    source: Pairs | Tensor,
    norm_bf16: Tensor | None,
    eps: float,
    latent_bf16: Tensor | None,
    turn: tuple[Tensor, Tensor] | None,
    rows_u8: Tensor | None,
    places: Places | None,
    more: Mapping[str, Tensor | None],
) -> tuple[int, int, tuple[Argument, ...]]:
    """J and tokens to be held together, D, and the kernels' arguments; `more` is bound along."""
    if (turn is None) != (rows_u8 is None and places is None):
        raise BindError("compress: rows need cosines and sines, which serve nothing else; give both or None for both")
    n_rows, n_tokens, width, origin, stride, wanted = _origin(source)
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
    wanted |= more
    bind_dims("compress", "", {spec: tensor for spec, tensor in wanted.items() if tensor is not None})
    n_pairs = 0 if cos_f32 is None else cos_f32.shape[1]
    outs = (rows_u8, pool[0], latent_bf16)
    tensors = (*outs, *origin, norm_bf16, cos_f32, sin_f32, *pool[1:])
    return n_rows + n_tokens, width, (*tensors, n_rows, n_tokens, stride, n_pairs, *sizes, eps)


def _origin(
    source: Pairs | Tensor,
) -> tuple[int, int, int, tuple[Tensor | None, ...], int, dict[str, Tensor | None]]:
    """J, tokens to be held, D, the kernels' six pointers, how far tokens are apart, and specs of what that is."""
    if not isinstance(source, Pairs):
        n_rows, width = source.shape
        return n_rows, 0, width, (source, None, None, None, None, None), 0, {"source_bf16 J D": source}
    values_f32, gates_f32 = source.values_f32, source.gates_f32
    n_tokens, width = values_f32.shape
    strides = values_f32.stride()
    if n_tokens > 1 and (strides[1] != 1 or strides != gates_f32.stride()):
        raise BindError(f"compress: values {strides} apart, gates {gates_f32.stride()}; want both alike, in whole rows")
    if source.pair_i32 is None and n_tokens % 2:
        raise BindError(f"compress: {n_tokens} tokens are not whole pairs; say which with pair_i32")
    if source.slot_i32 is not None and source.held_f32 is None:
        raise BindError("compress: slots for tokens and nothing to hold them in; give held_f32, or None for slot_i32")
    others = (source.held_f32, source.pair_i32, source.slot_i32)
    specs = ("held_f32 N 2 D", "pair_i32 J 2", "slot_i32 T")
    wanted = {"values_f32 T D": values_f32, "gates_f32 T D": gates_f32, **dict(zip(specs, others, strict=True))}
    n_rows = n_tokens // 2 if source.pair_i32 is None else len(source.pair_i32)
    n_held = 0 if source.slot_i32 is None else n_tokens
    return n_rows, n_held, width, (None, values_f32[:1], gates_f32[:1], *others), strides[0], wanted


def pool_pairs_hip(values_f32: Tensor, gates_f32: Tensor, weight_bf16: Tensor, eps: float, latent_bf16: Tensor) -> None:
    """compressor.pool_pairs on the current stream: pairs [J, 2, D] to latents [J, D]."""
    compress_hip(Pairs(values_f32.flatten(0, 1), gates_f32.flatten(0, 1)), weight_bf16, eps, latent_bf16)


def compressed_row_hip(latent_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor) -> None:
    """compressor.compressed_row on the current stream, the same bytes."""
    compress_hip(latent_bf16, None, 0.0, None, (cos_f32, sin_f32), rows_u8)
