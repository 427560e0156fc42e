"""Where a device's time went in steps of each kind: kernels, gaps between them, bubbles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from replica.timeline.engine_trace import Step
from replica.timeline.profile import union_us
from replica.timeline.works import Work


class Shares(msgspec.Struct):
    """Of steps of one kind."""

    steps: int = 0
    step_us: float = 0.0
    """From when the device could begin to compute to the end, without bubbles: what requests are
    billed."""
    kernels_us: float = 0.0
    """How much of that some kernel ran."""
    bubble_us: float = 0.0

    def add(self, other: Shares) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def told(self) -> dict[str, float]:
        """Milliseconds a step, and shares of the whole time, which add up to 1."""
        total = self.step_us + self.bubble_us or 1.0
        return {
            "steps": self.steps,
            "ms": total / 1e3 / max(self.steps, 1),
            "kernels": self.kernels_us / total,
            "gaps": (self.step_us - self.kernels_us) / total,
            "bubble": self.bubble_us / total,
        }


def shares(steps: Iterable[Step], done: Iterable[Work]) -> dict[str, Shares]:
    """By kind. done: what ran, in order of starts."""
    computed: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for work in done:
        if work.lane == "compute":
            computed[work.step].append((work.start_us, work.end_us))
    found: dict[str, Shares] = defaultdict(Shares)
    for step in steps:
        step_us = sum(end - start for start, end in step.intervals) / 1e3
        kernels_us = min(union_us(computed[step.number]), step_us)
        found[step.kind].add(Shares(1, step_us, kernels_us, step.bubble_ns / 1e3))
    return dict(found)


def told(found: dict[str, Shares]) -> dict[str, dict[str, float]]:
    """Of each kind, then of all steps."""
    every = Shares()
    for one in found.values():
        every.add(one)
    return {kind: one.told() for kind, one in sorted({**found, "all": every}.items(), key=_last)}


def _last(item: tuple[str, Shares]) -> tuple[bool, str]:
    return item[0] == "all", item[0]
