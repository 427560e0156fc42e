"""The metrics of one process: told to Ray, whose agents export them, and kept for `GET /metrics`.

Each is declared once. The module knows neither what is measured nor who asks for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString
from ray.serve import metrics

MAX_TENANTS = 100
"""Tenants with series of their own, those that came first; all others are told as one."""
OTHER = "other"

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""Name, type, meaning, and samples: name, labels, value."""


class Tenants:
    """Which tenants have series of their own: nobody can make more by their names."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most, self._known = most, set[str]()

    def label(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(tenant)
        return tenant


class Declared(NamedTuple):
    """A metric, as a reader knows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Instruments:
    """Declares metrics and gathers them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.declared: list[Declared] = []

    def gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        self.declared.append(Declared(name, "gauge", labels, meaning))
        told = metrics.Gauge(name, meaning, tag_keys=labels)
        return Gauge(told, prometheus_client.Gauge(name, meaning, labels, registry=self._registry))

    def sum(self, name: str, meaning: str, *labels: str) -> RunningSum:
        """Exported with `_total` behind its name."""
        self.declared.append(Declared(f"{name}_total", "counter", labels, meaning))
        told = metrics.Counter(name, meaning, tag_keys=labels)
        kept = prometheus_client.Counter(name, meaning, labels, registry=self._registry)
        return RunningSum(told, kept)

    def histogram(
        self, name: str, meaning: str, bounds: Sequence[float], *labels: str
    ) -> Histogram:
        self.declared.append(Declared(name, "histogram", labels, meaning))
        made = Histogram(name, meaning, bounds, labels)
        self._registry.register(made)
        return made

    def gather(self) -> bytes:
        """All of them now, a list of `Family` in msgpack."""
        families = [
            (
                family.name,
                family.type,
                family.documentation,
                [(each.name, each.labels, each.value) for each in family.samples],
            )
            for family in self._registry.collect()
        ]
        return msgspec.msgpack.encode(families)


class Gauge:
    def __init__(self, told: metrics.Gauge, kept: prometheus_client.Gauge) -> None:
        self._told, self._kept = told, kept

    def set(self, value: float, **labels: str) -> None:
        self._told.set(value, tags=labels)
        _of(self._kept, labels).set(value)


class RunningSum:
    """A counter that is set from running sums, which start at zero."""

    def __init__(self, told: metrics.Counter, kept: prometheus_client.Counter) -> None:
        self._told, self._kept = told, kept
        self._last: dict[tuple[str, ...], float] = {}

    def tell(self, total: float, source: str = "", **labels: str) -> None:
        """source: of several sums with the same labels."""
        key = (source, *labels.values())
        growth = total - self._last.get(key, 0.0)
        if growth > 0:
            self._told.inc(growth, tags=labels)
            _of(self._kept, labels).inc(growth)
            self._last[key] = total


class Histogram:
    """By bounds: upper ones, each included in its bucket; above the last there is one more."""

    def __init__(
        self, name: str, meaning: str, bounds: Sequence[float], labels: tuple[str, ...]
    ) -> None:
        self._name, self._meaning, self._bounds = name, meaning, [*map(float, bounds)]
        self._told = metrics.Histogram(name, meaning, boundaries=self._bounds, tag_keys=labels)
        self._labels = labels
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        """By values of the labels: counts by bucket, and the sum of all."""

    def observe(self, value: float, **labels: str) -> None:
        self._told.observe(value, tags=labels)
        counts = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, value)] = 1
        self.add(counts, value, **labels)

    def add(self, counts: Sequence[int], total: float, **labels: str) -> None:
        """Many at once, by bucket, and their sum. Ray, which takes one by one, hears nothing."""
        key = tuple(labels[name] for name in self._labels)
        known, sums = self._series.setdefault(key, ([0] * (len(self._bounds) + 1), [0.0]))
        sums[0] += total
        for bucket, count in enumerate(counts):
            known[bucket] += count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, (counts, (total,)) in self._series.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric(key, buckets, total)
        yield family


M = TypeVar("M", prometheus_client.Gauge, prometheus_client.Counter)


def _of(metric: M, labels: Mapping[str, str]) -> M:
    return metric.labels(**labels) if labels else metric
