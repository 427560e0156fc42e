"""Reads the JSON body of a request, and no more of it than is allowed.

Nothing is built of a body that holds too much, and a large one is read in a thread, where
tenants take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from serve_app.protocol.errors import ApiError, from_validation, invalid
from serve_app.protocol.json_parts import MAX_PARTS, MAX_VALUES, Allowance
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.throttling.fair_work import FairWork

M = TypeVar("M", bound=BaseModel)

LARGE_BYTES = 64 * 1024
"""What is smaller is read at once: whatever it holds, within milliseconds."""
MAX_WAITING = 64
"""Large ones of one tenant, in memory already."""


class Bodies:
    """Reads the bodies of all requests. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._work = FairWork("large bodies", threads=1, max_waiting=MAX_WAITING)

    async def read(self, request: Request, kind: type[M]) -> M:
        """The body as a checked `kind`.

        Raises ApiError: 415 if it does not call itself JSON or is compressed, 413 if it is too
        large, 400 if it holds too much, is not JSON or not valid. Refused if it is large and its
        tenant has sent too many such. ClientDisconnect if the client hangs up meanwhile.
        """
        _require_plain_json(request)
        body = await self._receive(request)
        records.current().breakdown.enter(Phase.PREPARE)
        if len(body) <= LARGE_BYTES:
            return parse(kind, body)
        return await self._work.ask(request.state.tenant.id, partial(parse, kind, body))

    async def _receive(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_bytes:
                raise self._too_large()
            chunks.append(chunk)
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.")


def parse(kind: type[M], body: bytes) -> M:
    """Raises ApiError. Strings that are JSON again, such as arguments of calls, have an allowance
    of their own, all together."""
    if not Allowance().covers(body):
        message = (
            f"The body holds more than {MAX_PARTS} strings, objects and lists, or more than "
            f"{MAX_VALUES} values."
        )
        raise invalid(message)
    try:
        return kind.model_validate_json(body, context=Allowance())
    except ValidationError as error:
        raise from_validation(error) from None


def _require_plain_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "The body must not be compressed: send it without Content-Encoding.")
