"""What happened in a simulation: service over time, who waited, and times to first tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.sim_engine import Job, Policy

W_P, W_C, W_Q = 1.0, 0.25, 2.0
"""Service of a token: computed, cached, output."""
Series = NDArray[np.float64]


class Trace:
    """Stands between a simulation and its policy, and takes notes once a second."""

    def __init__(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self.ttft: dict[str, list[float]] = defaultdict(list)
        self.tokens = 0
        """Prompt and output tokens of all requests that ended."""
        self.requests = 0
        self.ended_at = 0.0
        self._policy = policy
        self._service = dict.fromkeys(weights, 0.0)
        self._waiting = dict.fromkeys(weights, 0)
        self._booked: dict[Job, int] = {}
        self._rows: list[list[float]] = []
        self._backlog: list[list[bool]] = []

    def add(self, job: Job, now: float) -> bool:
        admitted = self._policy.add(job, now)
        self._waiting[job.tenant] += admitted
        return admitted

    def fill(self, now: float) -> list[Job]:
        granted = self._policy.fill(now)
        for job in granted:
            self._waiting[job.tenant] -= 1
        return granted

    def produced(self, job: Job) -> None:
        if job not in self._booked:
            self._booked[job] = 0
            self._service[job.tenant] += W_P * (job.prompt - job.cached) + W_C * job.cached
            self.ttft[job.tenant].append(job.first - job.arrival)
        self._service[job.tenant] += W_Q * (job.produced - self._booked[job])
        self._booked[job] = job.produced
        self._policy.produced(job)

    def end(self, job: Job) -> None:
        del self._booked[job]
        self.tokens += job.prompt + job.output
        self.requests += 1
        self._policy.end(job)

    def observe(self, now: float) -> None:
        """Note the state at every full second up to now."""
        self.ended_at = now
        while len(self._rows) <= now:
            self._rows.append(list(self._service.values()))
            self._backlog.append([count > 0 for count in self._waiting.values()])

    def service(self) -> dict[str, Series]:
        """Accumulated service by tenant, second by second."""
        table = np.array(self._rows)
        return {name: table[:, index] for index, name in enumerate(self.weights)}

    def share(self, start: float = 0.0) -> dict[str, float]:
        """Of the service after `start` seconds."""
        table = np.array(self._rows)
        gained = table[-1] - table[min(int(start), len(table) - 1)]
        return dict(zip(self.weights, map(float, gained / max(gained.sum(), 1.0)), strict=True))

    def differences(self, window_s: int = 60) -> Series:
        """For each window, second by second: the largest difference of service by weight between
        two tenants that waited throughout it."""
        weights = np.array(list(self.weights.values()))
        table, waits = np.array(self._rows) / weights, np.array(self._backlog)
        if len(table) <= window_s:
            return np.zeros(1)
        gained = table[window_s:] - table[:-window_s]
        counts = np.cumsum(np.vstack([np.zeros(len(weights)), waits]), axis=0)
        throughout = (counts[window_s + 1 :] - counts[: -window_s - 1]) == window_s + 1
        highest = np.where(throughout, gained, -np.inf).max(axis=1)
        lowest = np.where(throughout, gained, np.inf).min(axis=1)
        several = throughout.sum(axis=1) >= 2
        return np.where(several, highest - lowest, 0.0)

    def tokens_per_s(self) -> float:
        return self.tokens / self.ended_at
