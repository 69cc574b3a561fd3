"""How the server behaves, as opposed to the engine behind it (pipeline/options.py). Design.md section 9."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES_PER_TOKEN = 32  # a token's id is 8 bytes of JSON at most, the longest common texts 25 a token
BODY_BYTES_BESIDE = 1 << 20  # fields other than the prompt


def body_limit(context: int) -> int:
    """Bytes of a request body that can hold any prompt of `context` tokens (case B01)."""
    return BODY_BYTES_PER_TOKEN * context + BODY_BYTES_BESIDE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    host, port          where to listen; port 0: any free one
    served_name         the model's name in answers
    aliases             other names that requests may use
    any_model           requests may use any name
    api_key_file        keys, one a line; with ROCLINE_API_KEYS (separated by commas) unset too, no key is asked for
    thinking            chat requests that do not say otherwise think first
    workers             processes that parse and tokenise large bodies
    idle_timeout_s      for a connection to send its next request, whole headers included
    body_timeout_s      without a byte of an unfinished body
    write_timeout_s     for a client that reads nothing while its buffers are full; its requests are then cancelled
    progress_timeout_s  of an admitted request without a row or token; 0: none. Slow is no reason, only standing still
    request_timeout_s   of a request from its arrival to its end; 0: none
    drain_s             after SIGTERM, for requests to end
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str = "deepseek-ai/DeepSeek-V4.1-Flash"
    aliases: tuple[str, ...] = ("DeepSeek-V4.1-Flash",)
    any_model: bool = False
    api_key_file: str | None = None
    thinking: bool = True
    workers: int = 2
    idle_timeout_s: float = 75
    body_timeout_s: float = 30
    write_timeout_s: float = 60
    progress_timeout_s: float = 600
    request_timeout_s: float = 0
    drain_s: float = 60

    def __post_init__(self) -> None:
        """Raises ValueError naming the setting, its value and the range."""
        for name, low, high in (
            ("port", 0, 65_535),
            ("workers", 1, 64),
            ("idle_timeout_s", 0.1, 86_400),
            ("body_timeout_s", 0.1, 86_400),
            ("write_timeout_s", 0.1, 86_400),
            ("progress_timeout_s", 0, 10**7),
            ("request_timeout_s", 0, 10**7),
            ("drain_s", 0, 86_400),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} = {value}: must be {low} to {high}")
        if not self.served_name:
            raise ValueError("served_name is empty; name the model as clients shall call it")
