"""The release's number formats, exactly: E2M1, E4M3, E8M0, their quantisers and packed row layouts.

Spec: backbone.md section 2.3 to 2.5 and 13. Codes are bytes (torch.uint8); every decode is exact in
FP32, and every dequantised activation is exact in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E8M0_NAN = 255  # a code, never compared as a number: 128.0 is code 134 and a healthy scale
ACT_QUANT8_MIN_AMAX = 1e-4
# The reference multiplies by rounded reciprocals for power-of-two scales and divides for E4M3 ones.
RECIPROCAL_448 = float(torch.tensor(1.0 / 448.0, dtype=torch.float32))
RECIPROCAL_6 = float(torch.tensor(1.0 / 6.0, dtype=torch.float32))


@cache
def _e2m1_table() -> Tensor:
    positive = torch.tensor(E2M1_VALUES)
    return torch.cat([positive, -positive])


@cache
def _e4m3_table() -> Tensor:
    """[256]: looking a code up takes a quarter of the time that the library's own conversion does."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _looked_up(table_f32: Tensor, codes_u8: Tensor) -> Tensor:
    return table_f32.to(codes_u8.device).index_select(0, codes_u8.reshape(-1).int()).view(codes_u8.shape)


@cache
def _e2m1_pairs() -> Tensor:
    """[256, 2]: both values of every byte, so that unpacking and decoding is one look-up."""
    return e2m1_decode(unpack_e2m1(torch.arange(256, dtype=torch.uint8)[:, None]))


def e8m0_decode(scales_e8m0: Tensor) -> Tensor:
    """2^(byte-127) as FP32, same shape; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    return scales_e8m0.view(torch.float8_e8m0fnu).float()


def e4m3_decode(codes_e4m3: Tensor) -> Tensor:
    """E4M3FN codes as FP32, same shape; 0x7F and 0xFF are NaN."""
    return _looked_up(_e4m3_table(), codes_e4m3)


def e2m1_decode(codes_u8: Tensor) -> Tensor:
    """E2M1 codes 0..15, one a byte, as FP32, same shape."""
    return _looked_up(_e2m1_table(), codes_u8)


def e2m1x2_decode(packed_e2m1x2: Tensor) -> Tensor:
    """[..., K/2] bytes of two E2M1 codes, the low nibble first, as [..., K] FP32."""
    pairs = _e2m1_pairs().to(packed_e2m1x2.device).index_select(0, packed_e2m1x2.reshape(-1).int())
    return pairs.view(*packed_e2m1x2.shape[:-1], -1)


def e4m3_encode(values_f32: Tensor) -> Tensor:
    """Nearest E4M3FN code, ties to even, saturating at 448 (a plain cast may give NaN); NaN stays NaN."""
    return values_f32.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1_encode(values_f32: Tensor) -> Tensor:
    """Nearest E2M1 code 0..15, one a byte, ties to the even code, saturating at 6; the sign of zero is kept.

    NaN has no code here: it becomes +0 (the sign of a NaN differs between processors) whose scale, NaN as well,
    poisons the group.
    """
    size = values_f32.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= bound if tie_up else size > bound
    return code + ((torch.signbit(values_f32) & ~values_f32.isnan()).to(torch.uint8) << 3)


def pack_e2m1(codes_u8: Tensor) -> Tensor:
    """[..., K] codes to [..., K/2] bytes; the even element is the low nibble."""
    return codes_u8[..., 0::2] | (codes_u8[..., 1::2] << 4)


def unpack_e2m1(packed_e2m1x2: Tensor) -> Tensor:
    """[..., K/2] bytes to [..., K] codes; the low nibble is the even element."""
    return torch.stack((packed_e2m1x2 & 15, packed_e2m1x2 >> 4), dim=-1).flatten(-2)


def pow2ceil_e8m0(values_f32: Tensor) -> Tensor:
    """E8M0 byte of the smallest power of two >= value; values are not negative.

    Decided on the FP32 bits: a logarithm misrounds. Infinity and NaN give byte 255, so a broken activation poisons its
    own group and nothing else.
    """
    below = values_f32.view(torch.int32) - 1
    return ((below >> 23) + 1).clamp_max(E8M0_NAN).to(torch.uint8)


def _groups(x_bf16: Tensor, size: int) -> tuple[Tensor, Tensor]:
    grouped = x_bf16.float().unflatten(-1, (-1, size))
    return grouped, grouped.abs().amax(dim=-1)


def act_quant8_groups(x_bf16: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ActQuant8 (section 2.4): [..., K] BF16 to codes_e4m3 [..., K/32, 32], and the scales both as scales_e8m0
    [..., K/32] and as numbers, scales_f32 [..., K/32, 1]."""
    grouped, amax = _groups(x_bf16, 32)
    scales_e8m0 = pow2ceil_e8m0(amax.clamp_min(ACT_QUANT8_MIN_AMAX) * RECIPROCAL_448)
    scales_f32 = e8m0_decode(scales_e8m0).unsqueeze(-1)
    return e4m3_encode(grouped / scales_f32), scales_e8m0, scales_f32


