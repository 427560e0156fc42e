from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from replica.messages import TOO_COMPLEX
from serve_app.protocol.backend import EngineFailure, Refused, Unavailable
from serve_app.protocol.errors import (
    ApiError,
    from_exception,
    from_validation,
    invalid,
    retry_after,
)
from serve_app.protocol.requests import ChatRequest


def test_an_error_has_openais_shape() -> None:
    body = json.loads(invalid("no", "n", "bad").body())
    assert body == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "bad"}
    }


@pytest.mark.parametrize("character", ["a", '"', "\\", "\n", "\x01"])
def test_no_body_is_larger_than_4_kilobytes(character: str) -> None:
    """C26."""
    error = invalid(character * 10_000)
    assert len(error.body()) <= 4096


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (invalid("no"), 400, "invalid_request_error"),
        (ApiError(401, "no"), 401, "authentication_error"),
        (HTTPException(404, "Not Found"), 404, "invalid_request_error"),
        (HTTPException(405), 405, "invalid_request_error"),
        (Refused("slow down", 0.2), 429, "rate_limit_error"),
        (Unavailable(0.2), 503, "server_error"),
        (EngineFailure("CUDA"), 500, "server_error"),
        (EngineFailure(TOO_COMPLEX), 400, "invalid_request_error"),
        (KeyError("secret"), 500, "server_error"),
    ],
)
def test_every_exception_has_a_status(error: Exception, status: int, kind: str) -> None:
    told = from_exception(error)
    assert (told.status, told.kind) == (status, kind)
    assert not {"CUDA", "secret"} & set(told.message.split())


def test_the_header_of_the_router_stays() -> None:
    error = HTTPException(405, headers={"Allow": "POST"})
    assert from_exception(error).response().headers["allow"] == "POST"


@pytest.mark.parametrize(("seconds", "header"), [(0, "1"), (0.2, "1"), (1, "1"), (1.01, "2")])
def test_retry_after_is_in_whole_seconds(seconds: float, header: str) -> None:
    """R40."""
    assert retry_after(seconds) == {"Retry-After": header}


def test_validation_names_the_field_and_not_the_value() -> None:
    """C26."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(
            {"model": "m", "messages": [{"role": "SECRET", "content": "x"}], "n": "SECRET"}
        )
    error = from_validation(caught.value)
    assert error.param == "n"
    assert "messages.0.role: " in error.message
    assert "SECRET" not in error.message
