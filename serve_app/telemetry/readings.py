"""What readings of `GET /metrics` say: values now, growth since the first one, and quantiles.

It knows Prometheus' text and what that is written from, not which metrics there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[tuple[str, str], ...], float]
"""Values by sorted labels."""


class Scrape(NamedTuple):
    """One reading. at: seconds, on any clock."""

    at: float
    metrics: dict[str, Series]


def scrape(text: str, at: float) -> Scrape:
    """Raises ValueError if it is not Prometheus' text."""
    try:
        return gathered(text_string_to_metric_families(text), at)
    except (ValueError, IndexError):  # it says which line, and that may be all of a web page
        raise ValueError("this is no text for Prometheus") from None


def gathered(families: Iterable[Metric], at: float) -> Scrape:
    """The same of what the text is written from."""
    metrics = defaultdict[str, Series](dict)
    for family in families:
        for name, labels, value, *_ in family.samples:
            metrics[name][tuple(sorted(labels.items()))] = value
    return Scrape(at, dict(metrics))


class Readings:
    """Scrapes of one server. Sums are by the values of the labels that are asked for."""

    def __init__(self, scrapes: Sequence[Scrape]) -> None:
        """scrapes: oldest first, two or more."""
        self._now, self._all = scrapes[-1], scrapes
        self._first = defaultdict[str, Series](dict)
        for earlier in reversed(scrapes):
            for name, series in earlier.metrics.items():
                self._first[name] |= series
        self.seconds = scrapes[-1].at - scrapes[0].at

    def value(self, name: str, *by: str, **only: str) -> dict[tuple[str, ...], float]:
        """Sums now, of the series with the labels `only`."""
        return _sums(self._now.metrics.get(name, {}), by, only)

    def mean(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Over all readings; where there was none, it was zero."""
        series = defaultdict[tuple[tuple[str, str], ...], float](float)
        for each in self._all:
            for labels, value in each.metrics.get(name, {}).items():
                series[labels] += value / len(self._all)
        return _sums(series, by, {})

    def growth(self, name: str, *by: str, **only: str) -> dict[tuple[str, ...], float]:
        """Of a counter. As for Prometheus, one that fell began again at zero, and a series
        counts from when it was first seen."""
        first = self._first.get(name, {})
        grown = {
            key: value - first[key] if value >= first[key] else value
            for key, value in self._now.metrics.get(name, {}).items()
        }
        return _sums(grown, by, only)

    def rate(self, name: str, *by: str, **only: str) -> dict[tuple[str, ...], float]:
        """Growth per second."""
        grown = self.growth(name, *by, **only)
        return {key: value / self.seconds for key, value in grown.items()}

    def quantile(self, share: float, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Of what a histogram has observed since, by straight lines within its buckets.
        Who has observed nothing is left out; what is above the last bound is told as that."""
        buckets = defaultdict[tuple[str, ...], list[tuple[float, float]]](list)
        for (bound, *key), count in self.growth(f"{name}_bucket", "le", *by).items():
            buckets[tuple(key)].append((float(bound), count))
        found = {key: _quantile(share, sorted(each)) for key, each in buckets.items()}
        return {key: value for key, value in found.items() if value is not None}


def _sums(
    series: Series, by: tuple[str, ...], only: dict[str, str]
) -> dict[tuple[str, ...], float]:
    sums = defaultdict[tuple[str, ...], float](float)
    for labels, value in _with(series, only):
        sums[tuple(labels.get(name, "") for name in by)] += value
    return dict(sums)


def _with(series: Series, only: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
    for key, value in series.items():
        labels = dict(key)
        if only.items() <= labels.items():
            yield labels, value


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float | None:
    """buckets: upper bound and cumulative count, ascending."""
    wanted = share * buckets[-1][1]
    if wanted <= 0:
        return None
    low = below = 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == float("inf"):
                break
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
