"""The aiohttp application: routes, who may use them, and what a client hears of errors."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from rocline.engine.sampling import SamplingParams
from rocline.http.chat import chat
from rocline.http.completions import completions
from rocline.http.errors import ApiError
from rocline.http.fields import AbortBody, decode
from rocline.http.metrics import CONTENT_TYPE
from rocline.http.native import generate
from rocline.http.openai import progress_of
from rocline.http.prompt import BEGIN
from rocline.http.serving import Serving, freeze_gc, log
from rocline.pipeline.request import EngineError, Request
from rocline.pipeline.stats import State

Handler = Callable[[web.Request, Serving], Awaitable[web.StreamResponse]]
AioHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/health", "/live", "/ready")  # what a supervisor asks, keys or not
PROBE_S = 20.0  # for the one token of /health_generate


def make_app(serving: Serving, api_keys: Sequence[str]) -> web.Application:
    """An application over `serving`. With api_keys, every path but OPEN_PATHS asks for one of them."""
    app = web.Application(middlewares=[_errors(serving), _keys(api_keys)], client_max_size=0)  # body.py has the limit

    def add(methods: str, path: str, handler: Handler) -> None:
        async def bound(request: web.Request) -> web.StreamResponse:
            return await handler(request, serving)

        for method in methods.split():
            app.router.add_route(method, path, bound)

    add("POST", "/v1/chat/completions", chat)
    add("POST", "/v1/completions", completions)
    add("POST", "/generate", generate)
    add("POST", "/tokenize", _tokenize)
    add("POST", "/detokenize", _detokenize)
    add("POST GET", "/flush_cache", _flush_cache)
    add("POST", "/freeze_gc", _freeze_gc)
    add("POST", "/abort_request", _abort_request)
    add("GET", "/v1/models", _models)
    add("GET", "/v1/models/{id:.+}", _model)
    add("GET", "/health", _health)
    add("GET", "/live", _live)
    add("GET", "/ready", _ready)
    add("GET", "/health_generate", _health_generate)
    add("GET", "/metrics", _metrics)
    add("GET", "/version", _version)
    for path in ("/server_info", "/get_server_info"):
        add("GET", path, _server_info)
    for path in ("/model_info", "/get_model_info"):
        add("GET", path, _model_info)
    return app


def _errors(serving: Serving) -> Any:
    @web.middleware
    async def errors(request: web.Request, handler: AioHandler) -> web.StreamResponse:
        """Every error as OpenAI's body. What a handler raises once it has begun to answer ends the connection."""
        try:
            return await handler(request)
        except ApiError as error:
            told = error
        except web.HTTPException as error:
            told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code="not_found")
        except ConnectionError:
            raise  # the client has left
        except Exception as error:
            log("error", route=_route(request), error=type(error).__name__, where=_where(error))
            told = ApiError(500, "the server failed on this request; its log says where")
        serving.metrics.refused(_route(request), told.status)
        return web.Response(status=told.status, body=told.body(), content_type="application/json", headers=told.headers)

    return errors


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource else "unknown"  # a path of the client's making would be a label of its own


