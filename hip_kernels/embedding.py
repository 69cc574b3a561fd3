"""Token embedding, replicated into the residual streams (backbone.md section 3)."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_slabs


def embedding(ids_i32: Tensor, table_bf16: Tensor, streams_bf16: Tensor) -> None:
    """Fill streams_bf16 [R, n, D]: every stream starts as table_bf16 [V, D] at ids_i32 [R], unscaled."""
    bind_dims(
        "embedding",
        "R",
        {"ids_i32 R": ids_i32, "table_bf16 V D": table_bf16, "streams_bf16 R N D": streams_bf16},
    )
    run_slabs(lambda ids: table_bf16[ids.long()][:, None], (ids_i32,), streams_bf16)
