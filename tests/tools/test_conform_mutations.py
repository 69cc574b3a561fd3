"""Seeded mistakes: conform must fail on each. Most stay near the rounding plateau, where logits cannot see them."""

import __future__

import inspect
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rocline.engine import stage
from rocline.engine.layers import attention as attention_layer
from rocline.engine.layers import compressor
from rocline.engine.model import Model
from rocline.engine.sequence import Ring
from rocline.hip_kernels import (
    attention,
    engram,
    experts,
    formats,
    grouped_projection,
    index_score,
    index_vectors,
    layer_ops,
    mhc,
    rope,
    router,
    selection,
)
from rocline.tools import conform
from rocline.tools.golden_decode import check_decode
from rocline.tools.golden_limits import MODEL_LIMITS
from rocline.tools.golden_model import check_prefill
from rocline.tools.golden_ops import check_ops
from rocline.tools.golden_report import Findings

DATA = Path(__file__).resolve().parent.parent / "data" / "golden"


def replace_source(monkeypatch, owner, name, *edits):
    """Put an edited copy of owner.name, a function, in its place and everywhere that it was imported to."""
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in edits:
        assert source.count(old) == 1, f"{name} no longer says {old!r} once: write this mistake anew"
        source = source.replace(old, new)
    space = vars(sys.modules[original.__module__]) | {
        "requantised": requantised,
        "dequantise_tiles": formats.dequantise_tiles,
    }
    exec(compile(source, name, "exec", flags=__future__.annotations.compiler_flag), space)
    for module in [m for key, m in sys.modules.items() if key.startswith("rocline.")]:
        if vars(module).get(name) is original:
            monkeypatch.setattr(module, name, space[name])
    if inspect.isclass(owner):
        monkeypatch.setattr(owner, name, space[name])


def requantised(x_bf16):
    row_format = formats.RowFormat("window", x_bf16.shape[-1])
    return row_format.unpack(row_format.pack(x_bf16))


