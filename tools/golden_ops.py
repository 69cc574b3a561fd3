"""Golden operator tables: every table of ops.safetensors against the operator that means it.

What each table holds and how closely it must be met stands in the golden data's README.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rocline.engine.config import ModelConfig, TextConfig
from rocline.engine.release import RELEASE_CONFIG
from rocline.engine.rope_rows import RopeTables
from rocline.hip_kernels import (
    attention,
    engram,
    experts,
    formats,
    index_score,
    linear,
    mhc,
    rmsnorm,
    rope,
    router,
    selection,
)
from rocline.hip_kernels.binding import run_tiles
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.tools.golden_file import read_golden
from rocline.tools.golden_report import Findings, bf16_ulps, relative, same_bits

FILE = "ops.safetensors"
Table = dict[str, Tensor]
Tables = dict[str, Table]
Check = Callable[[str, Tables, Findings], None]

NORM_EPS, HC_EPS, SINKHORN_STEPS = 1e-20, 1e-6, 20
SWIGLU_LIMIT, ROUTER_FACTOR, ENGRAM_PAD = 10.0, 1.5, 2
CANCELLING = 5e-7  # of the sum of |terms|: what another order may change where terms cancel
ORDER_FREE = 1e-6  # biased scores closer than this may come in either order
FAR_NEGATIVE_ROW = 7  # of the router tables: its scores are tiny, so they carry fewer equal digits


def check_ops(path: Path, find: Findings) -> None:
    """Compare every table of the file; one that no operator here means, or that is missing, has failed."""
    tables: Tables = {}
    for name, tensor in read_golden(path).items():
        prefix, field = name.rsplit(".", 1)
        tables.setdefault(prefix, {})[field] = tensor.view(torch.uint8) if tensor.dtype == torch.int8 else tensor
    for prefix in sorted({*tables, *CHECKS} - {"rope"}):
        if prefix not in CHECKS:
            find.failed(prefix, "no operator of this build means this table")
        elif prefix not in tables:
            find.failed(prefix, f"missing from {FILE}")
        else:
            CHECKS[prefix](prefix, tables, find)


def _filled(want: Tensor) -> Tensor:
    """An output like `want`, full of what no operator leaves behind."""
    return torch.full_like(want, torch.nan if want.is_floating_point() else 77)


def _ulps(find: Findings, item: str, got_bf16: Tensor, want_bf16: Tensor, limit: float) -> None:
    find.elements(item, "bf16 ulp", bf16_ulps(got_bf16, want_bf16), limit, same_bits(got_bf16, want_bf16))


def _absolute(find: Findings, item: str, got: Tensor, want: Tensor, limit: float) -> None:
    find.elements(item, "abs", (got - want).abs(), limit, same_bits(got, want))


# -- number formats ----------------------------------------------------------------------------------------------


def _codes(prefix: str, tables: Tables, find: Findings) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if prefix == "e2m1_e8m0":
        values = formats.e2m1_decode(codes[:16])[:, None] * formats.e8m0_decode(codes)
    else:
        values = (formats.e4m3_decode if prefix == "e4m3" else formats.e8m0_decode)(codes)
    find.same(f"{prefix} values", values, tables[prefix]["values"])


def _pow2ceil(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    for field, reciprocal in (("c448", formats.RECIPROCAL_448), ("c6", formats.RECIPROCAL_6)):
        scales = formats.e8m0_decode(formats.pow2ceil_e8m0(t["amax"] * reciprocal))
        find.same(f"{prefix} {field}", scales, t[field])


def _act_quant(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    scale_field = "scale_e8m0" if prefix == "actquant8" else "scale_byte"
    row_format, quantise = _QUANTISERS[prefix]
    codes, scales = quantise(t["x"])
    find.same(f"{prefix} codes", codes, t["codes"])
    find.same(f"{prefix} {scale_field}", scales, t[scale_field])
    find.same(f"{prefix} dequant", row_format.unpack(row_format.pack(t["x"])), t["dequant"])


# -- matrix products ---------------------------------------------------------------------------------------------


def _quantised_gemm(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    y_bf16 = _filled(t["y"])
    if prefix.startswith("fp8"):
        fp8 = Fp8Weight(t["w"], t["w_scale"])
        linear.fp8_linear(t["x"], fp8, y_bf16)
        matrix = linear.decode_fp8(fp8)
    else:
        fp4 = Fp4Weight(t["w_packed"], t["w_scale"])
        linear.fp4_linear(t["x"], fp4, y_bf16)
        matrix = linear.decode_fp4(fp4)
    _ulps(find, f"{prefix} y", y_bf16, t["y"], 1)
    if "y32" in t:  # the accumulator before its rounding: this build adds in the reference's order
        find.same(f"{prefix} y32", linear.block_gemm_ref(linear.quantise_rows(t["x"]), *matrix), t["y32"])


def _bf16_gemm(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    y_bf16 = _filled(t["y"])
    linear.bf16_linear(t["x"], t["w"], y_bf16)
    slack = CANCELLING * (t["x"].double().abs() @ t["w"].double().abs().T)
    for field in ("y", "y_blocks"):
        want = t[field]
        ulps = bf16_ulps(y_bf16, want)
        ulps = ulps.where((y_bf16.double() - want.double()).abs() > slack, ulps.clamp(max=1))
        find.elements(f"{prefix} {field}", "bf16 ulp", ulps, 1, same_bits(y_bf16, want))


# -- norm, streams, rotation -------------------------------------------------------------------------------------


def _rmsnorm(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    y_bf16 = _filled(t["y"])
    rmsnorm.rmsnorm(t["x"], t["w"], NORM_EPS, y_bf16)
    _ulps(find, f"{prefix} y", y_bf16, t["y"], 1)


def _sinkhorn(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    got = [_filled(t[field]) for field in ("pre", "post", "comb")]
    run_tiles(
        lambda z: mhc.mhc_coefficients_ref(z, t["scale"], t["base"], HC_EPS, SINKHORN_STEPS),
        (t["z"],),
        got,
    )
    for field, value in zip(("pre", "post", "comb"), got, strict=True):
        _absolute(find, f"{prefix} {field}", value, t[field], 2e-6)


def _mhc_mix(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    fn_f32 = (t["fn_mul"][:, :, None] * t["fn_tile"][:, None]).flatten(1)
    z_f32 = _filled(t["z"])
    run_tiles(lambda streams: mhc.mhc_project_ref(streams, fn_f32, NORM_EPS), (t["X"],), (z_f32,))
    got = [_filled(t[field]) for field in ("pre", "post", "comb")]
    mhc.mhc_mix(t["X"], fn_f32, t["scale"], t["base"], NORM_EPS, HC_EPS, SINKHORN_STEPS, *got)
    for field, value in zip(("z", "pre", "post", "comb"), (z_f32, *got), strict=True):
        errors = (value - t[f"{field}64"]).abs()
        find.elements(f"{prefix} {field}", "abs", errors, 4e-5 if field == "z" else 8e-6, same_bits(value, t[field]))


def _rope_table(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    release = RopeTables(release_config())
    omega_f32 = release.plain_f32 if prefix == "rope_window" else release.compressed_f32
    find.same(f"{prefix} omega", omega_f32, t["omega"])
    positions = tables["rope"]["pos"]
    find.same(f"{prefix} angle", positions.float()[:, None] * omega_f32, t["angle"])
    cos_f32, sin_f32 = release.rows(positions, 0 if prefix == "rope_window" else 1)
    _absolute(find, f"{prefix} cos", cos_f32, t["cos"], 1.2e-7)
    _absolute(find, f"{prefix} sin", sin_f32, t["sin"], 1.2e-7)


def _rope_apply(prefix: str, tables: Tables, find: Findings) -> None:
    t, turn = tables[prefix], tables["rope_yarn"]
    for field, inverse in (("y", False), ("y_inverse", True)):
        got = _filled(t["x"])[:, None]
        rope.rope(t["x"][:, None], turn["cos"], turn["sin"], got, inverse=inverse)
        _ulps(find, f"{prefix} {field}", got[:, 0], t[field], 1)


# -- routing and experts -----------------------------------------------------------------------------------------


def _router(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    k = t["ids"].shape[1]
    s_f32, ids_i32, w_f32 = _filled(t["s"]), _filled(t["ids"]), _filled(t["w"])
    run_tiles(
        lambda logits: router.router_ref(logits, t["bias"], k, ROUTER_FACTOR), (t["logits"],), (s_f32, ids_i32, w_f32)
    )
    biased = t["s"] + t["bias"]
    swapped = (biased.gather(1, ids_i32.long()) - biased.gather(1, t["ids"].long())).abs() < ORDER_FREE
    wrong = ((ids_i32 != t["ids"]) & ~swapped).any(1) | (ids_i32.sort(1).values != t["ids"].sort(1).values).any(1)
    find.elements(f"{prefix} ids", "rows", wrong.float(), 0, same_bits(ids_i32, t["ids"]))
    for field, value in (("s", s_f32), ("w", w_f32)):
        errors = relative(value, t[field])
        errors[FAR_NEGATIVE_ROW] *= 2e-6 / 1e-4
        find.elements(f"{prefix} {field}", "rel", errors, 2e-6, same_bits(value, t[field]))


def _swiglu(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    h_bf16 = _filled(t["h"])
    run_tiles(
        lambda gate, up, weight: experts.swiglu_ref(gate, up, weight, SWIGLU_LIMIT),
        (t["gate"], t["up"], t["weight"]),
        (h_bf16,),
    )
    _ulps(find, f"{prefix} h", h_bf16, t["h"], 1)


# -- Engram ------------------------------------------------------------------------------------------------------


def _engram(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    hashes = release_config().engram_tables
    find.same(f"{prefix} primes", torch.tensor([table.primes for table in hashes]), t["primes"].flatten(1))
    find.same(f"{prefix} multipliers", torch.tensor([table.multipliers for table in hashes]), t["multipliers"])
    find.same(f"{prefix} offsets", torch.tensor([table.offsets for table in hashes]), t["offsets"])
    for field in sorted(field for field in t if field.startswith("rows")):
        ids_i64 = t[field.replace("rows", "seq")].long()
        if field == "rows_dead":
            ids_i64 = ids_i64.masked_fill(t["mask_dead"] == 0, -1)
        n_back = t["multipliers"].shape[1]
        lookback_i64 = torch.cat((ids_i64.new_full((n_back - 1,), -1), ids_i64)).unfold(0, n_back, 1).flip(1)
        rows_i64 = _filled(t[field])
        for at, table in enumerate(hashes):
            multipliers, primes, offsets = (torch.tensor(x) for x in (table.multipliers, table.primes, table.offsets))
            engram.engram_hash(lookback_i64, multipliers, primes, offsets, ENGRAM_PAD, rows_i64[:, at])
        find.same(f"{prefix} {field}", rows_i64, t[field])


# -- index scores, candidate blocks, lists, attention ------------------------------------------------------------


def _index_score(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    row_format = RowFormat("index_key", t["k"].shape[1])
    rows = {}
    for side in "qk":
        if f"{side}_packed" not in t:
            rows[side] = row_format.pack(t[side])
            continue
        rows[side] = torch.cat((t[f"{side}_packed"], t[f"{side}_scale"]), dim=-1)
        find.same(f"{prefix} {side}", row_format.unpack(rows[side]), t[side])
    n_heads, width = t["q"].shape[1:]
    head_scale = width**-0.5 * n_heads**-0.5
    scores_f32 = _filled(t["score"].float())
    n_rows, n_keys = scores_f32.shape
    index_score.index_score(
        rows["q"],
        (t["w_raw"].float() * head_scale).bfloat16(),
        rows["k"][None],
        torch.zeros(1, dtype=torch.int32),
        torch.full((n_rows,), n_keys, dtype=torch.int32),
        scores_f32,
    )
    _ulps(find, f"{prefix} score", scores_f32.bfloat16(), t["score"], 0)


def _candidates(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    block_size, n_keep = t["params"].tolist()
    blocks_i32 = torch.full((len(t["scores"]), n_keep), 77, dtype=torch.int32)
    selection.candidate_blocks(t["scores"], t["visible"], block_size, blocks_i32)
    find.same(f"{prefix} keep_blocks", block_mask(blocks_i32, t["keep_blocks"].shape[1]), t["keep_blocks"])


def _top_k(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    ids_i32 = _filled(t["ids"])
    selection.top_k_list(t["scores"], t["visible"], None, 1, ids_i32)
    find.same(f"{prefix} ids", ids_i32, t["ids"])
    candidates = tables.get(prefix.replace("topk", "cand").removesuffix("_restricted"))
    if prefix.endswith("_restricted") and candidates is not None:
        block_size, n_keep = candidates["params"].tolist()
        kept = selection.mask_to_list(candidates["keep_blocks"] != 0, n_keep)
        ids_i32 = _filled(t["ids"])
        scores_f32 = tables[prefix.removesuffix("_restricted")]["scores"]
        selection.top_k_list(scores_f32, t["visible"], kept, block_size, ids_i32)
        find.same(f"{prefix} ids, by blocks", ids_i32, t["ids"])


def _sparse_attention(prefix: str, tables: Tables, find: Findings) -> None:
    t = tables[prefix]
    index = torch.nn.functional.pad(t["idx"], (0, -t["idx"].shape[1] % attention.LIST_BLOCK), value=-1)
    present = index >= 0
    kv_bf16 = t["kv"][index.clamp_min(0)].where(present[..., None], 0)
    out_bf16 = _filled(t["out"])
    run_tiles(
        lambda q, kv, here: attention.attention_ref(q, kv, here, t["sink"]), (t["q"], kv_bf16, present), (out_bf16,)
    )
    _ulps(find, f"{prefix} out", out_bf16, t["out"], 2)
    _ulps(find, f"{prefix} out of an empty list", out_bf16[0], torch.zeros_like(out_bf16[0]), 0)


def block_mask(blocks_i32: Tensor, n_blocks: int) -> Tensor:
    """[R, n_blocks] U8, 1 for each listed block of blocks_i32 [R, C] with -1 for no entry."""
    mask = torch.zeros((len(blocks_i32), n_blocks + 1), dtype=torch.uint8)
    mask.scatter_(1, blocks_i32.long().where(blocks_i32 >= 0, n_blocks), 1)
    return mask[:, :n_blocks]


def release_config() -> TextConfig:
    """The tables of rotation and n-grams are the release's own."""
    return msgspec.convert(RELEASE_CONFIG, ModelConfig).text_config


