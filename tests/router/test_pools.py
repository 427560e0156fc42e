"""Several models: a queue and credits for each, and one tenant in all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages import HeldBack, LeaseInfo, RefusalKind, RequestInfo, Sync, SyncReply
from tests.router.desk import Desk, ending, ids, info, refused
from tests.router.world import World, assert_drained, tenants_of


def of(model: str, name: str, tenant: str = "a", **fields: object) -> RequestInfo:
    return info(name, tenant, model=model, **fields)


def desk_of(slots: int = 9, **tenants: dict[str, object]) -> Desk:
    """A replica of each of two models, named as they are."""
    desk = Desk(**tenants)
    for model in ("m", "n"):
        desk.report(slots, replica=model, model=model)
    return desk


def leases(reply: SyncReply, *infos: RequestInfo) -> tuple[LeaseInfo, ...]:
    places = {grant.request_id: grant.replica for grant in reply.grants}
    return tuple(LeaseInfo(each, places[each.request_id]) for each in infos)


def test_why_a_tenant_waits_is_told_to_those_that_show_it():
    """Its own limit, others that had less, no room for anybody, no replica at all."""
    desk = desk_of(1, a={"max_concurrency": 1}, b={}, c={}, idle={})
    first = of("m", "first"), of("n", "other", "c")
    running = desk.sync(*first)
    assert running.held_back == {}
    more = of("m", "more"), of("n", "of-b", "b"), of("n", "of-c", "c"), of("o", "cold", "b")
    reply = desk.sync(*more, leases=leases(running, *first))
    assert reply.held_back == {
        "m": {"a": HeldBack.CONCURRENCY},
        "n": {"b": HeldBack.CAPACITY, "c": HeldBack.FAIR_SHARE},
        "o": {"b": HeldBack.NO_REPLICA},
    }
    tenants = desk.snapshot().tenants
    assert {name: tenants[name].held_back for name in "abc"} == {
        "a": {"m": HeldBack.CONCURRENCY},
        "b": {"n": HeldBack.CAPACITY, "o": HeldBack.NO_REPLICA},
        "c": {"n": HeldBack.FAIR_SHARE},
    }
    other = desk.router.sync(Sync("other", 1, 0, waiting=(of("n", "elsewhere", "c"),)))
    assert {model: set(told) for model, told in other.held_back.items() if told} == {"n": {"c"}}


def test_a_request_runs_on_a_replica_of_its_model_only():
    desk = desk_of()
    reply = desk.sync(of("m", "1"), of("n", "2"), of("unheard-of", "3"))
    assert {grant.request_id: grant.replica for grant in reply.grants} == {"1": "m", "2": "n"}
    assert desk.snapshot().waiting == {"m": 0, "n": 0, "unheard-of": 1}
    assert {each.model for each in desk.snapshot().replicas.values()} == {"m", "n"}


def test_a_full_pool_does_not_hold_up_another():
    desk = Desk(a={}, b={})
    desk.report(0, replica="m", model="m")
    desk.report(1, replica="n", model="n")
    flood = [of("m", f"m{number}") for number in range(40)]
    assert ids(desk.sync(*flood, of("n", "n"))) == ["n"]


def test_service_by_one_model_does_not_count_in_the_order_of_another():
    """One V per pool: a has used much of m, and is level with b where n is concerned."""
    desk = Desk(a={}, b={})
    desk.report(1, replica="m", model="m")
    large = of("m", "large", prompt_tokens=10_000)
    reply = desk.sync(large)
    desk.report(1, replica="n", model="n")
    desk.sync(of("n", "first", "b"), leases=leases(reply, large))
    asked = [of("n", "a", "a"), of("n", "b", "b"), of("m", "a'", "a"), of("m", "b'", "b")]
    desk.sync(*asked, endings=(ending(large),))
    order = [ids(desk.sync(*asked[index:])) for index in range(4)]
    assert desk.snapshot().tenants["a"].virtual_times["n"] <= 100.0
    assert "b'" in order[0]
    assert "a'" not in order[0]


def test_concurrency_spans_the_pools():
    """What ends at one model lets a request for the other begin."""
    desk = desk_of(a={"max_concurrency": 1})
    first, second = of("m", "1"), of("n", "2")
    reply = desk.sync(first)
    assert ids(desk.sync(second, leases=leases(reply, first))) == []
    assert (desk.running(), desk.queued()) == (1, 1)
    reply = desk.sync(second, endings=(ending(first),))
    assert [(grant.request_id, grant.replica) for grant in reply.grants] == [("2", "n")]


def test_more_concurrency_lets_the_requests_of_all_pools_begin():
    desk = desk_of(a={"max_concurrency": 1})
    waiting = [of("m", "1"), of("m", "2"), of("n", "3")]
    assert len(desk.sync(*waiting).grants) == 1
    desk.router.update_tenants(tenants_of(a={"max_concurrency": 3}))
    assert sorted(ids(desk.sync(*waiting))) == ["1", "2", "3"]


def test_places_that_a_tenant_has_go_round_its_models():
    """One at a time, with many waiting for each of two models: neither starves."""
    desk = desk_of(a={"max_concurrency": 1, "max_queued": 99})
    waiting = [of(model, f"{model}{number}") for model in "mn" for number in range(6)]
    order, over = "", ()
    while waiting:
        reply = desk.sync(*waiting, endings=over)
        (name,) = ids(reply)
        done = next(each for each in waiting if each.request_id == name)
        waiting.remove(done)
        order, over = order + done.model, (ending(done),)
        desk.sync(*waiting, leases=leases(reply, done))
    assert order.count("m") == order.count("n") == 6
    assert "mmm" not in order
    assert "nnn" not in order


def test_room_to_wait_spans_the_pools():
    desk = Desk(a={"max_queued": 2})
    reply = desk.sync(of("m", "1"), of("n", "2"), of("n", "3"))
    assert refused(reply) == ["3"]
    assert desk.snapshot().waiting == {"m": 1, "n": 1}


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 150}, {"daily_budget": 250e-6}]
)
def test_rates_and_money_span_the_pools(limits):
    desk = desk_of(a=limits)
    first = of("m", "1")
    reply = desk.sync(first)
    assert ids(reply) == ["1"]
    reply = desk.sync(of("m", "2"), leases=leases(reply, first))
    (refusal,) = reply.refusals
    assert refusal.kind is RefusalKind.RATE


def test_a_model_is_paid_for_at_its_own_price():
    """The model without a price is free: no budget keeps anybody from it."""
    desk = desk_of(a={"daily_budget": 100e-6})
    reply = desk.sync(of("m", "dear", prompt_tokens=200), of("n", "free", prompt_tokens=200))
    assert (ids(reply), refused(reply)) == (["free"], ["dear"])


def test_a_restarted_router_takes_up_the_order_of_each_pool():
    desk = Desk(a={}, b={})
    told = {"m": {"a": 500.0, "b": 100.0}, "n": {"a": 3.0, "b": 900.0}}
    waiting = [of(model, model + tenant, tenant) for model in "mn" for tenant in "ab"]
    reply = desk.sync(*waiting, epoch=3, virtual_times=told)
    assert reply.virtual_times == told
    assert desk.snapshot().virtual_times == {"m": 100.0, "n": 3.0}


def test_a_tenant_that_comes_back_finds_its_pools_as_they_were():
    desk = desk_of(a={"max_concurrency": 2}, b={})
    runs = of("m", "1")
    reply = desk.sync(runs)
    desk.router.update_tenants(tenants_of(b={}))
    desk.sync(leases=leases(reply, runs))
    desk.router.update_tenants(tenants_of(a={"max_concurrency": 2}, b={}))
    waiting = [of("n", "2"), of("n", "3")]
    assert len(desk.sync(*waiting, leases=leases(reply, runs)).grants) == 1
    assert desk.running() == 2


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("mn"), st.integers(-2, 2)), max_size=40
    ),
    limit=st.integers(1, 3),
    slots=st.integers(1, 3),
)
def test_no_tenant_ever_runs_more_than_it_may_in_all_pools_together(arrivals, limit, slots):
    limits = {"max_concurrency": limit, "max_queued": 99}
    world = World(tenants_of(a=limits, b=limits))
    for model in "mn":
        world.add_replica(slots, model=model)
    ingress = world.add_ingress()
    for tenant, model, pause in arrivals:
        world.submit(ingress, tenant, model=model)
        for _ in range(max(pause, 0)):
            world.exchange(ingress)
            world.step()
            state = world.router.snapshot()
            assert all(each.running <= limit for each in state.tenants.values())
    for _ in range(20 * len(arrivals) + 2):
        world.exchange(ingress)
        world.step()
    assert_drained(world.router)
    assert len(world.ended) == len(arrivals)
