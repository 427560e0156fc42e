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

    def __init__(self, reason: str, *, submitted: bool) -> None:
        super().__init__(reason)
        self.submitted = submitted
        """Whether the replica had it, and may have been lost because of it."""


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
        self._lost: ReplicaLost | None = None
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        """Take what is new in `output`. Raises ValueError if tokens before it are missing."""
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

    def lose(self, reason: str) -> None:
        """No more will come. What is unread can still be read."""
        self._lost = ReplicaLost(reason, submitted=self.submitted)
        self._news.set()

    async def get(self) -> Output:
        """Everything unread, as one output. Raises ReplicaLost when there will be no more."""
        await self._news.wait()
        if self._newest is None:
            assert self._lost is not None
            raise self._lost
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
        if self._lost is None:
            self._news.clear()
        return output
