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
    host                Address to listen on.
    port                Port to listen on. 0: any free one, which the line `listening` of the log tells.
    served_name         The model's name in answers.
    aliases             Other names of the model that requests may use.
    any_model           Whether requests may use any name for the model.
    api_key_file        File of API keys, one a line. Unset, and ROCLINE_API_KEYS too: no key is asked for.
    thinking            Whether chat requests that say nothing of it think before they answer.
    workers             Processes that parse and tokenise large bodies.
    idle_timeout_s      Seconds that a connection has to send its next request's headers, whole.
    body_timeout_s      Seconds that may pass without a byte of an unfinished body.
    write_timeout_s     Seconds that a client may read nothing while its buffers are full. Its requests are then
                        cancelled.
    progress_timeout_s  Seconds that an admitted request may stand still, without a prompt token or an output token
                        done. Slow is no reason to end it. 0: no limit.
    request_timeout_s   Seconds that a request may take from its arrival to its end. 0: no limit.
    drain_s             Seconds that requests have to end after SIGTERM.
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
