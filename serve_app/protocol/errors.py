"""Errors as OpenAI's API shows them: {"error": {message, type, param, code}}.

Everything that a client can be told passes through `ApiError`. Its message is ours: it never
repeats what the client sent, and never says what an internal exception said. The module does
not know which endpoint failed.
"""

from __future__ import annotations

import logging
import math

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from replica.messages import TOO_COMPLEX
from router.messages import RefusalKind
from serve_app.protocol.backend import EngineFailure, Refused, Stopped, Unavailable
from serve_app.telemetry import records

logger = logging.getLogger(__name__)

MAX_ENTRIES = 10
"""Validation errors told at once."""
MAX_MESSAGE = 640
"""Characters of a message; whatever has to be escaped, the body stays below 4 KB."""

NO_SUCH_URL = (
    "There is no such URL. This server has /v1/chat/completions, /v1/completions and /v1/models "
    "of OpenAI's API."
)
"""Many clients ask for other endpoints by default, or leave /v1 out."""

_REFUSALS = {
    RefusalKind.RATE: 429,
    RefusalKind.BUDGET: 429,
    RefusalKind.TOO_DEAR: 400,
    RefusalKind.OVERLOAD: 503,
    RefusalKind.DEADLINE: 504,
}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is not a success. `param` names a field of ours, never one of a client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.code == RefusalKind.BUDGET:
            return "insufficient_quota"
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return _KINDS.get(self.status, default)

    def body(self) -> bytes:
        """The JSON body; also the payload of an error event inside a stream."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return _ErrorAnswer(self)


class _ErrorAnswer(Response):
    """Its request's record notes it once it is sent: some are made in advance."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        records.current().error = self._error
        await super().__call__(scope, receive, send)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is at fault: 400."""
    return ApiError(400, message, param=param, code=code)


def too_long(prompt_tokens: int | str, max_model_len: int, param: str) -> ApiError:
    """A prompt that leaves no room for a token of output."""
    message = (
        f"This model's context holds {max_model_len} tokens, prompt and output together. "
        f"The prompt has {prompt_tokens} tokens, and the output needs at least one."
    )
    return invalid(message, param, "context_length_exceeded")


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds of at least one."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def from_validation(error: ValidationError) -> ApiError:
    """The first entries of pydantic's list, without the input that it would show."""
    entries = error.errors(include_url=False, include_input=False)[:MAX_ENTRIES]
    told = [_told(entry["loc"], entry["msg"]) for entry in entries]
    first = entries[0]
    param = first.get("ctx", {}).get("param") or _path(first["loc"]) or None
    code = first["type"] if first["type"] == "unsupported_parameter" else None
    return invalid("; ".join(told), param, code)


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))


def _told(loc: tuple[int | str, ...], message: str) -> str:
    return f"{_path(loc)}: {message}" if loc else message


def from_exception(error: Exception) -> ApiError:
    """What a client is told about any exception; one that is nobody's plan is logged."""
    match error:
        case ApiError():
            return error
        case Refused() | Unavailable() | Stopped():
            return _from_refusal(error)
        case HTTPException():
            return _from_routing(error)
        case EngineFailure():
            return _from_loss(error)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed while it processed the request.", code="server_error")


def _from_refusal(error: Refused | Unavailable | Stopped) -> ApiError:
    if isinstance(error, Stopped):
        return ApiError(403, error.reason, code=error.code)
    headers = retry_after(error.retry_after_s)
    if isinstance(error, Unavailable):
        return ApiError(503, error.reason, code="unavailable", headers=headers)
    status = _REFUSALS[error.kind]
    headers = {} if status == 400 else headers
    return ApiError(status, error.reason, code=error.kind.value, headers=headers)


def _from_loss(error: EngineFailure) -> ApiError:
    """A sequence that ended early: mostly not by what its client asked for."""
    if str(error) == TOO_COMPLEX:
        return invalid("The grammar became too complex to follow.", code="grammar_too_complex")
    logger.error("a sequence was lost: %s", error)
    return ApiError(500, "The engine failed while it generated.", code="engine_failure")


def _from_routing(error: HTTPException) -> ApiError:
    """404 and 405 of the router; its own texts are not OpenAI's."""
    messages = {404: NO_SUCH_URL, 405: "This URL does not allow the method."}
    message = messages.get(error.status_code, "The request cannot be served.")
    return ApiError(error.status_code, message, headers=dict(error.headers or {}))


def install(app: FastAPI) -> None:
    """Make `app` answer every exception in this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        return from_exception(error).response()

    for kind in (ApiError, Refused, Stopped, Unavailable, HTTPException):
        app.add_exception_handler(kind, answer)
