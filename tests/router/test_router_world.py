"""The router in a hostile world: everything that can be lost, late, repeated or dead."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from router.messages import Sync
from router.policy import FairPolicy
from tests.router.world import (
    Ingress,
    Replica,
    World,
    assert_drained,
    assert_work_conserving,
    held_credits,
    tenants_of,
)

LIMITS = {
    "a": {"weight": 1.0, "max_concurrency": 1, "max_queued": 0},
    "b": {"weight": 3.0, "max_concurrency": 2, "max_queued": 2},
    "c": {"weight": 0.5, "max_concurrency": 8, "max_queued": 20},
}
MODELS = ("m", "n")
GRACE_S = 0.5


class HostileWorld(RuleBasedStateMachine):
    ingresses = Bundle("ingresses")
    replicas = Bundle("replicas")
    delayed = Bundle("delayed")

    @initialize(target=ingresses)
    def begin(self) -> Ingress:
        self.world = World(
            tenants_of(**LIMITS),
            policy=FairPolicy(max_overtakes=2, burst=20.0),
            grace_s=GRACE_S,
            cached_share=0.5,
        )
        for model in MODELS:
            self.world.add_replica(slots=2, kv_tokens=60, model=model)
        return self.world.add_ingress()

    @rule(target=ingresses)
    def start_ingress(self) -> Ingress:
        return self.world.add_ingress()

    @rule(
        target=replicas,
        slots=st.integers(1, 4),
        kv_tokens=st.integers(20, 200),
        model=st.sampled_from(MODELS),
    )
    def start_replica(self, slots: int, kv_tokens: int, model: str) -> Replica:
        return self.act(lambda: self.world.add_replica(slots, kv_tokens, model))

    @rule(
        ingress=ingresses,
        tenant=st.sampled_from([*LIMITS, "nobody"]),
        prompt=st.integers(1, 80),
        output=st.integers(1, 6),
        extra=st.integers(0, 50),
        models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=4),
    )
    def submit(
        self,
        ingress: Ingress,
        tenant: str,
        prompt: int,
        output: int,
        extra: int,
        models: list[str],
    ) -> None:
        for model in models if self.alive(ingress) else ():
            self.world.submit(ingress, tenant, prompt, output, output + extra, model=model)

    @rule(ingress=ingresses)
    def exchange(self, ingress: Ingress) -> None:
        if self.alive(ingress):
            self.act(lambda: self.world.exchange(ingress))

    @rule(ingress=ingresses)
    def lose_reply(self, ingress: Ingress) -> None:
        if self.alive(ingress):
            self.act(lambda: self.world.deliver(ingress.next_sync()))

    @rule(target=delayed, ingress=ingresses)
    def delay_sync(self, ingress: Ingress) -> Any:
        return ingress.next_sync() if self.alive(ingress) else multiple()

    @rule(sync=consumes(delayed), times=st.integers(1, 2))
    def deliver_late(self, sync: Sync, times: int) -> None:
        """Nobody waits for the reply any more."""
        for _ in range(times):
            self.act(lambda: self.world.deliver(sync))

    @rule(steps=st.integers(1, 4))
    def produce(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(ingress=ingresses, choice=st.integers(0, 100))
    def cancel(self, ingress: Ingress, choice: int) -> None:
        ids = [*ingress.waiting, *ingress.leases]
        if ids and self.alive(ingress):
            self.world.cancel(ingress, ids[choice % len(ids)])

    @rule(replica=replicas, slots=st.integers(0, 4))
    def resize_replica(self, replica: Replica, slots: int) -> None:
        replica.slots = slots
        if replica.name in self.world.replicas and replica.talks:
            self.act(lambda: self.world.report(replica))

    @rule(replica=replicas, talks=st.booleans())
    def silence_replica(self, replica: Replica, talks: bool) -> None:
        replica.talks = talks

    @rule(replica=consumes(replicas))
    def kill_replica(self, replica: Replica) -> None:
        self.world.kill_replica(replica)

    @rule(ingress=consumes(ingresses))
    def kill_ingress(self, ingress: Ingress) -> None:
        if self.alive(ingress):
            self.world.kill_ingress(ingress)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]), everybody_talks=st.booleans())
    def pass_time(self, seconds: float, everybody_talks: bool) -> None:
        self.world.clock.now += seconds
        if everybody_talks:
            self.everybody_talks()
        self.act(self.world.router.expire)

    @rule()
    def restart_router(self) -> None:
        self.world.restart_router()

    @rule(gone=st.sampled_from([*LIMITS, None]), max_concurrency=st.integers(1, 4))
    def configure(self, gone: str | None, max_concurrency: int) -> None:
        limits = {name: dict(values) for name, values in LIMITS.items() if name != gone}
        limits.setdefault("b", {})["max_concurrency"] = max_concurrency
        self.world.tenants = tenants_of(**limits)
        self.act(lambda: self.world.router.update_tenants(self.world.tenants))

    @invariant()
    def news_names_living_conversations(self) -> None:
        assert self.world.router.take_news() <= set(self.world.router._ingresses)

    def teardown(self) -> None:
        """When the world behaves again everything ends, once, and nothing is left behind."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for replica in world.replicas.values():
            replica.slots, replica.talks = max(replica.slots, 1), True
        self.drain()
        world.clock.now += 61.0
        self.everybody_talks()
        world.router.expire()
        assert_drained(world.router)
        assert world.ended.keys() | world.lost == world.lengths.keys()
        assert not world.ended.keys() & world.lost
        usage = world.router.snapshot().usage.values()
        assert sum(sum(each.outcomes.values()) for each in usage) == len(world.booked)

    def drain(self) -> None:
        world = self.world
        for _ in range(20 + 10 * len(world.lengths)):
            world.clock.now += 0.6
            self.everybody_talks()
            self.act(world.router.expire)
            world.step()
            if not any(x.waiting or x.leases or x.endings for x in world.ingresses.values()):
                world.exchange_all()
                return
        raise AssertionError("requests wait for ever")

    def everybody_talks(self) -> None:
        for replica in self.world.replicas.values():
            if replica.talks:
                self.act(lambda replica=replica: self.world.report(replica))
        for ingress in list(self.world.ingresses.values()):
            self.act(lambda ingress=ingress: self.world.exchange(ingress))

    def alive(self, ingress: Ingress) -> bool:
        return ingress.name in self.world.ingresses

    def act(self, action):
        """What holds after every word to the router, whichever it was."""
        router = self.world.router
        before = held_credits(router)
        result = action()
        snapshot = router.snapshot()
        for request_id, (info, replica) in held_credits(router).items():
            if request_id not in before:
                held = snapshot.replicas[replica]
                assert held.model == info.model
                assert held.leases <= held.slots
                assert held.leases == 1 or held.kv_held <= held.kv_tokens
                limit = router._tenants[info.tenant].max_concurrency
                assert snapshot.tenants[info.tenant].running <= limit
        if not router._in_grace():
            assert_work_conserving(router)
        return result


HostileWorld.TestCase.settings = settings(deadline=None)
TestHostileWorld = HostileWorld.TestCase
