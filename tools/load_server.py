"""`rocline serve` as a child, for commands that want a server of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rocline.tools.load_answer import LoadError
from rocline.tools.load_client import InputError

EXIT_WRONG_INPUT = 2  # of `rocline serve`
END_S = 30.0  # from SIGTERM to SIGKILL
LAST_WORDS_S = 1.0  # for a server that breaks to end
LINE_BYTES = 1 << 20
DRAIN = ("--drain-s", "5")  # whatever still runs then is of no use to anybody


@asynccontextmanager
async def child_server(model: str | Path, settings: Sequence[str]) -> AsyncIterator[str]:
    """The URL of a server over `model` that is ready; it is ended with the context.

    settings: NAME=VALUE, as `rocline serve` knows them. Raises InputError if it refuses its settings or its model,
    LoadError if it does not start for another reason; a LoadError of the context goes on with the server's last words,
    where it has ended by itself.
    """
    flags = [word for setting in settings for word in (f"--{_flag(setting)}", setting.partition("=")[2])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rocline.tools.cli", "serve", *DRAIN, *flags, "--model", str(model), "--port", "0"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert process.stderr
    last: deque[str] = deque(maxlen=1)
    following: asyncio.Future[None] | None = None
    try:
        url = await _url(process.stderr, last)
        if url is None:
            status = await process.wait()
            kind = InputError if status == EXIT_WRONG_INPUT else LoadError
            raise kind(f"the server did not start: {''.join(last) or f'exit status {status}'}")
        following = asyncio.ensure_future(_follow(process.stderr, last))
        try:
            yield url
        except LoadError as error:
            if not (await asyncio.wait([following], timeout=LAST_WORDS_S))[0]:
                raise
            raise LoadError(f"{error}; the server has ended: {''.join(last)}") from error
    finally:
        await _end(process)
        if following:
            await following


def _flag(setting: str) -> str:
    return setting.partition("=")[0].replace("_", "-")


async def _url(lines: asyncio.StreamReader, last: deque[str]) -> str | None:
    """From its log's line "start"; None if it ends before."""
    async for line in lines:
        last.append(line.decode("utf-8", "replace").strip())
        with suppress(ValueError, TypeError, KeyError):
            event = json.loads(line)
            if event["event"] == "start":
                return str(event["url"])
    return None


async def _follow(lines: asyncio.StreamReader, last: deque[str]) -> None:
    """Read on: a full pipe would stop the server."""
    async for line in lines:
        last.append(line.decode("utf-8", "replace").strip())


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
