"""How rows of a prompt spread over the experts of each layer: counted, for `rocline bench engine --routing`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from rocline.pipeline.engine import Engine
from rocline.tools.bench_requests import LEAST_ID

GROUP_ROWS = 8  # of a decode step of eight requests


def routing(engine: Engine, seed: int, n_rows: int) -> dict[str, Any]:
    """Fields of a line, from n_rows random ids in one chunk through all layers of an idle engine. Raises what observe
    does."""
    dice, ids = random.Random(f"{seed} routing"), dict[int, Tensor]()
    prompt = dice.choices(range(LEAST_ID, engine.config.text_config.vocab_size), k=n_rows)

    def seen(layer: int, field: str, value: Tensor) -> None:
        if field == "router.ids":
            ids[layer] = value

    engine.observe(prompt, seen)
    return spread(ids, engine.config.text_config.n_routed_experts, dice)


def spread(ids_of: Mapping[int, Tensor], n_experts: int, dice: random.Random) -> dict[str, Any]:
    """Of the experts [R, k] that rows of each layer chose: rows of the busiest expert over the mean, and how many
    distinct ones are read by one row, by GROUP_ROWS rows drawn without regard to their order, and by all of them."""
    n_rows = len(next(iter(ids_of.values())))
    order = dice.sample(range(n_rows), n_rows)
    groups = [order[at : at + GROUP_ROWS] for at in range(0, n_rows - GROUP_ROWS + 1, GROUP_ROWS)]
    over_mean, of_one, of_group, of_all = [], [], [], []
    for ids_i32 in ids_of.values():
        counts = torch.bincount(ids_i32.flatten().long(), minlength=n_experts)
        over_mean.append(int(counts.max()) * n_experts / int(counts.sum()))
        of_one.append(mean(len(set(row)) for row in ids_i32.tolist()))
        of_group.append(mean(ids_i32[group].unique().numel() for group in groups))
        of_all.append(int((counts > 0).sum()))
    return {
        "rows": n_rows,
        "layers": len(ids_of),
        "most_over_mean": {"worst": max(over_mean), "median": median(over_mean)},
        "experts_a_layer": {"1": mean(of_one), str(GROUP_ROWS): mean(of_group), str(n_rows): mean(of_all)},
    }
