"""Linear layers: FP8 tiles with quantised input, FP4 rows likewise, and the plain BF16 and FP32 ones.

Spec: backbone.md section 2.6 to 2.8. Weights stay codes; a K-block is 32 channels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, linear_tiles, operator, run_slabs
from rocline.hip_kernels.formats import act_quant8_groups, e2m1x2_decode, e4m3_decode, e8m0_decode
from rocline.hip_kernels.kept import kept

K_BLOCK = 32
GEMM_ROWS, MOST_PRODUCTS = 256, 1 << 18  # at a time: what stays in a core's cache


class Fp8Weight(NamedTuple):
    """codes_e4m3 [N, K] with one scale per 32x32 tile, scales_e8m0 [ceil(N/32), ceil(K/32)]."""

    codes_e4m3: Tensor
    scales_e8m0: Tensor


class Fp4Weight(NamedTuple):
    """codes_e2m1x2 [..., N, K/2] (low nibble even) with one scale per row per 32 channels, [..., N, K/32]."""

    codes_e2m1x2: Tensor
    scales_e8m0: Tensor


class Fp8Rows(NamedTuple):
    """Activations through ActQuant8: codes_f64 [K/32, R, 32] decoded codes, scales_f32 [K/32, R, 1]."""

    codes_f64: Tensor
    scales_f32: Tensor

    def pick(self, index: Tensor) -> Fp8Rows:
        return Fp8Rows(self.codes_f64[:, index], self.scales_f32[:, index])


def quantise_rows(x_bf16: Tensor) -> Fp8Rows:
    """x [R, K] BF16 as a quantised linear sees it."""
    codes_e4m3, _, scales_f32 = act_quant8_groups(x_bf16)
    return Fp8Rows(e4m3_decode(codes_e4m3).double().transpose(0, 1), scales_f32.transpose(0, 1))


def block_gemm_ref(x: Fp8Rows, codes_f64: Tensor, scales_f32: Tensor) -> Tensor:
    """Quantised rows times decoded weights: FP32 [R, N], its bits independent of the rows beside it.

    codes_f64   [K/32, 32, N] decoded codes without their scales
    scales_f32  [K/32, N] weight scales

    A block's 32 products and their sum are exact in FP64, in any order; each block is rounded to FP32,
    scaled by two powers of two and added ascending into one FP32 accumulator.
    """
    n_rows, n_out = x.codes_f64.shape[1], codes_f64.shape[2]
    if n_rows > GEMM_ROWS:
        by_rows = zip(*(part.split(GEMM_ROWS, 1) for part in x), strict=True)
        return torch.cat([block_gemm_ref(Fp8Rows(*rows), codes_f64, scales_f32) for rows in by_rows])
    total_f32 = codes_f64.new_zeros((n_rows, n_out), dtype=torch.float32)
    parts = [(*x, codes_f64, scales_f32.unsqueeze(1))]
    if codes_f64.shape[0] * n_rows * n_out > MOST_PRODUCTS:
        n_blocks = max(1, MOST_PRODUCTS // (n_rows * n_out))
        parts = list(zip(*(operand.split(n_blocks) for operand in parts[0]), strict=True))
    for x_f64, x_scales_f32, weight_f64, weight_scales_f32 in parts:
        blocks_f32 = torch.bmm(x_f64, weight_f64).float()  # [blocks, R, N]
        for block_f32 in blocks_f32.mul_(x_scales_f32).mul_(weight_scales_f32).unbind():
            total_f32 += block_f32
    return total_f32


def decode_fp8(weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """Codes [K/32, 32, N] FP64 and scales [K/32, N] FP32, as block_gemm_ref takes them."""
    n_out = weight.codes_e4m3.shape[0]
    codes_f64 = e4m3_decode(weight.codes_e4m3).double().T.unflatten(0, (-1, K_BLOCK)).contiguous()
    scales_f32 = e8m0_decode(weight.scales_e8m0).repeat_interleave(32, 0)[:n_out]
    return codes_f64, scales_f32.T.contiguous()


def decode_fp4(weight: Fp4Weight) -> tuple[Tensor, Tensor]:
    """Codes [K/32, 32, N] FP64 and scales [K/32, N] FP32, as block_gemm_ref takes them."""
    codes_f64 = e2m1x2_decode(weight.codes_e2m1x2).double()
    return codes_f64.T.unflatten(0, (-1, K_BLOCK)).contiguous(), e8m0_decode(weight.scales_e8m0).T.contiguous()


@operator
def fp8_linear(x_bf16: Tensor, weight: Fp8Weight, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, N]: x_bf16 [R, K] through ActQuant8, times the weight; one rounding to BF16."""
    bind_dims(
        "fp8_linear",
        "R",
        {
            "x_bf16 R K": x_bf16,
            "codes_e4m3 N K": weight.codes_e4m3,
            "scales_e8m0 T B": weight.scales_e8m0,
            "out_bf16 R N": out_bf16,
        },
    )
    # Once, and not at all where nothing is computed.
    decoded = cache(lambda: kept.of(weight.codes_e4m3, "fp8_linear", lambda: decode_fp8(weight)))
    run_slabs(lambda x: block_gemm_ref(quantise_rows(x), *decoded()), (x_bf16,), out_bf16)


def fp4_linear(x_bf16: Tensor, weight: Fp4Weight, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, N]: x_bf16 [R, K] through ActQuant8, times the weight; one rounding to BF16."""
    bind_dims(
        "fp4_linear",
        "R",
        {
            "x_bf16 R K": x_bf16,
            "codes_e2m1x2 N P": weight.codes_e2m1x2,
            "scales_e8m0 N B": weight.scales_e8m0,
            "out_bf16 R N": out_bf16,
        },
    )
    decoded = cache(lambda: decode_fp4(weight))
    run_slabs(lambda x: block_gemm_ref(quantise_rows(x), *decoded()), (x_bf16,), out_bf16)


def linear_ref(x_bf16: Tensor, weight: Tensor) -> Tensor:
    """FP32 [R, N] of an unquantised linear: x [R, K] and weight [N, K] widened, FP32 accumulation, by tiles of rows."""
    return linear_tiles(x_bf16, weight.float())


@operator
def bf16_linear(x_bf16: Tensor, weight_bf16: Tensor, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, N] from x_bf16 [R, K] and weight_bf16 [N, K]; FP32 accumulation, one rounding."""
    bind_dims(
        "bf16_linear",
        "R K N",
        {"x_bf16 R K": x_bf16, "weight_bf16 N K": weight_bf16, "out_bf16 R N": out_bf16},
    )
    wide = cache(weight_bf16.float)
    run_slabs(lambda x: linear_ref(x, wide()), (x_bf16,), out_bf16)


@operator
def f32_linear(x_bf16: Tensor, weight_bf16: Tensor, out_f32: Tensor) -> None:
    """Fill out_f32 [R, N] from x_bf16 [R, K] and weight_bf16 [N, K], both promoted to FP32."""
    bind_dims("f32_linear", "R K N", {"x_bf16 R K": x_bf16, "weight_bf16 N K": weight_bf16, "out_f32 R N": out_f32})
    wide = cache(weight_bf16.float)
    run_slabs(lambda x: linear_ref(x, wide()), (x_bf16,), out_f32)