def act_quant8(x_bf16: Tensor) -> tuple[Tensor, Tensor]:
    """ActQuant8 as it is stored: [..., K] BF16 to codes_e4m3 [..., K] and scales_e8m0 [..., K/32]."""
    codes_e4m3, scales_e8m0, _ = act_quant8_groups(x_bf16)
    return codes_e4m3.flatten(-2), scales_e8m0


def act_quant4_e8m0(x_bf16: Tensor) -> tuple[Tensor, Tensor]:
    """ActQuant4 of index queries and keys (section 2.5): codes [..., K] (0..15), scales_e8m0 [..., K/32]."""
    grouped, amax = _groups(x_bf16, 32)
    scales = pow2ceil_e8m0(amax.clamp_min(E2M1_MAX * 2.0**-126) * RECIPROCAL_6)
    return e2m1_encode(grouped / e8m0_decode(scales).unsqueeze(-1)).flatten(-2), scales


def act_quant4_e4m3(x_bf16: Tensor) -> tuple[Tensor, Tensor]:
    """ActQuant4 of compressed KV (section 2.5): codes [..., K] (0..15), scales_e4m3 [..., K/16].

    The scale is rounded to nearest and may lie below amax/6, so the clamp to 6 really saturates.
    """
    grouped, amax = _groups(x_bf16, 16)
    scales = e4m3_encode(amax.clamp_min(E2M1_MAX * 2.0**-9) / E2M1_MAX)
    return e2m1_encode(grouped / e4m3_decode(scales).unsqueeze(-1)).flatten(-2), scales


@dataclass(frozen=True)
class RowFormat:
    """A cached row as it is stored: codes first, then one scale byte a group (section 13)."""

    kind: Literal["window", "compressed", "index_key"]
    channels: int

    @property
    def code_bytes(self) -> int:
        return self.channels if self.kind == "window" else self.channels // 2

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.channels // (16 if self.kind == "compressed" else 32)

    def pack(self, x_bf16: Tensor) -> Tensor:
        """Quantise [..., channels] BF16 into [..., row_bytes] bytes.

        Unpacked values pack to the same values again, except where a compressed row's scale is subnormal.
        """
        if self.kind == "window":
            codes, scales = act_quant8(x_bf16)
        else:
            quantise = act_quant4_e4m3 if self.kind == "compressed" else act_quant4_e8m0
            codes, scales = quantise(x_bf16)
            codes = pack_e2m1(codes)
        return torch.cat((codes, scales), dim=-1)

    def split(self, rows_u8: Tensor) -> tuple[Tensor, Tensor]:
        """[..., row_bytes] to decoded codes [..., groups, group] and scales [..., groups], both FP32."""
        codes_u8, scales_u8 = rows_u8[..., : self.code_bytes], rows_u8[..., self.code_bytes :]
        codes = e4m3_decode(codes_u8) if self.kind == "window" else e2m1x2_decode(codes_u8)
        scales = e4m3_decode(scales_u8) if self.kind == "compressed" else e8m0_decode(scales_u8)
        return codes.unflatten(-1, (scales.shape[-1], -1)), scales

    def unpack(self, rows_u8: Tensor) -> Tensor:
        """[..., row_bytes] bytes to [..., channels] BF16, exact."""
        codes, scales = self.split(rows_u8)
        return (codes * scales.unsqueeze(-1)).flatten(-2).bfloat16()


def dequantise_tiles(codes_e4m3: Tensor, scales_e8m0: Tensor) -> Tensor:
    """E4M3 [N, K] with one E8M0 scale per 32x32 tile [ceil(N/32), ceil(K/32)] as BF16 [N, K], exact.

    Exact because the loader refuses products outside BF16's normal range (design.md section 4).
    """
    n_rows, n_cols = codes_e4m3.shape
    scales = e8m0_decode(scales_e8m0).repeat_interleave(32, 0)[:n_rows].repeat_interleave(32, 1)[:, :n_cols]
    return (e4m3_decode(codes_e4m3) * scales).bfloat16()
