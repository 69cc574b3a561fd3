"""A model of any size without its arithmetic: the memory that chunks ask for, from shapes alone.

Weights are single elements stretched to their shapes; operators check what they are given and compute
nothing (binding.shapes_only). Rings, page tables and row tables are real.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rocline.arena.trace import Recorder, TraceEvent
from rocline.engine.checkpoint import TORCH_DTYPE
from rocline.engine.config import ModelConfig
from rocline.engine.home import DeviceKind, HostHome, PaperHome
from rocline.engine.layout import expected_tensors
from rocline.engine.model import Model
from rocline.engine.routes import StageLayers
from rocline.engine.weights import NOT_LOADED, ModelWeights, model_weights, stack_of
from rocline.hip_kernels.binding import shapes_only

SLAB_BYTES = 4 << 30  # more than any plan gives an arena; address space only: nothing computes, nothing is written


def shape_weights(config: ModelConfig, torch_device: str = "cpu") -> ModelWeights:
    """Every weight of the backbone, stretched from a single element; on "meta" without any."""
    text, loaded = config.text_config, dict[str, Tensor]()
    for name, spec in expected_tensors(config).items():
        if spec.component in NOT_LOADED:
            continue
        shape = spec.shape
        if ".ffn.experts." in name:
            name, _ = stack_of(name)
            shape = (text.n_routed_experts, *shape)
        if name not in loaded:
            loaded[name] = torch.zeros((), dtype=TORCH_DTYPE[spec.dtype], device=torch_device).expand(shape)
    return model_weights(loaded, text, np.zeros(text.vocab_size, dtype=np.int32))


def prefill_traces(
    config: ModelConfig,
    stages: Sequence[StageLayers],
    prompt_tokens: int,
    chunk_rows: int,
    n_chunks: int,
    device: DeviceKind = "cpu",
) -> list[list[TraceEvent]]:
    """What each stage takes from its arena during the last n_chunks of a prompt in `halo` mode.

    Stages run one after another, and a hand-off is given back when its receiver has copied it. Time counts
    events. There is no other stream, so nothing is pending.

    device  whose operators take it: the torch references', or the kernels' with their workspaces and uploads
    """
    with shapes_only():
        # Kernels' weights are checked where there are values, which took most of a plan's time.
        home, at = (PaperHome(config.text_config), "meta") if device == "hip" else (HostHome(), "cpu")
        weights = shape_weights(config, at)
        model = Model(config, weights, stages, kv_tokens=prompt_tokens, arena_bytes=SLAB_BYTES, home=home)
    first_recorded = -(-prompt_tokens // chunk_rows) * chunk_rows - n_chunks * chunk_rows
    done_rows, recorders = 0, list[Recorder]()

    def begin(n_rows: int) -> None:
        nonlocal done_rows
        done_rows += n_rows
        if done_rows >= first_recorded and not recorders:
            for stage in model.stages:
                recorders.append(Recorder(itertools.count().__next__))
                stage.memory.arena.recorder = recorders[-1]

    begin(0)
    with shapes_only():
        model.prefill(model.open(), [0] * prompt_tokens, chunk_rows=chunk_rows, progress=begin)
    return [recorder.events for recorder in recorders]
