"""A server of OpenAI's kind that knows no route of rocline or SGLang, and fails the way a test says."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager

from aiohttp import web

WORDS = ["Grüße ", "世界 ", "🙂 "]


class TinyOpenAi:
    """
    bodies       of the requests so far
    step_s       between two tokens
    trouble      None, or what happens to completions; a callable of the request's number: for each its own
    usage_each   usage in every event
    model_info   body of /get_model_info, which there is none of if None
    """

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.step_s = 0.0
        self.trouble: str | Callable[[int], str | None] | None = None
        self.usage_each = False
        self.model_info: str | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}, {"id": "other"}]})

    async def get_model_info(self, request: web.Request) -> web.Response:
        return web.Response(status=404 if self.model_info is None else 200, text=self.model_info)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        trouble = self.trouble(len(self.bodies)) if callable(self.trouble) else self.trouble
        if trouble in ("429", "500"):
            headers = {"Retry-After": "1"} if trouble == "429" else {}
            error = {"error": {"message": f"no room {trouble}"}}
            return web.json_response(error, status=int(trouble), headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if trouble == "silent":
            await asyncio.sleep(60)
        await self._stream(response, body, trouble)
        if trouble == "cut":
            request.transport.abort()
        return response

    async def _stream(self, response: web.StreamResponse, body: dict, trouble: str | None) -> None:
        is_chat = "messages" in body
        n_tokens = body["max_tokens"] - (trouble == "one token less")

        async def send(event: dict | str) -> None:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            encoded = f": thinking\r\n\r\ndata: {data}\r\n\r\n".encode()
            for part in (encoded[:-9], encoded[-9:]):  # through the middle of characters
                await response.write(part)

        n_prompt = len(body["prompt"]) if not is_chat else 11
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_tokens}
        if trouble == "cached":
            usage["prompt_tokens_details"] = {"cached_tokens": 8}
        if is_chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(self.step_s)
        for n in range(1, n_tokens + 1):
            word = "" if trouble == "empty first" and n == 1 else WORDS[n % 3]
            piece = {"delta": {"reasoning_content" if n == 1 else "content": word}} if is_chat else {"text": word}
            so_far = {"usage": usage | {"completion_tokens": n}} if self.usage_each else {"usage": None}
            await send({"choices": [{"index": 0} | piece]} | so_far)
            if n == 2 and trouble == "cut":
                return
            if n == 2 and trouble == "error":
                await send({"error": {"message": "a stage failed", "code": 500}})
                await send("[DONE]")
                return
            await asyncio.sleep(self.step_s)
        if trouble != "no usage":
            await send({"choices": [], "usage": usage})
        if trouble != "no end":
            await send("[DONE]")


@contextmanager
def running_tiny():
    """In a thread with its own event loop."""
    tiny, loop, ready = TinyOpenAi(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", tiny.models)
        app.router.add_get("/get_model_info", tiny.get_model_info)
        app.router.add_post("/v1/completions", tiny.completions)
        app.router.add_post("/v1/chat/completions", tiny.completions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        tiny.port = runner.addresses[0][1]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield tiny
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
