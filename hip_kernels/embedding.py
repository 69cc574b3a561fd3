"""Token embedding, replicated into the residual streams (backbone.md section 3)."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator, run_slabs
from rocline.hip_kernels.kernel import Kernel, launch

_EMBED = Kernel("embedding.hip", "embed", "PPPii", threads=128)
RELEASE_KERNELS = (_EMBED,)


@operator
def embedding(ids_i32: Tensor, table_bf16: Tensor, streams_bf16: Tensor) -> None:
    """Fill streams_bf16 [R, n, D]: every stream starts as table_bf16 [V, D] at ids_i32 [R], unscaled."""
    bind_dims(
        "embedding",
        "R",
        {"ids_i32 R": ids_i32, "table_bf16 V D": table_bf16, "streams_bf16 R N D": streams_bf16},
    )
    run_slabs(lambda ids: table_bf16[ids.long()][:, None], (ids_i32,), streams_bf16)


def embedding_hip(ids_i32: Tensor, table_bf16: Tensor, streams_bf16: Tensor) -> None:
    """embedding on the current stream, for D a multiple of 8; ids are below V, which the kernel does not check."""
    n_rows, n_streams, width = bind_dims(
        "embedding",
        "R N D",
        {"ids_i32 R": ids_i32, "table_bf16 V D": table_bf16, "streams_bf16 R N D": streams_bf16},
    )
    if width % 8:
        raise BindError(f"embedding: rows of {width} channels, want a multiple of 8: they are moved 16 bytes at a time")
    if n_rows:
        launch(_EMBED, grid=(n_rows, 1), args=(streams_bf16, ids_i32, table_bf16, n_streams, width // 8))
