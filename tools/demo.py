"""`rocline demo`: serve the small checkpoint, show one long request and what holds of its answer, then stay up."""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rocline.arena.replay import plan as plan_slab
from rocline.arena.replay import replay
from rocline.arena.report import report_html
from rocline.arena.trace import Recorder
from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.model import Model
from rocline.engine.release import release_config
from rocline.engine.shards import CheckpointError
from rocline.engine.text import TextTokenizer, TokenizerError
from rocline.http.settings import Settings
from rocline.pipeline.engine import Engine
from rocline.pipeline.options import Options
from rocline.pipeline.plan import GIB, KV_TOKENS, make_plan
from rocline.pipeline.plan import Request as PlanRequest
from rocline.pipeline.request import Request
from rocline.pipeline.stats import State
from rocline.pipeline.stream import Stream
from rocline.pipeline.timeline import draw, save
from rocline.tools.files import explained
from rocline.tools.flags import whole
from rocline.tools.plan import memory_lines
from rocline.tools.serve import cannot_listen, serve

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130
TOKENS, LONG_TOKENS = 4096, 16_384
TEMPLATE_TOKENS = 37  # around the document in a chat prompt
CANDIDATE_TOKENS = 768  # compared with all blocks allowed; the demo's model keeps 512 positions
OUTPUT_TOKENS = 12
SEED = 20_261_129
LIGHTS_PER_S = 8
NO_TERMINAL_WIDTH = 120
HOLD_S = 900.0  # for one request, at most
END_S = 1.0  # for the show, once its server has ended
SERVED = Options(stages=4, chunk_rows=1024, running=4, context=32_768)
OTHER = Options(stages=3, placement="contiguous", chunk_rows=500, running=4, context=32_768)


class DemoError(RuntimeError):
    """Something did not come out as it must; the message says what."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        description="Serve a small checkpoint, show one long request and what holds of its answer, then serve until "
        "Ctrl-C. `rocline demo-checkpoint` makes such a checkpoint. Exit status 1: something did not come out as it "
        "must, 2: wrong input.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument("--once", action="store_true", help="end after the show")
    parser.add_argument("--long", action="store_true", help=f"send {LONG_TOKENS:,} tokens in place of {TOKENS:,}")
    # Not 0, which `serve` takes for any: the show must know where its client goes.
    parser.add_argument(
        "--port", type=whole(1, 65535), default=8000, metavar="N", help="where to listen (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="FOLDER",
        help="where pictures and the log go; made if absent (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        config = ModelConfig.load(args.model)
        tokenizer = TextTokenizer.load(args.model, config.text_config.vocab_size)
        args.out.mkdir(parents=True, exist_ok=True)
        log = (args.out / "serve.log").open("w")
    except (ConfigError, TokenizerError, OSError) as error:
        print(f"demo: {explained(error)}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    show = _Show(args, _document(tokenizer, LONG_TOKENS if args.long else TOKENS))
    settings = Settings(port=args.port, drain_s=5)
    try:
        with log, redirect_stderr(log):  # the server's JSON lines would run through the lights
            status = serve(str(args.model), settings, SERVED, (), show.open_engine)
    except OSError as error:
        print(f"demo: {cannot_listen(settings, error)}; choose another with --port", file=sys.stderr)
        return EXIT_WRONG_INPUT
    if show.refused:
        print(f"demo: {show.refused}", file=sys.stderr)
        return EXIT_WRONG_INPUT if isinstance(show.refused, CheckpointError) else EXIT_FAILED
    if show.is_running():  # perhaps inside torch, which the interpreter's end would take away under it: a crash
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)
    return EXIT_INTERRUPTED if show.was_stopped else show.status or status


def _document(tokenizer: TextTokenizer, n_tokens: int) -> str:
    """The beginning of Python's own reference, in English, as long as n_tokens."""
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer.encode(text[: 8 * n_tokens])
    return tokenizer.decode(ids[: n_tokens - TEMPLATE_TOKENS])


