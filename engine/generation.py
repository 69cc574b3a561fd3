"""One request on a loaded model, from its prompt to its last token (design.md section 4; io.md Part 3, section 4.4)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from rocline.engine.config import TextConfig
from rocline.engine.digest import LogitsDigest, ids_sha256
from rocline.engine.layers.head import Logits
from rocline.engine.model import CHUNK_ROWS, Model, PrefillMode, PromptError
from rocline.engine.sampling import SamplerState, SamplingParams, pack_rows
from rocline.hip_kernels.sampling import NOT_FINITE, sample

FinishReason = Literal["stop", "length"]


class GenerationError(RuntimeError):
    """A request had to end: no token could be chosen from its logits."""


def check_prompt(config: TextConfig, prompt_ids: Sequence[int], context: int | None = None) -> array[int]:
    """The prompt as an array of int32.

    context  tokens that prompt and output may have together, if fewer than the model's
    Raises PromptError for a prompt that is empty, leaves no room for output, or holds an id the model lacks.
    """
    n_ids, vocab = len(prompt_ids), config.vocab_size
    context = min(context or config.max_position_embeddings, config.max_position_embeddings)
    if not n_ids:
        raise PromptError("empty prompt: at least one token id is needed")
    if n_ids >= context:
        raise PromptError(f"prompt of {n_ids} tokens: at most {context - 1} fit the model's context with a token after")
    try:
        ids = array("i", prompt_ids)
        seen_i32 = np.frombuffer(ids, dtype=np.int32)  # min() and max() of a million would hold up other requests
        in_range = bool(seen_i32.min() >= 0 and seen_i32.max() < vocab)
    except (TypeError, OverflowError):  # no integer, or past 32 bits
        in_range = False
    if not in_range:
        place, token = next((p, t) for p, t in enumerate(prompt_ids) if not isinstance(t, int) or not 0 <= t < vocab)
        raise PromptError(f"prompt[{place}] = {token!r}: must be a token id from 0 to {vocab - 1}")
    return ids


class Generation:
    """A request that runs while it is iterated: one output id a step, the id that ends the output included.

    seed           the request's own, or the one drawn for it
    output_ids     so far
    finish_reason  None before the end; "stop": the last id is a stop id; "length": max_tokens or the context is full
    prefill_s      seconds from the start to the prompt's logits
    decode_s       seconds in the steps after the first id, the reader's own time left out
    """

    def __init__(
        self,
        model: Model,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        mode: PrefillMode = "halo",
        chunk_rows: int = CHUNK_ROWS,
        progress: Callable[[int], None] = lambda n_rows: None,
    ) -> None:
        """progress is called with the prompt's rows as they are done. Raises PromptError and SamplingError."""
        text = model.config.text_config
        check_prompt(text, prompt_ids)
        self._sampler = SamplerState(params, prompt_ids, [model.config.eos_token_id], text.vocab_size)
        self.seed = self._sampler.seed
        self.prompt_ids = prompt_ids
        self.max_tokens = min(params.max_tokens, text.max_position_embeddings - len(prompt_ids))
        self.output_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self.prefill_s = self.decode_s = 0.0
        self._logits_digest = LogitsDigest()
        self._steps = self._run(model, mode, chunk_rows, progress)

    def __iter__(self) -> Iterator[int]:
        """The one run of this request: a second loop goes on where the first stopped."""
        return self._steps

    def close(self) -> None:
        """Give up a run before its end; its rows are freed. A run that ended has done so by itself."""
        self._steps.close()

    @property
    def output_ids_sha256(self) -> str:
        return ids_sha256(self.output_ids)

    @property
    def logits_sha256(self) -> str:
        """Over the rows the output ids were chosen from."""
        return self._logits_digest.hexdigest()

    def _run(
        self, model: Model, mode: PrefillMode, chunk_rows: int, progress: Callable[[int], None]
    ) -> Generator[int, None, None]:
        handle = model.open()
        try:
            start_s = time.monotonic()
            (logits,) = model.prefill(handle, self.prompt_ids, mode=mode, chunk_rows=chunk_rows, progress=progress)
            self.prefill_s = time.monotonic() - start_s
            yield self._choose(logits)
            while self.finish_reason is None:
                start_s = time.monotonic()
                token = self._choose(model.decode([(handle, self.output_ids[-1])]))
                self.decode_s += time.monotonic() - start_s
                yield token
        finally:
            model.close(handle)

    def _choose(self, logits: Logits) -> int:
        """Append the next id, chosen from one row. Raises GenerationError naming the row's position."""
        ((_, position),) = logits.rows
        if not logits.finite_u8.all():
            raise GenerationError(f"logits of position {position} are not finite; the request cannot go on")
        token_i32 = torch.empty(1, dtype=torch.int32)
        sample(logits.logits_f32, pack_rows([(self._sampler, ())]), token_i32)
        token = int(token_i32)
        if token < 0:
            why = "a score overflowed" if token == NOT_FINITE else "every token is banned"
            raise GenerationError(f"no token to choose after position {position}: {why}")
        self._logits_digest.add(logits.logits_f32)
        self._sampler.commit([token])
        self.output_ids.append(token)
        if token in self._sampler.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) == self.max_tokens:
            self.finish_reason = "length"
        return token
