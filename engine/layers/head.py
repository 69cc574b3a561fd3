"""The two ends of the stack: token ids to residual streams, final streams to logits (backbone.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram_ahead import EngramRows
from rocline.engine.handoff import HandOff, Rows, RowSpan, positions_of
from rocline.engine.layers.streams import collapse_norm
from rocline.engine.record import Recorder, ignore
from rocline.hip_kernels.embedding import embedding
from rocline.hip_kernels.head import head


@dataclass(frozen=True)
class Logits:
    """logits_f32 [n, V]; finite_u8 [n], 0 for a row that must end its request; (sequence, position) of each row."""

    logits_f32: Tensor
    finite_u8: Tensor
    rows: tuple[tuple[int, int], ...]


def lookback_rows(config: TextConfig, spans: Sequence[RowSpan], ids: Mapping[int, Sequence[int]]) -> Tensor:
    """[R, N] int32 as in HandOff, in plain host memory. ids: as for embed_rows."""
    n_back = config.engram_max_ngram_size
    backwards: list[int] = []  # of a span after the other: its ids from the last on, and those before its start
    firsts: list[int] = []  # of each row: where its own id stands there
    for span in spans:
        known = ids[span.sequence][max(0, span.start - n_back + 1) : span.end]
        end = len(backwards) + span.n_rows
        firsts += range(end - 1, len(backwards) - 1, -1)
        backwards += known[::-1]
        backwards += [-1] * (end + n_back - 1 - len(backwards))
    return torch.tensor(backwards, dtype=torch.int32).unfold(0, n_back, 1)[firsts]


def embed_rows(
    config: TextConfig,
    table_bf16: Tensor,
    spans: tuple[RowSpan, ...],
    ids: Mapping[int, Sequence[int]],
    engram: EngramRows | None = None,
    lookback_i32: Tensor | None = None,
) -> HandOff:
    """The first hand-off of the spans' rows.

    In a stage's memory where that is used, until the scope around the call ends: there it is what Stage.run takes as
    a function. In plain host memory elsewhere; its release does nothing.

    ids           each sequence's token ids, at least up to its span's end
    engram        table rows of lookback_rows of the same spans, as from EngramAhead.start
    lookback_i32  lookback_rows of them, if they are known
    """
    lookback_i32 = lookback_rows(config, spans, ids) if lookback_i32 is None else lookback_i32
    n_rows, n = len(lookback_i32), config.hc_mult
    streams_bf16 = scratch.bf16(n_rows, n, config.hidden_size)
    pre_f32 = torch.zeros((n_rows, n))
    pre_f32[:, 0] = 1.0  # the first sublayer collapses stream 0 alone
    ids_i32 = scratch.upload(lookback_i32[:, 0].contiguous())
    embedding(ids_i32, table_bf16, streams_bf16)
    # Each whole by itself: a hand-off's tensors have spans of their own.
    positions_i32, lookback_i32, pre_f32 = map(scratch.upload, (positions_of(spans), lookback_i32, pre_f32))
    return HandOff(spans, positions_i32, lookback_i32, streams_bf16, pre_f32, engram=engram)


def final_rows(
    config: TextConfig, norm_bf16: Tensor, rows: Rows, record: Recorder = ignore
) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """The head's input [n, D] BF16 of the rows whose logits were asked for, and (sequence, position) of each.

    It lies in this thread's memory, as everything here does: a worker opens a scope of its stage's around it.
    """
    rows = rows.unpacked().from_floors([span.logits_from for span in rows.spans])
    h_bf16 = collapse_norm(config, norm_bf16, rows.streams_bf16, rows.pre_f32)
    record(config.num_hidden_layers, "final_h", h_bf16)
    return h_bf16, tuple((span.sequence, position) for span in rows.spans for position in range(span.start, span.end))


def final_logits(
    config: TextConfig, norm_bf16: Tensor, head_bf16: Tensor, rows: Rows, record: Recorder = ignore
) -> Logits:
    """Logits of the rows that were asked for, collapsed by the last layer's coefficients."""
    h_bf16, places = final_rows(config, norm_bf16, rows, record)
    logits_f32, finite_u8 = scratch.f32(len(places), config.vocab_size), scratch.u8(len(places))
    head(h_bf16, head_bf16, logits_f32, finite_u8)
    return Logits(logits_f32, finite_u8, places)
