"""The guarantees of docs/fairness.md in a world that counts tokens step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from router.ledger import Usage
from router.policy import FairPolicy
from tests.router.world import Ingress, World, tenants_of

NO_LIMITS = {"max_concurrency": 10_000, "max_queued": 10_000}


def world_of(
    weights: dict[str, float], slots: int, *, policy: FairPolicy | None = None, cached: float = 0.0
) -> tuple[World, Ingress]:
    tenants = tenants_of(**{name: {"weight": w, **NO_LIMITS} for name, w in weights.items()})
    world = World(tenants, policy=policy or FairPolicy(), cached_share=cached)
    world.add_replica(slots)
    return world, world.add_ingress()


def cost(policy: FairPolicy, usage: Usage) -> float:
    """Service as the order counts it."""
    uncached = usage.prompt_tokens - usage.cached_tokens
    return (
        policy.w_p * uncached + policy.w_c * usage.cached_tokens + policy.w_q * usage.output_tokens
    )


def service(world: World) -> dict[str, float]:
    """Cost of what each tenant was served so far."""
    usage = world.router.snapshot().usage
    return {
        tenant.id: cost(world.policy, usage[tenant.id]) if tenant.id in usage else 0.0
        for tenant in world.tenants.tenants
    }


def waiting(ingress: Ingress, tenant: str) -> int:
    return sum(info.tenant == tenant for info in ingress.waiting.values())


@dataclass
class Shape:
    """What requests of a tenant look like."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    prefixes: int = 0
    """Shared beginnings that a prompt has one of."""

    def submit(self, world: World, ingress: Ingress, tenant: str, rng: random.Random) -> None:
        prompt, output = rng.randint(*self.prompt), rng.randint(*self.output)
        prefixes = (hash((tenant, rng.randrange(self.prefixes))),) if self.prefixes else ()
        world.submit(ingress, tenant, prompt, output, self.output[1], prefixes)


def backlogged(
    world: World, ingress: Ingress, shapes: dict[str, Shape], steps: int, seed: int, depth: int = 20
) -> Iterator[None]:
    """Let every tenant have `depth` requests waiting, always, for so many token steps."""
    rng = random.Random(seed)
    for _ in range(steps):
        for tenant, shape in shapes.items():
            while waiting(ingress, tenant) < depth:
                shape.submit(world, ingress, tenant, rng)
        world.exchange(ingress)
        yield
        world.step()


@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}]
)
def test_service_is_divided_by_weight(weights):
    """Tenants with short and long prompts and answers get their shares to within 1 %."""
    shapes = {
        "a": Shape((1, 20), (20, 60)),
        "b": Shape((100, 300), (1, 10)),
        "c": Shape((1, 5), (1, 5)),
        "d": Shape((50, 50), (1, 100)),
    }
    world, ingress = world_of(weights, slots=16)
    for _ in backlogged(world, ingress, {name: shapes[name] for name in weights}, 6000, seed=1):
        pass
    served = service(world)
    total = sum(served.values())
    for tenant, weight in weights.items():
        assert served[tenant] / total == pytest.approx(weight / sum(weights.values()), abs=0.01)


def test_weights_that_change_divide_what_comes_from_then_on():
    """Nobody owes or is owed what other weights would have given before."""
    world, ingress = world_of({"a": 1.0, "b": 3.0}, slots=16)
    shapes = {"a": Shape((1, 20), (20, 60)), "b": Shape((100, 300), (1, 10))}
    for _ in backlogged(world, ingress, shapes, 2000, seed=1):
        pass
    before = service(world)
    heavier = {name: {"weight": w, **NO_LIMITS} for name, w in (("a", 4.0), ("b", 1.0))}
    world.router.update_tenants(tenants_of(**heavier))
    for _ in backlogged(world, ingress, shapes, 2000, seed=2):
        pass
    gained = {tenant: total - before[tenant] for tenant, total in service(world).items()}
    assert gained["a"] / sum(gained.values()) == pytest.approx(0.8, abs=0.02)


def test_a_late_tenant_is_served_next_and_not_behind_the_backlog():
    world, ingress = world_of({"flood": 1.0, "late": 1.0}, slots=4)
    for _ in range(500):
        world.submit(ingress, "flood")
    for _ in range(50):
        world.exchange(ingress)
        world.step()
    late = world.submit(ingress, "late")
    for _ in range(5 + 1):
        world.exchange(ingress)
        if late in ingress.leases:
            break
        world.step()
    assert late in ingress.leases
    assert waiting(ingress, "flood") > 400


@pytest.mark.parametrize("burst", [0.0, 200.0])
def test_an_idle_tenant_banks_no_more_than_its_burst(burst):
    """Whatever the flood had meanwhile, what the idle one gets first is its burst."""
    policy = FairPolicy(burst=burst)
    world, ingress = world_of({"flood": 1.0, "idle": 1.0}, slots=1, policy=policy)
    for _ in backlogged(world, ingress, {"flood": Shape((10, 10), (5, 5))}, 1000, seed=1):
        pass
    before = service(world)
    shapes = dict.fromkeys(("flood", "idle"), Shape((10, 10), (5, 5)))
    ahead = 0.0
    for _ in backlogged(world, ingress, shapes, 1000, seed=2):
        now = service(world)
        ahead = max(ahead, now["idle"] - (now["flood"] - before["flood"]))
    one_request = 10 + 2 * 5
    assert burst - one_request <= ahead <= burst + 2 * one_request


def test_nothing_is_banked_over_a_time_in_which_nobody_wants_anything():
    world, ingress = world_of({"a": 1.0, "b": 1.0}, slots=2, policy=FairPolicy(burst=0.0))
    shape = Shape((10, 10), (5, 5))
    for _ in backlogged(world, ingress, {"a": shape}, 500, seed=1):
        pass
    for request_id in [*ingress.waiting, *ingress.leases]:
        world.cancel(ingress, request_id)
    world.exchange(ingress)
    before = service(world)
    for _ in backlogged(world, ingress, {"a": shape, "b": shape}, 100, seed=2):
        pass
    gained = {tenant: total - before[tenant] for tenant, total in service(world).items()}
    assert gained["a"] == pytest.approx(gained["b"], abs=4 * (10 + 2 * 5))
