"""An HTTP client that measures: finds out what a server speaks, sends it a request, notes when each token came.

Any server of OpenAI's or SGLang's kind will do. What counts of an answer is in load_answer.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import aiohttp
import msgspec

from rocline.tools.files import read_text
from rocline.tools.load_answer import Answer, LoadError, NativeRecorder, OpenAiRecorder, Recorder
from rocline.tools.sse import SseReader

Api = Literal["openai", "sglang"]
APIS: tuple[Api, ...] = get_args(Api)
CONNECT_S, CONTROL_S = 10.0, 60.0  # to connect; for an answer that takes no model
QUIET_S = 10.0  # for a server to let go of a request whose last byte it has sent
RETRY_AFTER_S = 1.0  # where the server does not say, in seconds
REASON_CHARS = 300
DONE = "[DONE]"


class InputError(ValueError):
    """What the caller asked for cannot be: nothing was measured."""


class HttpError(LoadError):
    """A status other than 200, and when the server wants to be asked again."""

    def __init__(self, status: int, message: str, retry_after_s: float) -> None:
        super().__init__(f"HTTP {status}: {message[:REASON_CHARS]}")
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True)
class Ask:
    """
    prompt  token ids, sent as they are and answered past end tokens; or text, which goes as a chat's one message
            (OpenAI) or as it is (SGLang), and whose answer may end early
    """

    prompt: str | Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class ServerInfo:
    """
    api      what requests are sent in
    model    its name in requests
    context  tokens of prompt and output together, where it tells
    folder   of its model, on its machine, where it tells
    about    what it tells of itself, for the record
    """

    url: str
    api: Api
    model: str
    context: int | None
    folder: str | None
    about: dict[str, Any]


class LoadClient:
    """Of one server, over connections that are kept."""

    def __init__(self, session: aiohttp.ClientSession, server: ServerInfo) -> None:
        self.server, self._session = server, session

    async def ask(self, ask: Ask, on_comment: Callable[[str], object] = lambda text: None) -> Answer:
        """Send a request and read its answer to the end. Raises LoadError."""
        path, body = _request(self.server, ask)
        recorder: Recorder
        data = msgspec.json.encode(body)
        sent_s = time.perf_counter()
        recorder = (NativeRecorder if self.server.api == "sglang" else OpenAiRecorder)(sent_s)
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            async with self._session.post(self.server.url + path, data=data, headers=headers) as response:
                if response.status != 200:
                    raise await _refusal(response)
                await _read(response, recorder, on_comment)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadError(reason(error)) from error
        return recorder.answer(time.perf_counter())

    async def flush(self) -> bool:
        """Empty the server's prefix cache; False where it has no such route. Raises LoadError if it stays busy."""
        deadline_s = time.monotonic() + QUIET_S
        while True:
            try:
                return await self._control("/flush_cache")
            except HttpError as error:
                if error.status != 400 or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(0.05)

    async def freeze_gc(self) -> bool:
        """Have the server collect its garbage and freeze what is left; False where it has no such route."""
        return await self._control("/freeze_gc")

    async def _control(self, path: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=CONTROL_S)
            async with self._session.post(self.server.url + path, timeout=timeout) as response:
                if response.status in (200, 404, 405):
                    return response.status == 200
                raise await _refusal(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadError(f"{path}: {reason(error)}") from error


def _request(server: ServerInfo, ask: Ask) -> tuple[str, dict[str, Any]]:
    is_text = isinstance(ask.prompt, str)
    if server.api == "sglang":
        sampling = {"max_new_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": not is_text}
        prompt = {"text" if is_text else "input_ids": ask.prompt}
        return "/generate", prompt | {"sampling_params": sampling, "stream": True}
    usage: dict[str, Any] = {"include_usage": True}
    body = {"model": server.model, "max_tokens": ask.output_tokens, "temperature": 0, "stream": True}
    if is_text:
        messages = [{"role": "user", "content": ask.prompt}]
        return "/v1/chat/completions", body | {"messages": messages, "stream_options": usage}
    usage["continuous_usage_stats"] = True  # servers that do not know it ignore it
    return "/v1/completions", body | {"prompt": ask.prompt, "ignore_eos": True, "stream_options": usage}


async def _read(response: aiohttp.ClientResponse, recorder: Recorder, on_comment: Callable[[str], object]) -> None:
    reader = SseReader()
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for item in reader.feed(chunk):
            if item.is_comment:
                on_comment(item.text)
            elif item.text == DONE:
                return
            else:
                recorder.take(_object(item.text), now_s)
    raise LoadError("the answer ended without [DONE]")


def _object(text: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise LoadError(f"an event is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise LoadError(f"an event is no JSON object: {text[:REASON_CHARS]}")
    return event


async def _refusal(response: aiohttp.ClientResponse) -> HttpError:
    text = await response.text(errors="replace")
    try:
        message = msgspec.json.decode(text)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = text.strip() or response.reason
    after = response.headers.get("Retry-After", "")
    return HttpError(response.status, str(message), float(after) if after.isdecimal() else RETRY_AFTER_S)


def reason(error: Exception) -> str:
    """Why a request failed, in words that are the same each time."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, TimeoutError):
        return "the server was silent for longer than the read time-out"
    if isinstance(error, aiohttp.ClientConnectorError):
        errno = error.os_error.errno or 0  # negative: the resolver's own
        return f"cannot connect: {os.strerror(errno) if errno > 0 else error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | aiohttp.ClientOSError):
        return "the connection broke"
    return f"{type(error).__name__}: {error}"


def key_in(file: str) -> str:
    """A server's key: the file's first line. Raises FileError and InputError."""
    key = read_text(file).partition("\n")[0].strip()
    if not key:
        raise InputError(f"{file}: its first line is empty; write the key there")
    return key


@asynccontextmanager
async def open_client(
    url: str,
    *,
    apis: Sequence[Api],
    model: str | None = None,
    api_key: str | None = None,
    read_timeout_s: float,
) -> AsyncIterator[LoadClient]:
    """A client that speaks the first of `apis` that the server does.

    model: its name in requests, the first that the server lists if None. read_timeout_s: without a single byte.
    Raises InputError for a server of another kind, LoadError for one that cannot be reached.
    """
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_S, sock_read=read_timeout_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield LoadClient(session, await _find_out(session, url.rstrip("/").removesuffix("/v1"), apis, model))


async def _find_out(session: aiohttp.ClientSession, url: str, apis: Sequence[Api], model: str | None) -> ServerInfo:
    native = await _told(session, url + "/model_info") or await _told(session, url + "/get_model_info")
    listed = await _told(session, url + "/v1/models")
    models = [entry for entry in (listed or {}).get("data") or () if isinstance(entry, dict)]
    spoken = {"sglang": "model_path" in (native or {}), "openai": bool(models)}
    if not (api := next((api for api in apis if spoken[api]), None)):
        raise InputError(
            f"{url} does not speak {' or '.join(apis)}: a server of OpenAI's kind lists its models at /v1/models, "
            "one of SGLang's answers /model_info or /get_model_info"
        )
    names = [entry.get("id") for entry in models]
    entry = models[names.index(model)] if model in names else models[0] if models else {}
    about = {
        "model": native or entry,
        "version": await _told(session, url + "/version"),
        "server_info": await _told(session, url + "/server_info") or await _told(session, url + "/get_server_info"),
    }
    return ServerInfo(
        url=url,
        api=api,
        model=model or entry.get("id") or "",
        context=entry.get("max_model_len"),
        folder=(native or {}).get("tokenizer_path") or (native or {}).get("model_path"),
        about={name: told for name, told in about.items() if told},
    )


async def _told(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object at url, None where there is none. Raises LoadError without a server, InputError without a key."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=CONTROL_S, sock_connect=CONNECT_S)) as response:
            if response.status in (401, 403):
                raise InputError(f"{url}: HTTP {response.status}; give the server's key with --api-key-file")
            told = msgspec.json.decode(await response.read()) if response.status == 200 else None
    except msgspec.DecodeError:
        return None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise InputError(f"{url}: not the URL of a server, as http://127.0.0.1:8000 is") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"{url}: {reason(error)}") from error
    return told if isinstance(told, dict) else None
