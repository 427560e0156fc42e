"""Keeps when the host did what, as long as somebody wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from replica.timeline.engine_trace import Span


class SpanLog:
    """Of one device. Spans are those of one thread, work may be done by others."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._name = ""
        """Of the innermost span that is open."""

    @property
    def on(self) -> bool:
        return self._spans is not None

    def start(self) -> None:
        self._spans = []

    def stop(self) -> list[Span]:
        """What has ended by now."""
        spans, self._spans = self._spans, None
        return list(spans or ())

    def span(self, name: str) -> AbstractContextManager[None]:
        """While it is on: the time of a block."""
        assert self._spans is not None
        return _Timed(self, self._spans, name)

    def timed(self, lane: str, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, as it is unless this is on. It belongs to the span that is open now."""
        if (spans := self._spans) is None:
            return work
        name = self._name

        def timed_work() -> None:
            began = time.perf_counter_ns()
            work()
            spans.append(Span(lane, name, began, time.perf_counter_ns()))

        return timed_work


class _Timed(AbstractContextManager[None]):
    def __init__(self, log: SpanLog, spans: list[Span], name: str) -> None:
        self._log, self._spans, self._name = log, spans, name

    def __enter__(self) -> None:
        self._outer, self._log._name = self._log._name, self._name
        self._began = time.perf_counter_ns()

    def __exit__(self, *failure: object) -> None:
        self._spans.append(Span("", self._name, self._began, time.perf_counter_ns()))
        self._log._name = self._outer
