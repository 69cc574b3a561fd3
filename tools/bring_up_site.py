"""Where a climb takes place: the model, the cards that it will be on, and the engine once that is loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch

from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.engine.model import PrefillMode
from rocline.engine.progress import ByteProgress
from rocline.engine.release import release_config
from rocline.hip_kernels.runtime import torch_sees_gpus
from rocline.pipeline.costs import Rates
from rocline.pipeline.engine import Engine
from rocline.pipeline.forecast import FORECAST_FLOPS, prefill
from rocline.pipeline.options import Options
from rocline.pipeline.placement import PlacementError
from rocline.pipeline.plan import Plan, Request, make_plan
from rocline.tools.doctor_checks import Cards, Check, gb_per_s, gib
from rocline.tools.generate import bytes_to_read
from rocline.tools.perplexity import shipped_ids

DISK_BYTES_PER_S = 2e9  # of a local NVMe disk, until one has been timed
CONTEXT, CAPACITY = 1_048_576, 16_384  # of the release: tokens, and positions that candidate blocks hold


class Expected(NamedTuple):
    """How long a rung takes, and on what that rests. seconds: None where nothing is known."""

    seconds: float | None
    basis: str

    def __str__(self) -> str:
        if self.seconds is None:
            return self.basis
        minutes, rest = divmod(round(self.seconds), 60)
        return f"about {f'{minutes} min {rest} s' if minutes else f'{rest} s'}, {self.basis}"


@dataclass
class Rung:
    """One step of the climb.

    what     in words
    expects  how long it takes; may work for some seconds
    make     climbs it; a problem in its Check, or an exception, ends the climb
    """

    name: str
    what: str
    expects: Callable[[], Expected]
    make: Callable[[], Check]


@dataclass(frozen=True)
class Lengths:
    """Prompt tokens of the rungs that send requests: the release's own, or what they mean in a smaller model.

    request          well inside the candidates' capacity; past_candidates: just beyond it
    quarter, whole   so much of the context as the published run's prompts are of the release's
    """

    request: int
    past_candidates: int
    quarter: int
    whole: int

    @classmethod
    def of(cls, config: ModelConfig, context: int) -> Lengths:
        text = config.text_config
        capacity = text.candidate_topk_blocks * text.candidate_block_size
        return cls(
            request=max(capacity // 4, 2 * text.sliding_window),
            past_candidates=-(-capacity * 17_000 // CAPACITY),
            quarter=261_933 * context // CONTEXT,
            whole=1_000_411 * context // CONTEXT,
        )


@dataclass
class Site:
    """
    found   the cards that the engine will be on, in its order; none with --device cpu
    golden  folder of more golden data, if there is any
    """

    folder: Path
    config: ModelConfig
    options: Options
    found: Cards
    golden: Path | None = None
    disk_bytes_per_s: float | None = None
    _engine: Engine | None = field(default=None, init=False)

    @property
    def context(self) -> int:
        most = self.config.text_config.max_position_embeddings
        return min(self.options.context or most, most)

    @property
    def lengths(self) -> Lengths:
        return Lengths.of(self.config, self.context)

    @cached_property
    def is_release(self) -> bool:
        """Whether the model's tensors are the release's, whatever else its configuration says: only then is it known
        how well it must foretell."""
        return expected_tensors(self.config) == expected_tensors(release_config())

    @property
    def is_double(self) -> bool:
        """Whether HIP is the tests' double over this CPU, to which full-size work is too much."""
        return any(card.is_host for card in self.found.cards)

    def engine(self) -> Engine:
        """Loaded when it is first asked for. Raises what Engine.open does."""
        if self._engine is None:
            gc.collect()  # what rungs before have held of the cards
            if torch_sees_gpus():
                torch.cuda.empty_cache()  # torch keeps what it has freed, and the plan counts on it
            with ByteProgress("weights", self.n_weight_bytes) as loading:
                self._engine = Engine.open(self.folder, self.options, advance=loading.advance)
        return self._engine

    def close(self) -> None:
        """Ends the engine, if there is one. Harmless twice."""
        engine, self._engine = self._engine, None
        if engine:
            engine.close()

    @property
    def n_weight_bytes(self) -> int:
        return bytes_to_read(self.config, self.options.engram)

    @cached_property
    def text_ids(self) -> list[int]:
        """The shipped text. Raises TokenizerError."""
        return shipped_ids(self.folder, self.config)

    def prompt(self, n_tokens: int) -> list[int]:
        """The begin token, and the shipped text over and over."""
        return [self.config.bos_token_id, *islice(cycle(self.text_ids), n_tokens - 1)]

    def after(self, n_tokens: int, n_more: int) -> list[int]:
        """What follows `prompt(n_tokens)` if the text goes on."""
        return list(islice(cycle(self.text_ids), n_tokens - 1, n_tokens - 1 + n_more))

    # Expectations

    def expects_load(self) -> Expected:
        rate = self.disk_bytes_per_s or DISK_BYTES_PER_S
        basis = "as this disk was timed" if self.disk_bytes_per_s else "assumed of a local NVMe disk"
        return Expected(self.n_weight_bytes / rate, f"{gib(self.n_weight_bytes)} at {gb_per_s(rate)}, {basis}")

    def expects_prompts(self, *prompts: tuple[int, PrefillMode]) -> Expected:
        """Of prompts one after the other, as long as the published run's cards would take."""
        if not self.found.cards or self.is_double:
            return Expected(None, "no model of this processor's speed")
        if isinstance(self._plan, str):
            return Expected(None, f"there is no plan to model it by: {self._plan}")
        made, rates = self._plan, Rates(FORECAST_FLOPS[0])
        runs = [prefill(made.model, made.placement, n, self.options.chunk_rows, rates, mode) for n, mode in prompts]
        seconds = sum(run.total_s for run in runs)
        return Expected(seconds, f"modelled at {FORECAST_FLOPS[0] / 1e12:g} TFLOP/s a card, as published of W7900D")

    @cached_property
    def _plan(self) -> Plan | str:
        """What the engine will plan, or why it cannot."""
        options = self.options
        request = Request(
            n_devices=len(self.found.cards),
            device_bytes=min(card.free_bytes for card in self.found.cards),
            n_stages=options.stages,
            kind=options.placement,
            context=self.context,
            kv_tokens=options.kv_tokens or 2 * self.context,
            chunk_rows=options.chunk_rows,
            drafts="off",
        )
        try:
            return make_plan(self.config, request)
        except PlacementError as error:
            return str(error)
