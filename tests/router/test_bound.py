"""The bound of docs/fairness.md, with its quantities as measured; and that it is no wider than
what a broken order oversteps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from router.policy import FairPolicy
from router.priority_band import PriorityBand, TenantQueue, VirtualTokenCounter
from tests.router.test_fairness import Shape, backlogged, service, world_of
from tests.router.world import Ingress


@dataclass
class Measured:
    """The quantities of the bound, per tenant, as large as they became."""

    policy: FairPolicy
    weights: dict[str, float]
    longest_prompt: dict[str, int] = field(default_factory=dict)
    open_output: dict[str, int] = field(default_factory=dict)
    """M: output that requests in flight may still produce."""
    uncorrected: dict[str, int] = field(default_factory=dict)
    """U: prompt tokens in flight whose cached part is not known yet."""

    def observe(self, ingress: Ingress) -> None:
        infos = [*ingress.waiting.values(), *(lease.request for lease in ingress.leases.values())]
        for tenant in self.weights:
            leases = [x for x in ingress.leases.values() if x.request.tenant == tenant]
            self._raise(
                self.longest_prompt,
                tenant,
                max((info.prompt_tokens for info in infos if info.tenant == tenant), default=0),
            )
            self._raise(
                self.open_output, tenant, sum(x.request.max_tokens - x.produced for x in leases)
            )
            self._raise(
                self.uncorrected,
                tenant,
                sum(x.request.prompt_tokens for x in leases if x.cached is None),
            )

    def gap(self) -> float:
        """D: how far two counters can be apart while both tenants stay eligible."""
        p = self.policy
        ahead = max(
            (p.w_p * self.longest_prompt[t] + p.w_q * self.open_output[t]) / w
            for t, w in self.weights.items()
        )
        expected = max(p.lam * p.w_q * self.open_output[t] / w for t, w in self.weights.items())
        corrected = max((p.w_p - p.w_c) * self.uncorrected[t] / w for t, w in self.weights.items())
        return p.locality + ahead + expected + corrected

    @staticmethod
    def _raise(table: dict[str, int], tenant: str, value: int) -> None:
        table[tenant] = max(table.get(tenant, 0), value)


@dataclass(frozen=True)
class Case:
    """One tenant is backlogged alone, then nobody wants anything, then both are backlogged."""

    shapes: tuple[Shape, Shape]
    weights: tuple[float, float]
    slots: int
    cached: float
    burst: float
    locality: float
    alone: int
    """Token steps."""
    pause: bool
    order: str
    """Who comes first after it."""
    seed: int

    def spread_and_bound(self) -> tuple[float, float]:
        """How far the lead of one tenant moved while both were backlogged, and may move."""
        policy = FairPolicy(burst=self.burst, locality=self.locality)
        weights = dict(zip("ij", self.weights, strict=True))
        shapes = {name: self.shapes["ij".index(name)] for name in self.order}
        depth = self.slots + 2
        world, ingress = world_of(weights, self.slots, policy=policy, cached=self.cached)
        measured = Measured(policy, weights)
        for _ in backlogged(world, ingress, {"i": shapes["i"]}, self.alone, self.seed, depth):
            measured.observe(ingress)
        if self.pause:
            for request_id in [*ingress.waiting, *ingress.leases]:
                world.cancel(ingress, request_id)
            world.exchange(ingress)
        leads = []
        for _ in backlogged(world, ingress, shapes, STEPS, self.seed, depth):
            measured.observe(ingress)
            served = service(world)
            leads.append(served["i"] / weights["i"] - served["j"] / weights["j"])
        return max(leads) - min(leads), 2 * measured.gap() + self.burst / min(self.weights)


STEPS = 150
"""While both are backlogged: as much as hundreds of requests."""
SHAPES = st.builds(
    Shape,
    prompt=st.tuples(st.integers(1, 20), st.sampled_from([20, 40, 200])),
    output=st.tuples(st.integers(1, 5), st.sampled_from([5, 10, 30])),
    prefixes=st.sampled_from([0, 4]),
)
CASES = st.builds(
    Case,
    shapes=st.tuples(SHAPES, SHAPES),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 3.0])),
    slots=st.sampled_from([1, 2, 4, 8]),
    cached=st.sampled_from([0.0, 0.9]),
    burst=st.sampled_from([0.0, 100.0]),
    locality=st.sampled_from([0.0, 60.0]),
    alone=st.sampled_from([0, 17, 150]),
    pause=st.booleans(),
    order=st.sampled_from(["ij", "ji"]),
    seed=st.integers(0, 2**16),
)


@settings(deadline=None)
@given(CASES)
def test_the_service_of_two_backlogged_tenants_stays_within_the_bound(case):
    """|W_i/w_i - W_j/w_j| <= 2 D + burst/w_min over every interval in which both wait."""
    spread, bound = case.spread_and_bound()
    assert spread <= bound


def charge_without_weight(counter: VirtualTokenCounter, cost: float, outstanding: int) -> None:
    counter.value += cost
    counter.outstanding += outstanding
    counter.key = counter.value + counter.order_weight * counter.outstanding


def charge_nothing_for_output(counter: VirtualTokenCounter, cost: float, outstanding: int) -> None:
    counter.value += (cost if outstanding >= 0 else 0.0) / counter.weight
    counter.outstanding += outstanding
    counter.key = counter.value + counter.order_weight * counter.outstanding / counter.weight


def lift_nothing(band: PriorityBand, queue: TenantQueue) -> None:
    queue.eligible = True
    band.touch(queue)


def lift_to_who_waits(band: PriorityBand, queue: TenantQueue) -> None:
    """To the least counter of those that happen to wait, if there are any: V is not kept."""
    slowest = band._by_counter.peek()
    queue.eligible = True
    if slowest is not None:
        level = slowest.counter.value - queue.burst / queue.counter.weight
        queue.counter.set(max(queue.counter.value, level))
    band.touch(queue)


def near_without_quantum(band: PriorityBand, span: float, limit: int) -> list[TenantQueue]:
    return NEAR(band, inf, limit)


NEAR = PriorityBand.near
FAULTS = [
    (VirtualTokenCounter, "charge", charge_without_weight),
    (VirtualTokenCounter, "charge", charge_nothing_for_output),
    (PriorityBand, "activate", lift_nothing),
    (PriorityBand, "activate", lift_to_who_waits),
    (PriorityBand, "near", near_without_quantum),
]


@pytest.mark.parametrize(("owner", "method", "fault"), FAULTS)
def test_a_broken_order_oversteps_the_bound(
    owner: type, method: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random cases find it: the property above would not hold."""
    monkeypatch.setattr(owner, method, fault)

    def breaks(case: Case) -> bool:
        spread, bound = case.spread_and_bound()
        return spread > bound

    find(
        CASES,
        breaks,
        settings=settings(max_examples=1000, phases=[Phase.generate], database=None, deadline=None),
        random=Random(0),
    )
