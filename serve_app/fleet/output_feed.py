"""The outputs that one ingress has yet to receive from one replica.

A feed keeps the whole output of every sequence and how much of it the current reader was
given. What is owed is the difference: a slow reader gets several steps in one message, and a
reader that comes back after a broken stream names its offsets and gets the rest. The module
knows neither Ray nor the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TypeAlias

import anyio
import msgspec

from replica.messages import FinishReason, Output, OutputBuffer, Submit

Key: TypeAlias = tuple[str, int]
"""Request id and attempt."""

KEPT_S = 30.0
KEPT_ENDED = 1024
"""How long, and how many of, the ended sequences stay for a reader that comes back."""


class _Run:
    """A sequence, and what the reader has of it."""

    def __init__(self, key: Key, start: int) -> None:
        """start: output tokens of earlier attempts."""
        self.outputs = OutputBuffer(*key, start)
        self.given = start
        """Output tokens that the reader has, those of earlier attempts included."""

    def owed(self) -> Output:
        """Everything beyond `given`, which then counts as given."""
        output, self.given = self.outputs.since(self.given), self.outputs.end
        return output


class OutputFeed:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._runs: dict[Key, _Run] = {}
        self._owed: dict[Key, None] = {}
        self._ended: deque[tuple[float, Key]] = deque()
        self._news = asyncio.Event()
        self._reader: object | None = None
        self._read_at = time.monotonic()

    @property
    def unfinished(self) -> list[Key]:
        """Sequences that still run, oldest first."""
        return [key for key, run in self._runs.items() if run.outputs.finish_reason is None]

    @property
    def unread_s(self) -> float:
        """Seconds since a reader was attached; 0 while one is."""
        return 0.0 if self._reader is not None else time.monotonic() - self._read_at

    def open(self, submit: Submit) -> bool:
        """Begin to record a sequence. False if it is known already: a repeated submit, or one
        that its abort has overtaken.
        """
        key = (submit.request_id, submit.attempt)
        if key in self._runs:
            return False
        self._runs[key] = _Run(key, len(submit.prior_output_ids))
        return True

    def refuse(self, key: Key, reason: FinishReason = "abort", error: str = "") -> bool:
        """Note an abort. True if the sequence was never submitted: it will not be, then, and the
        reader hears that it has ended."""
        if key in self._runs:
            return False
        self._runs[key] = _Run(key, 0)
        self.record(Output(*key, 0, (), reason, error=error))
        return True

    def hand_back(self, *, begun: bool) -> list[Key]:
        """End all sequences here that have no output yet, and those that have if `begun`: their
        reader learns that they are to go on elsewhere. Returns them."""
        moved = []
        for key in self.unfinished:
            outputs = self._runs[key].outputs
            if begun or outputs.end == outputs.start:
                nothing = outputs.since(outputs.end)
                self.record(msgspec.structs.replace(nothing, finish_reason="moved"))
                moved.append(key)
        return moved

    def record(self, output: Output) -> None:
        """Append what a step added to a sequence."""
        key = (output.request_id, output.attempt)
        self._runs[key].outputs.add(output)
        self._owed[key] = None
        if output.finish_reason is not None:
            self._forget_after(key)
        self._news.set()

    def attach(self, offsets: dict[Key, int]) -> object:
        """Become the reader, in place of an earlier one, with `offsets` tokens received of the
        sequences that are still of interest. Returns what `take` and `detach` want.
        """
        self._reader = object()
        self._owed.clear()
        for key, run in self._runs.items():
            if key in offsets:
                run.given = offsets[key]
                self._owed[key] = None
        self._news.set()
        return self._reader

    def detach(self, reader: object) -> None:
        """Stop to read; does nothing if another reader has come."""
        if self._reader is reader:
            self._reader, self._read_at = None, time.monotonic()

    def is_attached(self, reader: object) -> bool:
        """Whether no other reader has come since."""
        return self._reader is reader

    async def take(self, reader: object, timeout_s: float) -> list[Output]:
        """Wait for news and return them; nothing after `timeout_s` or for an earlier reader."""
        with anyio.move_on_after(timeout_s):
            await self._news.wait()
        if self._reader is not reader:
            return []
        self._news.clear()
        owed, self._owed = self._owed, {}
        return [self._runs[key].owed() for key in owed]

    def wake(self) -> None:
        """Let the reader look up although nothing is owed."""
        self._news.set()

    def _forget_after(self, key: Key) -> None:
        """The sequence has ended: it stays for a while only, as those before it."""
        now = time.monotonic()
        self._ended.append((now, key))
        while len(self._ended) > KEPT_ENDED or self._ended[0][0] < now - KEPT_S:
            _, oldest = self._ended.popleft()
            del self._runs[oldest]
            self._owed.pop(oldest, None)
