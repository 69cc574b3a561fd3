"""Requests to an engine's submit, measured: cold prefills, and streams that decode together."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from rocline.engine.sampling import SamplingParams
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.runtime import torch_sees_gpus
from rocline.pipeline.costs import CostModel
from rocline.pipeline.engine import Engine
from rocline.pipeline.request import EngineError, Request, Summary
from rocline.pipeline.simulate import best_groups
from rocline.pipeline.stream import Stream
from rocline.tools.load_protocols import joined_sha256

LOOK_S = 0.02
LEAST_ID = 300  # ids below may be special


class NoWindow(RuntimeError):
    """There was no time in which all streams were decoding."""


class Requests:
    """To one engine that is ready. A request's prompt depends on the seed and on what the request is, not on what ran
    before it.

    say  gets the fields of each line
    """

    def __init__(self, engine: Engine, seed: int, say: Callable[..., None]) -> None:
        self._engine, self._seed, self._say = engine, seed, say
        self._memory = Memory(engine)
        self._model = CostModel(engine.config)

    def submit(self, name: str, n_prompt: int, n_output: int, logits_digest: bool = False) -> Stream:
        """n_prompt random ids, cold; logits_digest as in Request."""
        dice = random.Random(f"{self._seed} {name}")
        ids = dice.choices(range(LEAST_ID, self._engine.config.text_config.vocab_size), k=n_prompt)
        params = SamplingParams(max_tokens=n_output, ignore_eos=True, temperature=0)
        return self._engine.submit(Request(prompt_ids=ids, params=params, logits_digest=logits_digest))

    def prefill(self, n_tokens: int, report_rows: int) -> str:
        """Up to the first id, a line on the way every report_rows rows. The output's hash; raises EngineError.

        One id hides much that is wrong, so the hash is of its logits' too.
        """
        self._memory.begin()
        stream, told, next_rows = self.submit(f"prefill {n_tokens}", n_tokens, 1, True), (0, 0.0), report_rows
        while not stream.ended:
            time.sleep(LOOK_S)
            self._memory.look()
            done, now_s = stream.progress.rows_done, time.monotonic() - stream.submitted_s
            if next_rows <= done < n_tokens:
                since = (done - told[0]) / (now_s - told[1])
                self._say(
                    line="rows",
                    prompt_tokens=n_tokens,
                    rows=done,
                    seconds=round(now_s, 3),
                    rows_s=round(done / now_s, 1),
                    rows_s_since_last=round(since, 1),
                )
                told, next_rows = (done, now_s), done - done % report_rows + report_rows
        summary = summary_of(stream)
        assert summary.first_token_s
        assert summary.logits_sha256
        output_sha256 = joined_sha256([summary.output_ids_sha256, summary.logits_sha256])
        self._say(
            line="prefill",
            prompt_tokens=n_tokens,
            seconds=summary.first_token_s,
            tokens_s=n_tokens / summary.first_token_s,
            output_sha256=output_sha256,
            **self._memory.figures(),
        )
        return output_sha256

    def decode(self, n_streams: int, n_context: int, n_output: int) -> str:
        """All streams at once; the window is from the last one's first token to the first one's last.

        The hash of all outputs; raises EngineError, and NoWindow.
        """
        self._memory.begin()
        streams = self.decoding(n_streams, n_context, n_output)
        token_s: list[list[float]] = [[] for _ in streams]
        readers = [threading.Thread(target=_read, args=pair) for pair in zip(streams, token_s, strict=True)]
        for reader in readers:
            reader.start()
        while not all(stream.ended for stream in streams):
            time.sleep(LOOK_S)
            self._memory.look()
        for reader in readers:
            reader.join()
        output_sha256 = joined_sha256([summary_of(stream).output_ids_sha256 for stream in streams])
        start_s, end_s = max(times[0] for times in token_s), min(times[-1] for times in token_s)
        if end_s <= start_s:
            raise NoWindow(
                f"{n_streams} streams of {n_context} + {n_output} tokens never decoded at the same time; raise "
                "kv_tokens or --output-tokens"
            )
        n_tokens = sum(start_s < at_s <= end_s for times in token_s for at_s in times)
        self._say(
            line="decode",
            streams=n_streams,
            context=n_context,
            output_tokens=n_output,
            seconds=end_s - start_s,
            tokens_s=n_tokens / (end_s - start_s),
            output_sha256=output_sha256,
            modelled_a_step=self._step(n_streams),
            **self._memory.figures(),
        )
        return output_sha256

    def decoding(self, n_streams: int, n_context: int, n_output: int) -> list[Stream]:
        """Streams that will decode together."""
        return [self.submit(f"decode {n_context} {number}", n_context, n_output) for number in range(n_streams)]

    def step_rows(self, n_streams: int) -> int:
        """Of the largest group of so many streams."""
        groups = self._engine.options.groups or best_groups(self._model, self._engine.placement, n_streams)
        return -(-n_streams // groups)

    def _step(self, n_streams: int) -> dict[str, float]:
        """Rows of a step, and what it reads if they choose their experts independently: of each layer's experts, and
        of weights in all."""
        model, n_rows = self._model, self.step_rows(n_streams)
        costs = (*model.layers, model.head)
        touched = [1 - (1 - cost.chosen_share) ** n_rows for cost in costs]
        read = sum(cost.read_bytes + part * cost.expert_bytes for cost, part in zip(costs, touched, strict=True))
        read += sum(cost.read_bytes for cost in model.sides.values())
        experts = touched[0] * self._engine.config.text_config.n_routed_experts
        return {"rows": n_rows, "experts_a_layer": round(experts, 2), "weight_bytes": round(read)}


def summary_of(stream: Stream) -> Summary:
    """Of a stream, at its end. Raises EngineError for one that failed."""
    for _ in stream:
        pass
    assert stream.summary
    return stream.summary


def _read(stream: Stream, times: list[float]) -> None:
    """The moment of each token."""
    with suppress(EngineError):  # whoever asks for the summary hears of it
        for update in stream:
            times += [time.monotonic()] * len(update.ids)


class Memory:
    """Of an engine's devices: what has been allocated since it was ready, and how full they were in a request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        n_devices = len({stage.device for stage in engine.placement.stages})
        self._devices = devices()[:n_devices] if engine.options.device == "hip" else ()
        self._ready = self._counts()
        self.begin()

    def begin(self) -> None:
        """A request comes."""
        self._began_s, self._peak_bytes = time.monotonic(), dict[int, int]()
        self._busy_s = [stage.busy_s for stage in self._engine.stats().stages]
        self.look()

    def look(self) -> None:
        for device, memory in enumerate(self._engine.headroom.readings()):
            if memory.free_bytes is not None:
                used_bytes = memory.total_bytes - memory.free_bytes
                self._peak_bytes[device] = max(self._peak_bytes.get(device, 0), used_bytes)

    def figures(self) -> dict[str, Any]:
        """Of the request, now that it has ended. On the host peak and headroom are the whole machine's."""
        self.look()
        stages = self._engine.stats().stages
        return {
            "peak_bytes": list(self._peak_bytes.values()),
            "least_headroom_bytes": self._engine.headroom.minimum_since(self._began_s),
            "device_allocs": self._since_ready(),
            "arena_high_water_bytes": [stage.arena.high_water_bytes for stage in stages],
            "busy_s": [round(stage.busy_s - before, 3) for stage, before in zip(stages, self._busy_s, strict=True)],
        }

    def _since_ready(self) -> dict[str, int | None]:
        """Counted three ways: slabs by our driver, segments by torch's allocator, and the most bytes by which a whole
        card's free memory has fallen; None where there is nothing to ask."""
        if not self._devices:
            return dict.fromkeys(("driver", "torch", "card_bytes_fallen"))
        slabs, segments, free_bytes = self._counts()
        was_slabs, was_segments, were_free_bytes = self._ready
        fallen = max(was - now for was, now in zip(were_free_bytes, free_bytes, strict=True))
        by_torch = segments - was_segments if torch_sees_gpus() else None
        return {"driver": slabs - was_slabs, "torch": by_torch, "card_bytes_fallen": max(0, fallen)}

    def _counts(self) -> tuple[int, int, list[int]]:
        memories = [device.memory() for device in self._devices]
        segments = 0
        if self._devices and torch_sees_gpus():
            segments = sum(torch.cuda.memory_stats(d.index).get("num_device_alloc", 0) for d in self._devices)
        return sum(m.n_slabs_ever for m in memories), segments, [m.free_bytes for m in memories]
