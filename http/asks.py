"""From a request's fields to what the engine is asked, on every route (io.md Part 3, sections 5.2 and 5.5)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from rocline.engine.sampling import SEED_MAX, SamplingError, SamplingParams
from rocline.http.errors import ApiError, invalid
from rocline.http.fields import Sampling
from rocline.http.output import OutputText, StopMatcher
from rocline.http.prompt import Start
from rocline.http.serving import Serving, Work
from rocline.pipeline.request import MAX_LOGPROBS, Request

MAX_PROMPT_LOGPROBS = 16_384
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "ignore_eos"),
)


def sampling_params(fields: Sampling, max_tokens: int, min_tokens: int | None) -> SamplingParams:
    """Whatever the request says is honoured; SamplingParams' defaults where it does not. Raises ApiError."""
    said = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    stop_ids = tuple(fields.stop_token_ids or ())
    try:
        return SamplingParams(**said, max_tokens=max_tokens, min_tokens=min_tokens or 0, stop_token_ids=stop_ids)
    except SamplingError as error:
        raise sampling_refused(error) from None


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Choice 0 has the request's seed; choice k the first 8 bytes of SHA-256 of "SEED/k", without their top bit.

    So choices differ and each can be asked for alone. Without a seed every choice draws its own.
    """
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:8]) & SEED_MAX


def choice_works(
    serving: Serving,
    fields: Sampling,
    params: SamplingParams,
    prompt: Sequence[int],
    n: int,
    *,
    start: Start | None = None,
    n_logprobs: int | None = None,
    prompt_logprobs: bool = False,
) -> list[Work]:
    """n choices of one prompt. Raises ApiError."""
    stop_ids = frozenset(params.stop_token_ids)
    stop_ids |= frozenset() if params.ignore_eos else {serving.config.eos_token_id}
    stops, include = fields.stops(), bool(fields.include_stop_str_in_output)
    skip_special = fields.skip_special_tokens is not False
    return [
        Work(
            Request(
                prompt_ids=prompt,
                params=replace(params, seed=choice_seed(params.seed, choice)),
                n_logprobs=n_logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            OutputText(
                serving.pool.tokenizer,
                serving.pool.markers,
                stop_ids=stop_ids,
                stops=StopMatcher(stops, include),
                start=start,
                skip_special=skip_special,
            ),
            stop_ids,
        )
        for choice in range(n)
    ]


def checked_n(serving: Serving, n: int | None, n_prompts: int = 1) -> int:
    """The choices of each prompt. Raises ApiError for more in all than can run and wait."""
    n = 1 if n is None else n
    options = serving.ready_engine().options
    most = options.running + options.queue
    if not 1 <= n <= most // n_prompts:
        raise invalid(f"n: {n} choices of {n_prompts} prompts; 1 to {most} choices in all fit this server", "n")
    return n


def checked_logprobs(value: int, param: str) -> int:
    """Raises ApiError."""
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(f"{param} = {value}: must be 0 to {MAX_LOGPROBS}", param)
    return value


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], param: str) -> None:
    """Raises ApiError: those of a long prompt would be an answer too large to write without holding others up."""
    if (n_tokens := sum(map(len, prompts))) > MAX_PROMPT_LOGPROBS:
        message = f"{param}: log-probabilities of {n_tokens} prompt tokens; {MAX_PROMPT_LOGPROBS} at most"
        raise invalid(message, param)


def sampling_refused(error: SamplingError) -> ApiError:
    return invalid(str(error), str(error).split(" = ")[0].split("[")[0])
