"""Loads for a fleet that scales: arrivals a second by tenant, and what goes wrong meanwhile."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale_fleet import Tenant

Array = NDArray[np.float64]

CHAT, LONG, DOCUMENTS = Tenant(800, 250), Tenant(2000, 1500), Tenant(8000, 300)
MIX = ((CHAT, 0.75), (LONG, 0.15), (DOCUMENTS, 0.10))
"""Kinds of requests, and their shares in number."""
HOUR = 3600


@dataclass(frozen=True, slots=True)
class Scenario:
    tenants: tuple[Tenant, ...]
    rates: Array
    """Requests a second: (seconds, tenants)."""
    max_replicas: int
    initial: int
    start_s: int = 30
    deaths: dict[int, int] = field(default_factory=dict)
    """Replicas that die, by second."""
    lost: tuple[tuple[int, int], ...] = ()
    """From when until when no metrics arrive."""


def mixed(replicas: Array) -> tuple[tuple[Tenant, ...], Array]:
    """The mix, at rates that keep so many full replicas busy."""
    cost = sum(tenant.gpu_s * share for tenant, share in MIX)
    rates = np.outer(replicas / cost, [share for _, share in MIX])
    return tuple(tenant for tenant, _ in MIX), rates


def _scenario(replicas: Array, max_replicas: int, **options: object) -> Scenario:
    tenants, rates = mixed(replicas)
    initial = max(1, int(np.ceil(replicas[0] * 1.25)))
    return Scenario(tenants, rates, max_replicas, initial, **options)  # type: ignore[arg-type]


def daily() -> Scenario:
    """24 hours: quiet at night, two peaks by day."""
    hours = np.arange(24 * HOUR) / HOUR
    day = np.exp(-(((hours - 11) / 2.5) ** 2)) + 0.9 * np.exp(-(((hours - 16) / 3) ** 2))
    return _scenario(4 + 30 * day, 60)


def bursts() -> Scenario:
    """Four minutes at three times the load, every half hour."""
    seconds = np.arange(3 * HOUR)
    return _scenario(np.where(seconds % 1800 >= 1560, 24.0, 8.0), 60)


def ramps(start_s: int = 30) -> Scenario:
    """From 5 to 50 replicas' worth in 15 minutes and back, twice."""
    points = [0, 900, 1800, 3600, 4500, 6300, 7200, 9000, 9900, 10800]
    values = [5, 5, 50, 50, 5, 5, 50, 50, 5, 5]
    return _scenario(np.interp(np.arange(3 * HOUR), points, values), 100, start_s=start_s)


def slow_starts() -> Scenario:
    """The same, where a replica needs a minute to start."""
    return ramps(start_s=60)


def flood() -> Scenario:
    """A tenant sends ten times what its concurrency of 256 lets through, for half an hour."""
    seconds = np.arange(2 * HOUR)
    tenants, rates = mixed(np.full(2 * HOUR, 10.0))
    flooding = np.where((seconds >= 1800) & (seconds < 3600), 60.0, 0.0)
    rates = np.column_stack([rates, flooding])
    return Scenario((*tenants, Tenant(500, 800, max_concurrency=256)), rates, 80, 13)


def dying() -> Scenario:
    """Two of about thirty replicas die every five minutes, once ten at once."""
    deaths = dict.fromkeys(range(300, 2 * HOUR, 300), 2) | {4500: 10}
    waves = 20 + 5 * np.sin(np.arange(2 * HOUR) / 2 / HOUR * 6 * np.pi)
    return _scenario(waves, 60, deaths=deaths)


def lost_metrics() -> Scenario:
    """Three times no metrics arrive: for 2, 5 and 20 minutes."""
    waves = 15 + 6 * np.sin(np.arange(3 * HOUR) / HOUR * 2 * np.pi)
    return _scenario(waves, 60, lost=((1200, 1320), (3000, 3300), (6000, 7200)))


def noisy(seed: int) -> Scenario:
    """Steady on the whole, and never the same for a minute."""
    rng = np.random.default_rng(seed)
    noise = np.exp(_correlated(rng, 4 * HOUR, 30.0) * 0.25)
    return _scenario(15 * noise, 60)


def thousand() -> Scenario:
    """From 400 to 800 replicas' worth within an hour."""
    return _scenario(np.interp(np.arange(HOUR), [0, 300, 2400, 3600], [400, 400, 800, 700]), 1000)


def arena(seed: int) -> Scenario:
    """Made up after what traces of chat arenas show: clients of Zipf's law, each by fits and
    starts."""
    rng = np.random.default_rng(seed)
    total = np.zeros(3 * HOUR)
    for rank in range(40):
        on = _correlated(rng, 3 * HOUR, float(rng.uniform(120, 600))) > rng.uniform(-0.3, 0.8)
        total += on * 20 / (rank + 2) ** 1.1
    return _scenario(total + 1.0, 100)


def recorded(path: Path, replicas: float) -> Scenario:
    """A CSV file with lines of seconds, prompt tokens and output tokens, sped up to a mean of so
    many replicas' worth. Requests are rounded to a few sizes."""
    with path.open(newline="") as file:
        lines = np.array([[float(each) for each in line[:3]] for line in csv.reader(file)])
    at, sizes = lines[:, 0] - lines[0, 0], lines[:, 1:]
    order = np.argsort(sizes.sum(axis=1))
    groups = np.array_split(order, 4)
    tenants = tuple(Tenant(*(int(each) for each in sizes[group].mean(axis=0))) for group in groups)
    rates = np.column_stack(
        [np.bincount(at[group].astype(int), minlength=int(at.max()) + 1) for group in groups]
    ).astype(float)
    load = rates @ np.array([tenant.gpu_s for tenant in tenants])
    factor = replicas / load.mean()
    first = int(np.ceil(load[:60].mean() * factor * 1.25)) or 1
    return Scenario(tenants, rates * factor, ceil_of(load.max() * factor) * 2, first)


def ceil_of(value: float) -> int:
    return int(np.ceil(value))


def scenarios(seed: int) -> dict[str, Scenario]:
    """By name."""
    return {
        "daily": daily(),
        "bursts": bursts(),
        "ramps": ramps(),
        "slow_starts": slow_starts(),
        "flood": flood(),
        "dying": dying(),
        "lost_metrics": lost_metrics(),
        "noisy": noisy(seed),
        "arena": arena(seed),
        "thousand": thousand(),
    }


def _correlated(rng: np.random.Generator, seconds: int, reach_s: float) -> Array:
    """Normal noise with a memory of `reach_s`."""
    keep = float(np.exp(-1 / reach_s))
    steps = rng.normal(0.0, np.sqrt(1 - keep * keep), seconds)
    value, values = float(rng.normal()), np.empty(seconds)
    for index, step in enumerate(steps):
        value = value * keep + step
        values[index] = value
    return values
