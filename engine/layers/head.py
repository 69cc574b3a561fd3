"""The two ends of the stack: token ids to residual streams, final streams to logits (backbone.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.handoff import HandOff, RowSpan
from rocline.engine.layers.streams import collapse_norm
from rocline.engine.record import Recorder
from rocline.hip_kernels.embedding import embedding
from rocline.hip_kernels.head import head


@dataclass(frozen=True)
class Logits:
    """logits_f32 [n, V]; finite_u8 [n], 0 for a row that must end its request; (sequence, position) of each row."""

    logits_f32: Tensor
    finite_u8: Tensor
    rows: tuple[tuple[int, int], ...]


def embed_rows(
    config: TextConfig, table_bf16: Tensor, spans: tuple[RowSpan, ...], ids: Mapping[int, Sequence[int]]
) -> HandOff:
    """The first hand-off of the spans' rows, in plain host memory.

    ids: each sequence's token ids, at least up to its span's end.
    """
    n_back = config.engram_max_ngram_size
    lookback = []
    for span in spans:
        known = ids[span.sequence][max(0, span.start - n_back + 1) : span.end]
        padded = torch.tensor([-1] * (span.n_rows + n_back - 1 - len(known)) + list(known), dtype=torch.int32)
        lookback.append(padded.unfold(0, n_back, 1).flip(1))
    lookback_i32 = torch.cat(lookback)
    n_rows, n = len(lookback_i32), config.hc_mult
    streams_bf16 = scratch.bf16(n_rows, n, config.hidden_size)
    embedding(lookback_i32[:, 0].contiguous(), table_bf16, streams_bf16)
    pre_f32 = torch.zeros((n_rows, n))
    pre_f32[:, 0] = 1.0  # the first sublayer collapses stream 0 alone
    positions_i32 = torch.cat([torch.arange(span.start, span.end, dtype=torch.int32) for span in spans])
    return HandOff(spans, positions_i32, lookback_i32, streams_bf16, pre_f32)


def final_logits(config: TextConfig, norm_bf16: Tensor, head_bf16: Tensor, rows: HandOff, record: Recorder) -> Logits:
    """Logits of the rows that were asked for, collapsed by the last layer's coefficients."""
    rows = rows.from_floors([span.logits_from for span in rows.spans])
    h_bf16 = collapse_norm(config, norm_bf16, rows.streams_bf16, rows.pre_f32)
    record(config.num_hidden_layers, "final_h", h_bf16)
    logits_f32, finite_u8 = scratch.f32(rows.n_rows, len(head_bf16)), scratch.u8(rows.n_rows)
    head(h_bf16, head_bf16, logits_f32, finite_u8)
    places = tuple((span.sequence, position) for span in rows.spans for position in range(span.start, span.end))
    return Logits(logits_f32, finite_u8, places)
