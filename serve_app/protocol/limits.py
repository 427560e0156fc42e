"""Bounds and defaults of one request: part of the application's settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from pydantic import Field

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\sA-Z*]+)$")]
"""As browsers write one: a scheme and a host, maybe a port, and nothing behind it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds and defaults of the HTTP API. Raises ValueError on what cannot work."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; a larger one is refused (413) before it is read."""
    max_choices: int = 16
    """Largest n."""
    max_sequences: int = 128
    """Most sequences of one request: prompts times n."""
    refusals_per_minute: int = 600
    """What each tenant, and each address without a key, may be refused before it has to wait. One
    that read a large body counts more (`serve_app.throttling.refusal_limit`)."""
    default_max_tokens: int = 1024
    """Output of a chat call that names no limit, if the context has that much room."""
    default_completion_tokens: int = 16
    """The same for /v1/completions, where OpenAI's documents say 16."""
    default_temperature: float = 1.0
    """For a request that names none. 1 is OpenAI's; small models need 0 to make sense."""
    max_chunk_delay_ms: int = 150
    """With many streams, text waits up to this long to be sent in fewer, larger chunks; 0 sends
    each token at once (`serve_app.http.pacing`)."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the API from a browser, such as https://app.example.com;
    "*" is any. None by default."""

    def __post_init__(self) -> None:
        if not 0 <= self.default_temperature <= 2:
            raise ValueError(
                f"api.default_temperature must lie in [0, 2], not {self.default_temperature}"
            )
        for name, value in asdict(self).items():
            least = 0 if name in ("default_temperature", "max_chunk_delay_ms") else 1
            if isinstance(value, (int, float)) and value < least:
                raise ValueError(f"api.{name} must be at least {least}, not {value}")