def _where(error: BaseException) -> str:
    """File and line of the innermost frame: messages of exceptions may quote what the client sent."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "?"


def _keys(api_keys: Sequence[str]) -> Any:
    keys = [key.encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: AioHandler) -> web.StreamResponse:
        # A page of another site may send requests to a server on its reader's machine, though it cannot read answers.
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "requests from pages of other sites are refused")
        if keys and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
            # All of them, each in constant time: how long it takes tells nothing about any.
            if not sum([hmac.compare_digest(given, key) for key in keys]):
                raise ApiError(401, "no or a wrong API key; send Authorization: Bearer KEY", code="invalid_api_key")
        return await handler(request)

    return check


def _json(value: Any, status: int = 200) -> web.Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


async def _tokenize(request: web.Request, serving: Serving) -> web.Response:
    return _json(await serving.prepare(request, "tokenize"))


async def _detokenize(request: web.Request, serving: Serving) -> web.Response:
    return _json(await serving.prepare(request, "detokenize"))


async def _flush_cache(request: web.Request, serving: Serving) -> web.Response:
    """Nothing is kept between requests, so there is nothing to empty; who asks wants to know that it is quiet."""
    if n_busy := sum(not job.ended for job in serving.jobs.values()):
        raise ApiError(400, f"{n_busy} requests run or wait; flush when there are none", code="busy")
    return web.Response(text="Cache flushed.\n")


async def _freeze_gc(request: web.Request, serving: Serving) -> web.Response:
    freeze_gc()
    return web.Response(text="Garbage collected and frozen.\n")


async def _abort_request(request: web.Request, serving: Serving) -> web.Response:
    """Known or not, ended or not: 200."""
    body = await serving.read(request)
    fields = decode(body, AbortBody)
    for id, job in list(serving.jobs.items()):
        if fields.abort_all or id == fields.rid:
            job.abort(ApiError(400, "the request was aborted by /abort_request", code="aborted"), "abort")
    return _json({})


def _model_object(serving: Serving) -> dict[str, Any]:
    settings, created = serving.settings, int(serving.started_s)
    owner = {"id": settings.served_name, "object": "model", "created": created, "owned_by": "rocline"}
    return owner | {"max_model_len": serving.context}


async def _models(request: web.Request, serving: Serving) -> web.Response:
    return _json({"object": "list", "data": [_model_object(serving)]})


async def _model(request: web.Request, serving: Serving) -> web.Response:
    serving.check_model(request.match_info["id"])
    return _json(_model_object(serving))


async def _live(request: web.Request, serving: Serving) -> web.Response:
    return web.Response()


async def _health(request: web.Request, serving: Serving) -> web.Response:
    return web.Response(status=200 if serving.state is State.READY else 503)


async def _ready(request: web.Request, serving: Serving) -> web.Response:
    stats = serving.stats()
    told = {"state": serving.state.value, "reason": stats.reason if stats else ""}
    return _json(told, 200 if serving.state is State.READY else 503)


async def _health_generate(request: web.Request, serving: Serving) -> web.Response:
    """One real token through all stages."""
    ids, params = [serving.pool.markers.ids[BEGIN]], SamplingParams(temperature=0, max_tokens=1)
    try:
        stream = serving.ready_engine().submit(Request(prompt_ids=ids, params=params))
        try:
            async with asyncio.timeout(PROBE_S):
                async for update in stream:
                    if update.ids:
                        return web.Response()
        finally:
            stream.cancel()
    except (TimeoutError, EngineError) as error:
        raise ApiError(503, f"no token: {error or 'none in time'}", code="not_healthy", retry_after_s=5) from error
    raise ApiError(503, "no token", code="not_healthy", retry_after_s=5)


async def _metrics(request: web.Request, serving: Serving) -> web.Response:
    return web.Response(body=serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _version(request: web.Request, serving: Serving) -> web.Response:
    return _json({"version": version("rocline")})


async def _server_info(request: web.Request, serving: Serving) -> web.Response:
    stats, engine = serving.stats(), serving.engine
    return _json(
        _paths(serving)
        | {
            "version": version("rocline"),
            "state": serving.state.value,
            "max_total_num_tokens": stats.n_pages * stats.page_positions if stats else None,
            "max_running_requests": stats.running_limit if stats else None,
            "options": asdict(engine.options) if engine else None,
            "uptime_s": time.time() - serving.started_s,
            "requests": [
                {"id": job.ids[0]} | progress_of(choice, job.eta_s(choice))
                for job in dict.fromkeys(serving.jobs.values())  # where each stands once for every id of it
                for choice in job.choices
                if not choice.stream.ended
            ],
        }
    )


async def _model_info(request: web.Request, serving: Serving) -> web.Response:
    return _json(_paths(serving) | {"is_generation": True, "max_model_len": serving.context})


def _paths(serving: Serving) -> dict[str, Any]:
    folder = serving.folder
    return {"model_path": folder, "tokenizer_path": folder, "served_model_name": serving.settings.served_name}
