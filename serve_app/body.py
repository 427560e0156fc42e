"""Reads the JSON body of a request, and no more of it than is allowed."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from serve_app.errors import ApiError, from_validation

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, kind: type[M], max_bytes: int) -> M:
    """The body as a checked `kind`.

    Raises ApiError: 415 if it does not call itself JSON or is compressed, 413 if it is too
    large, 400 if it is not JSON or not valid. ClientDisconnect if the client hangs up meanwhile.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "The body must not be compressed: send it without Content-Encoding.")
    body = await _read(request, max_bytes)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.")
