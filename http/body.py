"""Reading request bodies: bounded in bytes and in the time without one (case B01)."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rocline.http.errors import ApiError


async def read_body(request: web.Request, limit_bytes: int, timeout_s: float) -> bytes:
    """All of it. Raises ApiError: 413 beyond the limit, from the header alone where it says so; 408 for silence."""
    # Not aiohttp's own limit: that one knows no error body, and refuses a body of exactly its size.
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    n_bytes = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                part = await request.content.readany()
        except web.RequestPayloadError:
            raise ApiError(400, "the body breaks off, or is not encoded as its header says") from None
        except TimeoutError:
            raise ApiError(408, f"no byte of the body in {timeout_s:g} s", code="request_timeout") from None
        if not part:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        n_bytes += len(part)
        if n_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes} bytes, enough for any prompt", code="body_too_large")
