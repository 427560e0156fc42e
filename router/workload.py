"""The work that waiting requests will be, for the autoscaler.

Only what would run if there were room counts: a flood that its own tenant's concurrency holds
back is no reason for another replica. Knows nothing of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from router.dispatcher import Dispatcher
from router.policy import BANDS
from router.priority_band import TenantQueue

_SAMPLE = 32
"""Requests at the head of a tenant's queue that stand for those behind them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The waiting work of one model."""

    waiting: int
    """Requests for which there is no room, and nothing else holds them back."""
    gpu_s: tuple[float, ...]
    """GPU time that they will take, by band."""


def measure(dispatcher: Dispatcher, sleepers: int = 0) -> Workload:
    """O(tenants). sleepers: requests that wait for a first replica to say what it serves."""
    waiting, seconds = sleepers, [0.0] * BANDS
    for name, queue in dispatcher.queue.tenants().items():
        concurrency = queue.concurrency
        count = max(min(queue.queued, concurrency.limit - concurrency.running), 0)
        if count:
            waiting += count
            seconds[queue.band.index] += count * _mean_gpu_s(dispatcher, name, queue)
    return Workload(waiting, tuple(seconds))


def _mean_gpu_s(dispatcher: Dispatcher, name: str, queue: TenantQueue) -> float:
    heads = list(islice(queue.waiting, _SAMPLE))
    estimates = dispatcher.estimates
    return sum(estimates.gpu_s(name, request.expected) for request in heads) / len(heads)
