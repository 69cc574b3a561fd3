"""Rotary position embedding: per-layer frequency tables and the rotation (backbone.md section 5.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator, run_slabs, run_tiles
from rocline.hip_kernels.kernel import Kernel, launch

_ROPE = Kernel("rope.hip", "rope", "PPPPiiiiif", threads=256)
RELEASE_KERNELS = (_ROPE,)


def rope_frequencies(theta: float, rope_dim: int) -> Tensor:
    """omega_i = 1 / theta^(2i / rope_dim), [rope_dim/2] FP32: the table of layers without compression."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def yarn_frequencies(
    theta: float, rope_dim: int, factor: float, beta_fast: float, beta_slow: float, original_positions: int
) -> Tensor:
    """[rope_dim/2] FP32 frequencies of compressed layers: YaRN at every length, never only past the original one.

    FP32 throughout: building them in FP64 turns position 1,048,575 by up to 0.0078 rad.
    """

    def correction(n_turns: float) -> float:
        return rope_dim * math.log(original_positions / (n_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    index = torch.arange(rope_dim // 2, dtype=torch.float32)
    smooth = 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    omega = rope_frequencies(theta, rope_dim)
    return omega / factor * (1 - smooth) + omega * smooth


def rope_table_ref(positions_i32: Tensor, omega_f32: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [R, rope_dim/2] FP32 of the FP32 product position * omega.

    A complex polar on the host, for every device class: torch.cos and torch.sin differ from it by one
    ulp in some entry of half the rows, and at 10^6 the FP32 product itself is 0.06 rad coarse.
    """
    angle_f32 = positions_i32.float()[:, None] * omega_f32
    rotation = torch.polar(torch.ones_like(angle_f32), angle_f32)
    return rotation.real, rotation.imag


def rope_table(positions_i32: Tensor, omega_f32: Tensor, cos_f32: Tensor, sin_f32: Tensor) -> None:
    """Fill cos_f32 and sin_f32 [R, rope_dim/2] for positions_i32 [R] and omega_f32 [rope_dim/2]."""
    bind_dims(
        "rope_table",
        "R I",
        {
            "positions_i32 R": positions_i32,
            "omega_f32 I": omega_f32,
            "cos_f32 R I": cos_f32,
            "sin_f32 R I": sin_f32,
        },
    )
    run_tiles(lambda positions: rope_table_ref(positions, omega_f32), (positions_i32,), (cos_f32, sin_f32))


def rope_ref(x_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last rope_dim channels of x [R, H, D]; pairs are adjacent elements, one BF16 rounding.

    cos, sin [R, rope_dim/2]; the inverse is the conjugate rotation.
    """
    head, tail = x_bf16.tensor_split((x_bf16.shape[-1] - 2 * cos_f32.shape[1],), dim=-1)
    return torch.cat((head, turned_ref(tail, cos_f32, sin_f32, inverse)), dim=-1)


def turned_ref(x_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, inverse: bool = False) -> Tensor:
    """rope_ref of rows that turn whole: x [R, H, rope_dim]."""
    pairs = x_bf16.float().unflatten(-1, (-1, 2))
    real, imag = pairs.unbind(-1)
    cos, sin = cos_f32[:, None], (-sin_f32 if inverse else sin_f32)[:, None]
    turned = torch.empty_like(pairs)
    torch.sub(real * cos, imag * sin, out=turned[..., 0])
    torch.add(real * sin, imag * cos, out=turned[..., 1])
    return turned.flatten(-2).bfloat16()


@operator
def rope(x_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, out_bf16: Tensor, inverse: bool = False) -> None:
    """Fill out_bf16 [R, H, D] with x_bf16 [R, H, D], its last rope_dim channels rotated; both may be one tensor."""
    bind_dims(
        "rope",
        "R H D I",
        {"x_bf16 R H D": x_bf16, "cos_f32 R I": cos_f32, "sin_f32 R I": sin_f32, "out_bf16 R H D": out_bf16},
    )
    turn = rope_ref
    if out_bf16.data_ptr() == x_bf16.data_ptr():  # what does not turn is there already
        still = x_bf16.shape[-1] - 2 * cos_f32.shape[1]
        turn, x_bf16, out_bf16 = turned_ref, x_bf16[..., still:], out_bf16[..., still:]
    run_slabs(lambda x, cos, sin: turn(x, cos, sin, inverse), (x_bf16, cos_f32, sin_f32), out_bf16)


def rope_hip(x_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, out_bf16: Tensor, inverse: bool = False) -> None:
    """rope on the current stream, the same bits, for D and rope_dim multiples of 8.

    In place it touches only what turns.
    """
    n_rows, n_heads, width, n_pairs = bind_dims(
        "rope",
        "R H D I",
        {"x_bf16 R H D": x_bf16, "cos_f32 R I": cos_f32, "sin_f32 R I": sin_f32, "out_bf16 R H D": out_bf16},
    )
    if width % 8 or n_pairs % 4:
        raise BindError(f"rope: {n_pairs} pairs of {width} channels; want them in eights, as 16 bytes are moved")
    turned = n_pairs // 4
    touched = turned if out_bf16.data_ptr() == x_bf16.data_ptr() else width // 8
    n_pieces = n_rows * n_heads * touched
    if n_pieces >= 2**31 - 256:
        raise BindError(f"rope: {n_rows} rows of {n_heads} heads are {n_pieces} pieces, want below 2^31; pass fewer")
    if n_pieces:
        sizes = (n_rows, n_heads, width, turned, touched, -1.0 if inverse else 1.0)
        launch(_ROPE, grid=(-(-n_pieces // 256), 1), args=(out_bf16, x_bf16, cos_f32, sin_f32, *sizes))
