"""Changes of what waits, told over a network that loses, repeats and reorders them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.messages import RequestInfo, Sync, SyncReply
from router.router import Router
from serve_app.fleet.request_state import Waiting
from serve_app.fleet.waiting_set import WaitingSet
from tests.router.world import Ingress, World, tenants_of

LIMITS: dict[str, dict[str, object]] = {
    "a": {"max_concurrency": 1, "max_queued": 9},
    "b": {"max_concurrency": 4, "max_queued": 30},
    "c": {"max_queued": 9, "max_wait_s": 2.0},
}


@dataclass
class DeltaIngress(Ingress):
    """Shows changes where it can, and notes what it would have shown."""

    shown: WaitingSet = field(default_factory=lambda: WaitingSet(small=-1))
    whole: dict[int, Sync] = field(default_factory=dict)
    """By sequence."""

    def next_sync(self) -> Sync:
        sync = self.whole[self.sequence] = super().next_sync()
        for name in [one.request.request_id for one in self.shown.values()]:
            if name not in self.waiting:
                self.shown.leave(name)
        for name, info in self.waiting.items():
            known = self.shown.get(name)
            if known is None or known.request != info:
                self.shown.add(waiting(info))
        told = self.shown.show(sync.sequence)
        if told.base is None:
            return sync
        return replace(sync, **told._asdict())


class TwinRouter(Router):
    """Beside it, one that is shown everything whenever this one understands the changes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.twin = Router(*args, **options)
        super().__init__(*args, **options)

    def report(self, report: Any) -> None:
        super().report(report)
        self.twin.report(report)

    def expire(self) -> None:
        super().expire()
        self.twin.expire()

    def update_tenants(self, *args: Any) -> None:
        super().update_tenants(*args)
        self.twin.update_tenants(*args)


class DeltaWorld(World):
    ingress_of, router_of = DeltaIngress, TwinRouter
    router: TwinRouter

    def __init__(self, *args: Any, **options: Any) -> None:
        self.wholes: dict[str, dict[int, Sync]] = {}
        super().__init__(*args, **options)

    def add_ingress(self) -> Ingress:
        ingress = super().add_ingress()
        assert isinstance(ingress, DeltaIngress)
        self.wholes[ingress.name] = ingress.whole
        return ingress

    def deliver(self, sync: Sync) -> SyncReply:
        reply = super().deliver(sync)
        if not reply.lost:
            expected = self.router.twin.sync(self.wholes[sync.ingress][sync.sequence])
            assert told(reply) == told(expected)
            assert state(self.router) == state(self.router.twin)
        return reply

    def exchange(self, ingress: Ingress) -> SyncReply:
        assert isinstance(ingress, DeltaIngress)
        sync = ingress.next_sync()
        reply = self.deliver(sync)
        if reply.lost:
            assert sync.base is not None
            ingress.shown.show_all()
            return self.exchange(ingress)
        self.hear(ingress, reply)
        ingress.admitted = set(ingress.waiting)
        ingress.shown.heard(sync.sequence)
        return reply


def told(reply: SyncReply) -> tuple[Any, ...]:
    """Whatever the order."""
    lists = (reply.grants, reply.refusals, reply.settled)
    return *map(frozenset, lists), reply.virtual_times, reply.rate_limits


def state(router: Router) -> tuple[Any, ...]:
    requests = {
        name: {key: (one.info, one.state, one.replica) for key, one in ingress.requests.items()}
        for name, ingress in router._ingresses.items()
    }
    return router.snapshot(), requests