ROW_NORM = "comb = comb / (comb.sum(1, keepdim=True) + eps)  # [source, destination, row]"
# name: (what, where in it, edits, an item that fails)
MISTAKES = {
    "comb transposed": (
        mhc,
        "mhc_merge_ref",
        [
            ("comb_f32[:, :, :, None]", "comb_f32.transpose(1, 2)[:, :, :, None]"),
        ],
        "trace x_out",
    ),
    "a last row step in Sinkhorn": (
        mhc,
        "mhc_coefficients_ref",
        [("    return pre", f"    {ROW_NORM}\n    return pre")],
        "sinkhorn comb",
    ),
    "FFN collapsed by its own pre": (
        stage.Stage,
        "_run_layer",
        [
            (
                "out_bf16 = experts",
                "u_bf16 = streams.collapse_norm(config, weights.ffn_norm_bf16, rows.streams_bf16, mixed.pre_f32)\n"
                "    out_bf16 = experts",
            )
        ],
        "trace u_ffn",
    ),
    "routing weight after w2": (
        experts,
        "expert_ref",
        [
            ("swiglu_ref(gate_bf16, up_bf16, weights_f32, limit)", "swiglu_ref(gate_bf16, up_bf16, None, limit)"),
            (
                "return block_gemm_ref(quantise_rows(hidden_bf16), *down).bfloat16()",
                "out = block_gemm_ref(quantise_rows(hidden_bf16), *down)\n"
                "    return (out if weights_f32 is None else out * weights_f32[:, None]).bfloat16()",
            ),
        ],
        "trace operator moe_out",
    ),
    "no clamp on the shared expert": (
        experts,
        "swiglu_ref",
        [("    hidden = ", "    limit = 1e9 if weights_f32 is None else limit\n    hidden = ")],
        "trace operator moe_out",
    ),
    "gate clamped from below": (
        experts,
        "swiglu_ref",
        [("clamp(max=limit)", "clamp(min=-limit)")],
        "swiglu h",
    ),
    "bias in the routing weights": (
        router,
        "router_ref",
        [("chosen = scores.gather", "chosen = (scores + bias_f32).gather")],
        "router w",
    ),
    "compressed rows rotated at the closing token": (
        compressor,
        "fresh_rows",
        [("dtype=torch.int32) * role.ratio", "dtype=torch.int32) * role.ratio + role.ratio - 1")],
        "trace operator comp_kv",
    ),
    "index key from the rotated latent": (
        index_vectors,
        "index_key",
        [("linear_ref(latent, weight_bf16)", "linear_ref(rope_ref(latent[:, None], cos, sin)[:, 0], weight_bf16)")],
        "trace operator index_k",
    ),
    "wo_a input quantised": (
        grouped_projection,
        "grouped_projection_ref",
        [("x_bf16[:, g]", "requantised(x_bf16[:, g])")],
        "trace attn_out",
    ),
    "wo_b input not quantised": (
        layer_ops,
        "project_heads",
        [
            (
                "fp8_linear(grouped_bf16, wo_b, out_bf16)",
                "out_bf16.copy_(grouped_bf16.float() @ dequantise_tiles(*wo_b).float().T)",
            )
        ],
        "trace attn_out",
    ),
    "no inverse rotation": (
        layer_ops,
        "attend",
        [("rope(out_bf16, cos_f32, sin_f32, out_bf16, inverse=True)", "pass")],
        "trace o",
    ),
    "local window one short": (
        attention_layer,
        "span_windows",
        [("first = (positions - window + 1)", "first = (positions - window + 2)")],
        "trace o",
    ),
    "P left in FP32": (
        attention,
        "attention_ref",
        [("p_f32.bfloat16().float()", "p_f32")],
        "sparse_attn out",
    ),
    "no sink": (
        attention,
        "attention_ref",
        [("(mass + torch.exp(sink_f32[:, None] - top))", "mass")],
        "sparse_attn out",
    ),
    "index dot not rounded": (
        index_score,
        "index_score_ref",
        [("dot_f32.bfloat16().relu_()", "dot_f32.relu()")],
        "index_score_4g score",
    ),
    "relu times weight not rounded": (
        index_score,
        "index_score_ref",
        [("relu_bf16.mul_(weights_bf16[:, head, None]).float()", "relu_bf16.float() * weights_bf16[:, head, None]")],
        "index_score_4g score",
    ),
    "newest candidate block not forced": (
        selection,
        "candidate_blocks_ref",
        [('blocks.masked_fill(forced, float("inf"))', "blocks")],
        "cand_plain keep_blocks",
    ),
    "candidates restrict nothing": (
        selection,
        "restrict_ref",
        [('scores_f32.masked_fill(~keep, float("-inf"))', "scores_f32")],
        "topk_plain_restricted ids, by blocks",
    ),
    "half of top-k": (
        selection,
        "top_k_list_ref",
        [("top_k_mask(scores_f32, k)", "top_k_mask(scores_f32, k // 2)")],
        "trace operator sel",
    ),
    "YaRN off": (
        rope,
        "yarn_frequencies",
        [("omega / factor * (1 - smooth) + omega * smooth", "omega")],
        "rope_yarn omega",
    ),
    "rotation pairs halves of the channels": (
        rope,
        "turned_ref",
        [
            (".unflatten(-1, (-1, 2))", ".unflatten(-1, (2, -1)).transpose(-1, -2)"),
            ("turned.flatten(-2)", "turned.transpose(-1, -2).flatten(-2)"),
        ],
        "rope_apply y",
    ),
}


def failed_items(*checks):
    found = []
    for check in checks:
        check(found.append)
    return [finding.item for finding in found if finding.verdict == "failed"]


def tables(tell):
    check_ops(DATA / "ops.safetensors", Findings("ops", tell))


def trace(tell):
    conform.check_model(DATA / "micro", tell, parts=["trace"])


def prefill(tell):
    conform.check_model(DATA / "micro", tell, parts=["prefill"])


