"""Each choice of the dispatcher is the one that docs/fairness.md defines, computed in as many
words: no index, no order that is kept, every replica and every tenant looked at."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.accounts import Accounts
from router.credits import Replica
from router.dispatcher import Dispatcher
from router.messages import Outcome, ReplicaReport, RequestInfo
from router.policy import FairPolicy
from router.priority_band import PriorityBand, TenantQueue
from router.request import Request
from tests.router.world import Clock, tenants_of

HEADS = 16
Choice = tuple[Request, Replica] | None


@dataclass
class Definition:
    """One decision in a band: what is chosen, who is overtaken by it, who is passed over before."""

    dispatcher: Dispatcher
    band: PriorityBand

    def __post_init__(self) -> None:
        tenants = self.dispatcher.queue.tenants().values()
        self.aside = list(self.band._aside)
        self.tenants = [each for each in tenants if each.eligible and each.band is self.band]
        self.reserved = self.dispatcher._reserved
        self.passed = len(self.dispatcher._passed)
        self.overtaken: list[Request] = []

    @property
    def is_unique(self) -> bool:
        """Whether no two tenants are level: of such, either may go first."""
        keys = {each.counter.key for each in self.tenants}
        counters = {each.counter.value for each in self.tenants}
        return len(keys) == len(counters) == len(self.tenants)

    def choose(self) -> Choice:
        replicas = self.dispatcher.credits.replicas().values()
        if not any(self._has_slot(each, newcomer=False) for each in replicas):
            return self._choose_newcomer()
        while self.passed < HEADS and (order := self._order()):
            head = order[0].head
            place = self._place(head, self.band.is_newcomer(order[0]))
            if place is not None:
                is_local = self.band.prefixed and self.dispatcher._policy.locality
                return self._most_local(order) if is_local else (head, place)
            self.aside.append(order[0])
            self.passed += 1
            if self.reserved is None and self._is_starved(head):
                self.reserved = max((r for r in replicas if r.slots), key=lambda r: r.kv_free).name
        return None

    def _choose_newcomer(self) -> Choice:
        by_counter = sorted(self.tenants, key=lambda each: each.counter.value)
        if not by_counter:
            return None
        first, *others = by_counter
        if not self.band.is_newcomer(first):
            policy, head = self.dispatcher._policy, first.head
            cost = policy.w_p * head.info.prompt_tokens + policy.w_q * head.expected
            level = first.counter.value + cost / first.counter.weight
            if not others or level > others[0].counter.value:
                return None
        place = self._place(first.head, newcomer=True)
        return None if place is None else (first.head, place)

    def _most_local(self, order: list[TenantQueue]) -> Choice:
        ceiling = order[0].counter.key + self.dispatcher._policy.locality
        near = [each for each in order if each.counter.key <= ceiling][:HEADS]
        candidates = [
            (request, each) for each in near for request in islice(each.waiting, HEADS // len(near))
        ]
        best: Choice = None
        for index, (request, tenant) in enumerate(candidates):
            place = self._place(request, self.band.is_newcomer(tenant))
            if place is None:
                continue
            if best is None or self._is_starved(request) or cached(request, place) > cached(*best):
                best = request, place
                self.overtaken = [other for other, _ in candidates[:index]]
            if self._is_starved(request):
                break
        return best

    def _order(self) -> list[TenantQueue]:
        waiting = [each for each in self.tenants if each not in self.aside]
        return sorted(waiting, key=lambda each: each.counter.key)

    def _place(self, request: Request, newcomer: bool) -> Replica | None:
        def fits(replica: Replica) -> bool:
            room = replica.kv_free + cached(request, replica)
            return self._has_slot(replica, newcomer) and (
                not replica.leases or request.kv_need <= room
            )

        def rank(replica: Replica) -> tuple[float, float, int]:
            load = len(replica.leases) / replica.slots
            return -cached(request, replica), load, replica.bit

        replicas = self.dispatcher.credits.replicas().values()
        return min(filter(fits, replicas), key=rank, default=None)

    def _has_slot(self, replica: Replica, newcomer: bool) -> bool:
        slots = replica.slots if newcomer else replica.common_slots
        return replica.name != self.reserved and len(replica.leases) < slots

    def _is_starved(self, request: Request) -> bool:
        return request.overtaken >= self.dispatcher._policy.max_overtakes


def cached(request: Request, replica: Replica) -> int:
    """Tokens of its prompt that were granted there lately."""
    return replica.prefixes.match(request.info.prefixes)


class CheckedDispatcher(Dispatcher):
    """Compares each of its choices with the definition."""

    compared = local = 0

    def _choose(self, band: PriorityBand) -> Choice:
        definition = Definition(self, band)
        is_unique, expected = definition.is_unique, definition.choose()
        before = {each: each.overtaken for queue in definition.tenants for each in queue.lines()}
        choice = super()._choose(band)
        if is_unique:
            assert choice == expected
            rises = [each for each, count in before.items() if each.overtaken > count]
            assert set(rises) == set(definition.overtaken)
            self.compared += 1
            self.local += bool(rises)
        return choice


class Fleet:
    """A dispatcher, its replicas, and what runs."""

    def __init__(
        self, make: type[Dispatcher], policy: FairPolicy, tenants: int, bands: int = 1
    ) -> None:
        accounts = Accounts()
        # No two weights alike, nor counters: of tenants that are level, either may go first.
        options = {
            f"t{i}": {"weight": 1 + i / 7, "max_concurrency": 10_000, "band": i % bands}
            for i in range(tenants)
        }
        configured = tenants_of(**options).tenants
        accounts.configure(configured)
        self.dispatcher = make(policy, Clock(), 2.0, accounts)
        self.dispatcher.configure(configured)
        for i in range(tenants):
            self.dispatcher.queue.charge(f"t{i}", i**0.5)
        self.running: list[Request] = []
        self._ids = count()

    def report(self, replica: int, slots: int, kv_tokens: int) -> None:
        self.dispatcher.credits.report(ReplicaReport(f"r{replica}", slots, kv_tokens))

    def enqueue(self, tenant: int, chain: int, length: int, prompt: int) -> None:
        prefixes = tuple(100 * chain + depth for depth in range(length))
        info = RequestInfo(f"q{next(self._ids)}", f"t{tenant}", prompt, 20, prefixes=prefixes)
        self.dispatcher.enqueue(Request(info, "ingress", 20))

    def dispatch(self) -> int:
        granted = self.dispatcher.dispatch()
        for request in granted:
            request.taken_up = True
        self.running += granted
        return len(granted)

    def end(self, place: int, produced: int) -> None:
        if self.running:
            request = self.running.pop(place % len(self.running))
            self.dispatcher.progress(request, produced, 0)
            self.dispatcher.end(request, Outcome.SUCCEEDED)


ARRIVALS = st.tuples(
    st.just("enqueue"),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([30, 200, 900]),
)
EVENTS = st.lists(
    st.one_of(
        ARRIVALS,
        ARRIVALS,
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 40)),
        st.tuples(
            st.just("report"),
            st.integers(0, 2),
            st.integers(0, 5),
            st.sampled_from([400, 1500, 100_000]),
        ),
        st.tuples(st.just("dispatch")),
    ),
    min_size=20,
    max_size=60,
)
POLICIES = st.builds(
    FairPolicy,
    locality=st.sampled_from([0.0, 300.0, 1e9]),
    burst=st.sampled_from([0.0, 200.0]),
    max_overtakes=st.sampled_from([1, 3, 32]),
    reserve_rows=st.sampled_from([0, 1]),
)


@settings(deadline=None)
@given(EVENTS, POLICIES, st.integers(1, 4), st.sampled_from([1, 2]))
def test_each_choice_is_the_defined_one(events, policy, tenants, bands):
    fleet = Fleet(CheckedDispatcher, policy, tenants, bands)
    fleet.report(0, 2, 1500)
    for kind, *details in events:
        if kind == "enqueue":
            tenant, *rest = details
            fleet.enqueue(tenant % tenants, *rest)
        else:
            getattr(fleet, kind)(*details)
    fleet.dispatch()


def busy(fleet: Fleet, rng: Random, tenants: int, replicas: int, rounds: int) -> None:
    """All slots are taken; each round ends as many as it lets wait."""
    for replica in range(replicas):
        fleet.report(replica, slots=8, kv_tokens=8_000)
    for turn in range(rounds):
        for _ in range(8 * replicas if not turn else replicas):
            length, prompt = rng.randrange(6), rng.choice([100, 500, 2_000])
            fleet.enqueue(rng.randrange(tenants), rng.randrange(40), length, prompt)
        fleet.dispatch()
        for _ in range(replicas):
            fleet.end(rng.randrange(10_000), rng.randrange(40))


def test_each_choice_of_a_busy_fleet_is_the_defined_one():
    """More tenants than heads are looked at, prompts of all lengths, some without room."""
    fleet = Fleet(CheckedDispatcher, FairPolicy(burst=0.0, max_overtakes=6), tenants=24)
    busy(fleet, Random(1), tenants=24, replicas=12, rounds=12)
    assert fleet.dispatcher.compared > 100
    assert fleet.dispatcher.local > 20


def test_a_grant_costs_little_more_with_many_replicas():
    """Prefixes of sixteen candidates are not compared with what each replica has."""

    def seconds_a_grant(replicas: int) -> float:
        fleet = Fleet(Dispatcher, FairPolicy(), tenants=20)
        for replica in range(replicas):
            fleet.report(replica, slots=1_000 // replicas, kv_tokens=10**8)
        for number in range(1_000):
            fleet.enqueue(number % 20, number % 97, 5, 800)
        started = time.process_time()
        granted = fleet.dispatch()
        return (time.process_time() - started) / granted

    few, many = (min(seconds_a_grant(replicas) for _ in range(3)) for replicas in (2, 200))
    assert many < 3 * few