class _Show:
    """What the demo shows, in a thread beside the server, whose engine it watches."""

    def __init__(self, args: argparse.Namespace, document: str) -> None:
        self.status = 0
        self.refused: Exception | None = None  # why there is no engine
        self._thread: threading.Thread | None = None
        self.was_stopped = False  # by Ctrl-C, before its end
        self._model, self._out, self._once = args.model, args.out, args.once
        self._url = f"http://127.0.0.1:{args.port}"
        self._document = document
        self._console = Console(
            highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH
        )
        self._streams: list[Stream] = []

    def say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=True)

    def open_engine(self) -> Engine:
        """The server's engine; the show begins with it."""
        try:
            engine = Engine.open(self._model, SERVED)
        except Exception as error:
            self.refused = error
            raise
        submit = engine.submit

        def remembering(request: Request) -> Stream:
            self._streams.append(submit(replace(request, logits_digest=True)))
            return self._streams[-1]

        engine.submit = remembering  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, args=(engine,), name="demo", daemon=True)
        self._thread.start()
        return engine

    def is_running(self) -> bool:
        """Whether the show, or the engine's start, goes on; waits a moment for its end."""
        if self._thread is None:
            return True
        self._thread.join(END_S)
        return self._thread.is_alive()

    def _run(self, engine: Engine) -> None:
        try:
            self._plan()
            self._request(engine)
            self._one_answer(engine)
            self._candidates(engine)
            self._end()
        except Exception as error:  # whatever it is, the user hears of it and the status says so
            if engine.stats().state in (State.DRAINING, State.CLOSED):  # Ctrl-C
                self.was_stopped = True
                return
            self.say("", f"FAILED: {type(error).__name__}: {error}; the server's log is {self._out / 'serve.log'}")
            self.status = EXIT_FAILED
        if self._once or self.status:
            os.kill(os.getpid(), signal.SIGTERM)

    def _plan(self) -> None:
        config = release_config()
        context = config.text_config.max_position_embeddings
        found = make_plan(config, PlanRequest(8, 48 * GIB, 8, "folded", context, KV_TOKENS, 1024))
        self.say("1. The released model on eight 48 GiB cards, as `rocline plan --release` has it:")
        self.say(*memory_lines(found), "")

    def _request(self, engine: Engine) -> None:
        """The document through the OpenAI client."""
        self._wait_ready()
        recorder = engine.record_arena(stage=0)
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=HOLD_S, max_retries=0)
        self.say(
            "2. Python's reference manual, through the OpenAI client. Its weights are random: its answer is noise."
        )
        began_s = time.monotonic()
        with self._lights(engine):
            chunks = client.chat.completions.create(
                model=Settings().served_name,
                messages=[{"role": "user", "content": self._document}],
                max_tokens=OUTPUT_TOKENS,
                seed=SEED,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            pieces = (_text_of(chunk) for chunk in chunks)
            first = next(piece for piece in pieces if piece)
            ttft_s = time.monotonic() - began_s
        n_tokens = len(self._streams[-1].request.prompt_ids)
        rate = n_tokens / ttft_s
        self.say("", f"   {n_tokens:,} tokens; first answer after {ttft_s:.1f} s, {rate:,.0f} token/s on this CPU")
        self.say("   the answer: " + repr(first + "".join(pieces)), "")
        self._pictures(engine, recorder)

    def _wait_ready(self) -> None:
        end_s = time.monotonic() + HOLD_S
        while time.monotonic() < end_s:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise DemoError(f"{self._url}/health did not answer 200 in {HOLD_S:.0f} s")

    @contextmanager
    def _lights(self, engine: Engine) -> Iterator[None]:
        """Rows done and the stages at work, until the body ends. A line now and then where there is no terminal."""
        stop = threading.Event()

        def picture() -> Text:
            done = self._streams[-1].progress if self._streams else None
            lit = "".join("●" if stage.busy else "○" for stage in engine.stats().stages)
            share = done.rows_done / done.rows_total if done else 0.0
            bar = "█" * int(40 * share)
            rows = f"{done.rows_done:,} of {done.rows_total:,} rows" if done else ""
            return Text(f"   stages {lit}  {bar:░<40} {rows}")

        def show() -> None:
            with Live(picture(), console=self._console, refresh_per_second=LIGHTS_PER_S) as live:
                while not stop.wait(1 / LIGHTS_PER_S):
                    live.update(picture())
                live.update(picture())

        thread = threading.Thread(target=show, name="lights", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _pictures(self, engine: Engine, recorder: Recorder) -> None:
        engine.stop_recording(stage=0)
        report = replay(recorder.events, plan_slab(recorder.events).slab_bytes, picture=True)
        (self._out / "arena.html").write_text(report_html(report, "Arena of stage 0 through the demo's request"))
        timeline = engine.timeline()
        (self._out / "timeline.svg").write_text(draw(timeline))
        save(timeline, self._out / "timeline.csv")

    def _one_answer(self, engine: Engine) -> None:
        """The same request again: another chunk size and placement, and beside another request."""
        first = self._streams[-1]
        self.say("3. The same request in other ways. One hash of the ids and one of the logits, or the demo fails:", "")
        table = Table(box=None, padding=(0, 2))
        for title in ("", "stages", "placement", "chunk rows", "ids", "logits", ""):
            table.add_column(title, no_wrap=True)
        prompt_ids = first.request.prompt_ids
        neighbour = Request(prompt_ids=prompt_ids[: len(prompt_ids) // 3], params=first.request.params)
        other = Engine(engine.config, engine.weights, OTHER)
        ways = (
            ("served", SERVED, first),
            ("alone", OTHER, other.submit(first.request)),
            ("beside another", SERVED, _beside(engine, neighbour, first.request)),
        )
        wanted = None
        for name, options, stream in ways:
            for _ in stream:
                pass
            assert stream.summary is not None
            hashes = stream.summary.output_ids_sha256, stream.summary.logits_sha256
            wanted = wanted or hashes
            shown = [str(digest)[:10] for digest in hashes]
            cells = (str(options.stages), options.placement, f"{options.chunk_rows:,}", *shown)
            table.add_row(name, *cells, "OK" if hashes == wanted else "DIFFERENT")
            if hashes != wanted:
                self._console.print(table)
                raise DemoError(f"{name}: another answer, {hashes}, than {wanted}")
        other.close()
        self._console.print(table)
        self.say("")

    def _candidates(self, engine: Engine) -> None:
        """How many selected positions are others than they would be if every block were a candidate."""
        ids = self._streams[0].request.prompt_ids[:CANDIDATE_TOKENS]
        text = engine.config.text_config
        free = replace(text, candidate_topk_blocks=-(-CANDIDATE_TOKENS // text.candidate_block_size))
        kept = _selections(engine, engine.config, ids)
        unbound = _selections(engine, replace(engine.config, text_config=free), ids)
        n_changed = sum(len(set(a) - set(b)) for a, b in zip(kept, unbound, strict=True))
        n_all = sum(map(len, kept))
        if not n_changed:
            raise DemoError("the candidate restriction changed no selection")
        self.say(
            f"4. The candidate restriction at work: of {n_all:,} positions that the last 64 of {CANDIDATE_TOKENS} "
            f"rows select, {n_changed:,} are others than without it.",
            "",
        )

    def _end(self) -> None:
        body = '{"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
        self.say(
            f"Pictures: {self._out / 'arena.html'} (memory of stage 0), {self._out / 'timeline.svg'} (stages at work)",
            f"For `rocline trace timeline`: {self._out / 'timeline.csv'}. The server's log: {self._out / 'serve.log'}",
        )
        if not self._once:
            self.say(
                "Serving until Ctrl-C. Try:",
                f"curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            )


def _text_of(chunk: Any) -> str:
    if not chunk.choices:
        return ""
    delta = chunk.choices[0].delta
    return (getattr(delta, "reasoning_content", None) or "") + (delta.content or "")


def _beside(engine: Engine, neighbour: Request, request: Request) -> Stream:
    engine.submit(neighbour)
    return engine.submit(request)


def _selections(engine: Engine, config: ModelConfig, ids: Any) -> list[list[int]]:
    """What index sources that read candidates select for the last 64 rows, layer by layer and row by row."""
    readers = {role.layer for role in config.text_config.layers if role.has_indexer and role.reads_candidates}
    found: list[list[int]] = []

    def record(layer: int, field: str, value: torch.Tensor) -> None:
        if field == "sel" and layer in readers:
            found.extend([position for position in row if position >= 0] for row in value[-64:].tolist())

    model = Model(config, engine.weights, kv_tokens=CANDIDATE_TOKENS)
    handle = model.open()
    model.prefill(handle, ids, record=record)
    model.close(handle)
    return found