def short_decode(tell):
    """The first steps after 64 tokens, where more rows are visible than a list holds."""
    n_rows = 10
    recorded = load_file(DATA / "micro" / "decode.safetensors")
    tensors = {name: t for name, t in recorded.items() if ".64" in name}
    for name, tensor in tensors.items():
        if not name.startswith("prompt"):
            tensors[name] = tensor[: n_rows - 1 if name.startswith("sel") else n_rows]
    model = Model.load(DATA / "micro" / "model")
    slot_model = Model(model.config, model.weights, shared_key_slot=True)
    check_decode(model, slot_model, tensors, MODEL_LIMITS["micro"], Findings("micro", tell))


def test_nothing_fails_without_a_mistake():
    assert failed_items(tables, trace, prefill, short_decode) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_tables_or_trace_see(monkeypatch, name):
    owner, function, edits, item = MISTAKES[name]
    replace_source(monkeypatch, owner, function, *edits)
    assert item in failed_items(tables, trace)


def test_trace_sees_window_rows_quantised_without_their_rotated_part(monkeypatch):
    row_format, n_rotated = formats.RowFormat, 32  # of micro
    pack, unpack, row_bytes = row_format.pack, row_format.unpack, row_format.row_bytes

    def mutant_pack(self, x_bf16):
        packed = pack(self, x_bf16)
        if self.kind != "window":
            return packed
        return torch.cat((packed, x_bf16[..., -n_rotated:].contiguous().view(torch.uint8)), dim=-1)

    def mutant_unpack(self, rows_u8):
        if self.kind != "window":
            return unpack(self, rows_u8)
        values = unpack(self, rows_u8[..., : -2 * n_rotated])
        values[..., -n_rotated:] = rows_u8[..., -2 * n_rotated :].contiguous().view(torch.bfloat16)
        return values

    extra = {"window": 2 * n_rotated}
    monkeypatch.setattr(row_format, "pack", mutant_pack)
    monkeypatch.setattr(row_format, "unpack", mutant_unpack)
    monkeypatch.setattr(row_format, "row_bytes", property(lambda self: row_bytes.fget(self) + extra.get(self.kind, 0)))
    assert "trace window_kv" in failed_items(trace)


def test_decode_sees_the_shared_key_slot(monkeypatch):
    replace_source(monkeypatch, stage.Stage, "_attention", ("if self._shared_key_slot else None", ""))
    failed = failed_items(short_decode)
    assert "decode 64 sel L1, even positions" in failed
    assert "decode 64 against our own prefill" in failed


NO_ENGRAM = engram, "engram_gate_ref", [("alive_u8[:, None] != 0", "alive_u8[:, None] > 1")]


@pytest.mark.parametrize(
    ("mistake", "item"),
    [(NO_ENGRAM, "prefill logits.300"), (MISTAKES["no sink"][:3], "prefill logits_all.65 median")],
    ids=["no Engram", "no sink"],
)
def test_forty_layers_see_without_the_cpus_limits(golden_or_skip, monkeypatch, mistake, item):
    """Gross mistakes also in the longest prompt's last row, whose limit is wide."""
    folder = golden_or_skip("tiny40")
    owner, function, edits = mistake
    replace_source(monkeypatch, owner, function, *edits)
    model = Model.load(folder / "model", kv_tokens=4096, page_positions=64)  # every prompt its own pages
    tensors = load_file(folder / "prefill.safetensors")

    def prompts(tell):
        check_prefill(model, tensors, MODEL_LIMITS["tiny40"], Findings("tiny40", tell, on_host=False))

    assert item in failed_items(prompts)


def test_chunks_see_a_lost_open_pair(monkeypatch):
    read = Ring.read

    def mutant_read(self, start, stop, out=None):
        rows = read(self, start, stop, out)
        return torch.zeros_like(rows) if rows.is_floating_point() else rows  # pair rows; window rows are bytes

    monkeypatch.setattr(Ring, "read", mutant_read)
    assert failed_items(prefill) == ["prefill 130, halo in chunks of 37"]
