"""Where the time of one request went: every moment belongs to one phase, so they sum to the whole.

A request has a phase of its own at each moment, and what takes the event loop's or the network's
time meanwhile is counted apart. The module knows neither HTTP nor the router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum


class Phase(str, Enum):
    """In the order in which a request goes through them."""

    READ = "read"
    """Its head and its body, from the network; who it is, and whether it may ask now."""
    PREPARE = "prepare"
    """Parsing, template, tokens, grammar."""
    ADMISSION = "admission"
    """Waiting for a grant: a quota, a fair turn, a free place."""
    REPLICA_QUEUE = "replica_queue"
    """Waiting in the replica, until a step computes for it."""
    PREFILL = "prefill"
    """The prompt, as far as it is not cached, up to the first token; and the way to the replica and
    back. Without a first token, the queue there, too."""
    DECODE = "decode"
    """All later tokens."""
    TEXT = "text"
    """Turning tokens into text, and text into JSON."""
    SEND = "send"
    """To the network: a reader that is slow shows here."""


GENERATING = (Phase.ADMISSION, Phase.PREFILL, Phase.DECODE)
"""What a sequence goes through. Of several sequences, the one that is furthest counts."""
MAX_TURNS = 32
"""Turns that are kept: a request whose replicas are lost again and again takes no more memory."""


class Breakdown:
    """Of one request. Used from one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, since: float | None = None
    ) -> None:
        """clock: in seconds. since: when the request came, if that was before now."""
        self.seconds = dict.fromkeys(Phase, 0.0)
        """Up to the last change of phase."""
        self.phase = Phase.READ
        self.beside: Phase | None = None
        """What is counted apart now."""
        self.turns = [(Phase.READ, clock() if since is None else since)]
        """When it entered which phase, by the clock. What is counted apart is not among them."""
        self._clock = clock
        self._since = self.turns[0][1]

    def enter(self, phase: Phase) -> None:
        """From now on."""
        if phase is not self.phase:
            self.count()
            self.phase = phase
            if len(self.turns) < MAX_TURNS:
                self.turns.append((phase, self._since))

    def split(self, seconds: float, earlier: Phase) -> None:
        """The first so many seconds of the present phase belong to an earlier one."""
        self.count()
        seconds = max(0.0, min(seconds, self.seconds[self.phase]))
        self.seconds[self.phase] -= seconds
        self.seconds[earlier] += seconds
        phase, at = self.turns[-1]
        if phase is self.phase and seconds and len(self.turns) < MAX_TURNS:
            self.turns[-1:] = [(earlier, at), (phase, at + seconds)]

    def stop(self) -> None:
        """The request is over: what passes from now on is none of its time."""
        self.count()
        over = self._since
        self._clock = lambda: over

    def during(self, phase: Phase) -> Beside:
        """Count this apart from the request's phase, which may change meanwhile."""
        return Beside(self, phase)

    @property
    def counted_until(self) -> float:
        """By the clock: the last change, or when `count` was called last."""
        return self._since

    def intervals(self) -> Iterator[tuple[Phase, float, float]]:
        """Its turns until then: phase, begin and end, by the clock."""
        ends = [at for _, at in self.turns[1:]]
        for (phase, begin), end in zip(self.turns, [*ends, self._since], strict=True):
            yield phase, begin, end

    def so_far(self) -> dict[Phase, float]:
        """Seconds in each phase until now."""
        self.count()
        return self.seconds

    def count(self) -> None:
        """What has passed since the last change."""
        now = self._clock()
        self.seconds[self.beside or self.phase] += now - self._since
        self._since = now


class Beside:
    """A context manager, to be used again and again: each token passes through one, so it is as
    light as it can be."""

    __slots__ = ("_before", "_breakdown", "_phase")

    def __init__(self, breakdown: Breakdown, phase: Phase) -> None:
        self._breakdown, self._phase = breakdown, phase

    def __enter__(self) -> None:
        breakdown = self._breakdown
        breakdown.count()
        self._before, breakdown.beside = breakdown.beside, self._phase

    def __exit__(self, *exception: object) -> None:
        self._breakdown.count()
        self._breakdown.beside = self._before


def furthest(phases: Iterable[Phase]) -> Phase | None:
    """Of sequences that have not ended."""
    return max(phases, key=GENERATING.index, default=None)


def server_timing(seconds: dict[Phase, float]) -> str:
    """The value of a `Server-Timing` header (W3C), in milliseconds."""
    return ", ".join(f"{phase.value};dur={s * 1e3:.3f}" for phase, s in seconds.items())


def timing_comment(seconds: dict[Phase, float]) -> bytes:
    """The same for a stream, whose head has been sent long before: clients skip comments."""
    return f": Server-Timing: {server_timing(seconds)}\n\n".encode()
