"""The outputs of one sequence between the stream that brings them and the request that reads.

What comes while the reader is busy is read as one output, so a slow reader costs less. What
comes twice is dropped. The module knows neither streams nor replicas.
"""

from __future__ import annotations

import asyncio

import msgspec

from replica.messages import Output, Submit, TokenLogprobs


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
        self.offset = len(submit.prior_output_ids)
        """Output tokens received, prior output included."""
        self.submitted = False
        """The replica has confirmed the submit."""
        self._newest: Output | None = None
        self._unread: list[int] = []
        self._unread_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        """Take what is new in `output`. Raises ValueError if tokens before it are missing."""
        if output.finish_reason == "moved":
            self.fail(ReplicaLost("its replica is being removed", suspect=False))
            output = msgspec.structs.replace(output, finish_reason=None)
        seen = self.offset - output.offset
        if seen < 0:
            raise ValueError(f"{-seen} tokens of request {output.request_id} are missing")
        new_ids = output.token_ids[seen:]
        if new_ids or output.finish_reason is not None:
            self.offset += len(new_ids)
            self._unread += new_ids
            self._unread_logprobs += output.logprobs[seen:]
            if not seen:
                self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
            self._newest = output
            self._news.set()

    def fail(self, error: Exception) -> None:
        """No more will come. What is unread can still be read; `get` raises `error` then."""
        self._failure = error
        self._news.set()

    async def get(self) -> Output:
        """Everything unread, as one output. Raises what `fail` was given."""
        await self._news.wait()
        if self._newest is None:
            assert self._failure is not None
            raise self._failure
        output = msgspec.structs.replace(
            self._newest,
            offset=self.offset - len(self._unread),
            token_ids=tuple(self._unread),
            logprobs=tuple(self._unread_logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )
        self._newest, self._prompt_logprobs = None, ()
        self._unread.clear()
        self._unread_logprobs.clear()
        if self._failure is None:
            self._news.clear()
        return output
