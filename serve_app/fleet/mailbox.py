"""The outputs of one sequence between the stream that brings them and the request that reads.

What comes while the reader is busy is read as one output, so a slow reader costs less. What
comes twice is dropped. The module knows neither streams nor replicas.
"""

from __future__ import annotations

import asyncio

import msgspec

from replica.messages import Output, OutputBuffer, Submit


class ReplicaLost(Exception):
    """The replica will not finish this sequence."""

    def __init__(self, reason: str, *, suspect: bool) -> None:
        super().__init__(reason)
        self.suspect = suspect
        """Whether the replica failed while it had the sequence, and maybe because of it."""


class Mailbox:
    """One writer, one reader, one event loop."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.submitted = False
        """The replica has confirmed the submit."""
        self._unread = self._buffer(len(submit.prior_output_ids))
        self._anything = False
        """There is something unread: tokens or an end."""
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def offset(self) -> int:
        """Output tokens received, prior output included."""
        return self._unread.end

    def put(self, output: Output) -> None:
        """Take what is new in `output`. Raises ValueError if tokens before it are missing."""
        if output.finish_reason == "moved":
            self.fail(ReplicaLost("its replica is being removed", suspect=False))
            output = msgspec.structs.replace(output, finish_reason=None)
        if self._unread.add(output):
            self._anything = True
            self._news.set()

    def fail(self, error: Exception) -> None:
        """No more will come. What is unread can still be read; `get` raises `error` then."""
        self._failure = error
        self._news.set()

    async def get(self) -> Output:
        """Everything unread, as one output. Raises what `fail` was given."""
        await self._news.wait()
        if not self._anything:
            assert self._failure is not None
            raise self._failure
        output = self._unread.since(self._unread.start)
        self._unread, self._anything = self._buffer(self.offset), False
        if self._failure is None:
            self._news.clear()
        return output

    def _buffer(self, offset: int) -> OutputBuffer:
        return OutputBuffer(self.submit.request_id, self.submit.attempt, offset)
