"""What a client is told when its request is refused or fails: OpenAI's error body (io.md section 5.1)."""

from __future__ import annotations

import math
from typing import Any

import msgspec

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "overloaded_error",
    503: "overloaded_error",
    500: "internal_error",
}


class ApiError(Exception):
    """A request ends here: `status` before the first byte of the answer, the same body as an event after it.

    Crosses processes, so everything is in `args`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, message, param, code, retry_after_s)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s
        self.type = _TYPES.get(status, "invalid_request_error")
        self.code = code or self.type

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        # OpenAI's client would repeat these by itself, long prefill and all (case B08).
        return {"X-Should-Retry": "false"} if self.status >= 500 else {}

    def body(self) -> bytes:
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event_body(self) -> bytes:
        """The same once an answer has begun: its code is the status that can no longer be sent."""
        return msgspec.json.encode({"error": {"message": self.message, "type": self.type, "code": self.status}})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)