class Deltas(RuleBasedStateMachine):
    """One ingress whose changes are lost, late, repeated or heard by nobody that knows it, against
    a router that is shown everything: every state and every answer is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.world = DeltaWorld(tenants_of(**LIMITS))
        self.replica = self.world.add_replica(slots=2)
        self.ingress = self.world.add_ingress()
        self.late: list[Sync] = []
        self.exchange(1)

    @rule(tenants=st.lists(st.sampled_from([*LIMITS, "nobody"]), min_size=3, max_size=8))
    def come(self, tenants: list[str]) -> None:
        for tenant in tenants:
            self.world.submit(self.ingress, tenant, output=2)

    @rule(choice=st.integers(0, 9))
    def give_up(self, choice: int) -> None:
        """It waits, so nothing is said of it but that it is gone."""
        if names := list(self.ingress.waiting):
            del self.ingress.waiting[names[choice % len(names)]]

    @rule(choice=st.integers(0, 9))
    def begin_again(self, choice: int) -> None:
        if names := list(self.ingress.leases):
            lease = self.ingress.leases[names[choice % len(names)]]
            self.world._again(self.ingress, lease.request)
            self.replica.jobs.pop(lease.request.request_id, None)

    @rule()
    def produce(self) -> None:
        self.world.step()

    @rule(times=st.integers(1, 3))
    def exchange(self, times: int) -> None:
        for _ in range(times):
            self.world.exchange(self.ingress)

    @rule(times=st.integers(1, 2))
    def lose_reply(self, times: int) -> None:
        sync = self.ingress.next_sync()
        for _ in range(times):
            self.world.deliver(sync)

    @rule()
    def delay(self) -> None:
        self.late.append(self.ingress.next_sync())

    @precondition(lambda self: self.late)
    @rule(choice=st.integers(0, 9))
    def deliver_late(self, choice: int) -> None:
        self.world.deliver(self.late.pop(choice % len(self.late)))

    @rule(what=st.sampled_from(["silence", "death", "router", "ingress", "tenants"]))
    def disturb(self, what: str) -> None:
        world = self.world
        match what:
            case "silence" | "death":
                world.clock.now += 2.5 if what == "silence" else 61.0
                world.router.expire()
            case "router":
                world.restart_router()
            case "ingress":
                world.kill_ingress(self.ingress)
                self.ingress = world.add_ingress()
            case "tenants":
                is_gone = len(world.tenants.tenants) < len(LIMITS)
                world.tenants = tenants_of(**(LIMITS if is_gone else {"a": LIMITS["a"]}))
                world.router.update_tenants(world.tenants)
        world.report(self.replica)

    @invariant()
    def twins_agree(self) -> None:
        assert state(self.world.router) == state(self.world.router.twin)

    def teardown(self) -> None:
        """One answer is enough to know everything."""
        self.world.exchange(self.ingress)
        self.world.exchange(self.ingress)
        known = self.world.router._ingresses[self.ingress.name].requests
        assert known.keys() == self.ingress.waiting.keys() | self.ingress.leases.keys()


Deltas.TestCase.settings = settings(deadline=None, max_examples=200)
TestDeltas = Deltas.TestCase


def waiting(info: RequestInfo) -> Waiting:
    return Waiting(info, cast(Any, None), 0.0, None)


def request(name: str) -> RequestInfo:
    return RequestInfo(name, "a", prompt_tokens=1, max_tokens=1)


def set_of(*names: str, small: int = -1) -> WaitingSet:
    """These were shown in sync 1, which was answered."""
    found = WaitingSet(small)
    for name in names:
        found.add(waiting(request(name)))
    found.show(1)
    found.heard(1)
    return found


def test_what_leaves_is_told_until_an_answer_and_then_no_more() -> None:
    found = set_of("a", "b", "c")
    found.leave("a")
    assert found.show(2) == ((), ("a",), 1, 0)
    found.leave("b")
    assert set(found.show(3).gone) == {"a", "b"}, "nobody has answered"
    found.leave("c")  # while the answer is under way
    found.heard(3)
    assert found.show(4) == ((), ("c",), 3, 0)
    found.heard(4)
    assert found.show(5) == ((), (), 4, 0)


def test_what_came_and_left_between_is_told_as_gone() -> None:
    found = set_of("a")
    found.add(waiting(request("b")))
    assert found.show(2).waiting == (request("b"),)
    found.leave("b")
    assert found.show(3) == ((), ("b",), 1, 0), "the lost sync may have been read"
    found.add(waiting(request("c")))
    found.leave("c")
    assert found.show(4).gone == ("b",), "nobody has ever heard of it"


def test_few_are_shown_whole() -> None:
    found = set_of("a", "b", small=1)
    assert found.show(2).base == 1
    found.leave("b")
    assert found.show(3) == ((request("a"),), (), None, 1)