_GROUP = 32  # channels of a row in the activation tables
_QUANTISERS = {
    "actquant8": (RowFormat("window", _GROUP), formats.act_quant8),
    "actquant4_g16_e4m3": (RowFormat("compressed", _GROUP), formats.act_quant4_e4m3),
    "actquant4_g32_e8m0": (RowFormat("index_key", _GROUP), formats.act_quant4_e8m0),
}
_SCORES = ("all_fit", "bs4", "plain", "ties")
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("e2m1_e8m0", "e4m3", "e8m0"), _codes),
    "pow2ceil": _pow2ceil,
    **dict.fromkeys(_QUANTISERS, _act_quant),
    **dict.fromkeys(("fp8_gemm", "fp8_gemm_k5120", "fp4_gemm", "fp4_gemm_k5120"), _quantised_gemm),
    "bf16_gemm_k5120": _bf16_gemm,
    "rmsnorm": _rmsnorm,
    "sinkhorn": _sinkhorn,
    "mhc_mix_5120": _mhc_mix,
    **dict.fromkeys(("rope_window", "rope_yarn"), _rope_table),
    "rope_apply": _rope_apply,
    **dict.fromkeys(("router", "router_nobias"), _router),
    "swiglu": _swiglu,
    "engram": _engram,
    **dict.fromkeys(("index_score", "index_score_4g"), _index_score),
    **dict.fromkeys([f"cand_{name}" for name in _SCORES], _candidates),
    **dict.fromkeys([f"topk_{name}{end}" for name in _SCORES for end in ("", "_restricted")], _top_k),
    "topk_all_tied": _top_k,
    "sparse_attn": _sparse_attention,
}
