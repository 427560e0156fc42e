import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fair_queue import FairQueue
from router.messages import RequestInfo
from router.policy import FairPolicy
from router.request import Request
from router.tenant import Tenant

NO_BURST = FairPolicy(burst=0.0)


def queue_of(policy: FairPolicy = NO_BURST, **weights: float) -> FairQueue:
    queue = FairQueue(policy)
    queue.configure(
        [Tenant(id=name, weight=float(w), max_concurrency=1000) for name, w in weights.items()]
    )
    return queue


def request_of(tenant: str, name: str = "", priority: int = 0) -> Request:
    return Request(RequestInfo(name, tenant, 10, 10, priority=priority), "ingress", expected=10)


def enqueue(queue: FairQueue, tenant: str, *names: str) -> None:
    for name in names:
        queue.push(request_of(tenant, name))


def head_of(queue: FairQueue) -> Request | None:
    first = queue.bands[0].first()
    return None if first is None else first.head


def dispatch(queue: FairQueue, cost: float = 10.0) -> str:
    """Start the head and charge it. Returns its name."""
    head = head_of(queue)
    assert head is not None
    queue.bands[0].advance()
    queue.start(head)
    queue.charge(head.info.tenant, cost)
    return head.info.request_id


def dispatch_all(queue: FairQueue, cost: float = 10.0) -> list[str]:
    order = []
    while head_of(queue) is not None:
        order.append(dispatch(queue, cost))
    return order


def counter(queue: FairQueue, tenant: str) -> float:
    return queue.tenant(tenant).counter.value


def test_requests_of_one_tenant_are_served_in_order():
    queue = queue_of(a=1)
    enqueue(queue, "a", "1", "2", "3")
    assert dispatch_all(queue) == ["1", "2", "3"]


def test_a_request_put_in_front_comes_before_those_of_its_tenant():
    queue = queue_of(a=1)
    enqueue(queue, "a", "1", "2")
    queue.push(request_of("a", "again"), front=True)
    assert dispatch_all(queue) == ["again", "1", "2"]


def test_equal_tenants_take_turns_however_much_one_has_queued():
    queue = queue_of(a=1, b=1)
    enqueue(queue, "a", *"aaaaaa")
    enqueue(queue, "b", *"bb")
    assert "".join(dispatch_all(queue)) == "ababaaaa"


def test_weights_divide_the_dispatches():
    queue = queue_of(a=1, b=3)
    enqueue(queue, "a", *"a" * 100)
    enqueue(queue, "b", *"b" * 100)
    order = [dispatch(queue) for _ in range(80)]
    assert order.count("b") == 60


def test_priority_follows_usage_that_grows_while_a_tenant_waits():
    """X9: b queued ten requests while it had used nothing; each one served counts at once."""
    queue = queue_of(a=1, b=1)
    enqueue(queue, "b", *"bbbbbbbbbb")
    assert dispatch(queue) == "b"
    queue.charge("b", 1000.0)
    enqueue(queue, "a", "a")
    assert dispatch(queue) == "a"


def test_a_correction_downwards_moves_a_waiting_tenant_up():
    queue = queue_of(a=1, b=1)
    enqueue(queue, "a", "a", "a")
    enqueue(queue, "b", "b", "b")
    queue.charge("a", 100.0)
    queue.charge("b", 50.0)
    assert head_of(queue).info.tenant == "b"
    queue.charge("a", -75.0)
    assert head_of(queue).info.tenant == "a"


def test_expected_output_orders_but_is_not_charged():
    queue = queue_of(FairPolicy(burst=0.0, lam=0.25, w_q=2.0), a=1, b=1)
    enqueue(queue, "a", "a")
    enqueue(queue, "b", "b")
    queue.charge("a", 0.0, outstanding=100)
    queue.charge("b", 49.0)
    assert head_of(queue).info.tenant == "b"
    queue.charge("b", 2.0)
    assert head_of(queue).info.tenant == "a"
    queue.charge("a", 0.0, outstanding=-100)
    assert counter(queue, "a") == 0.0


def test_expected_output_that_did_not_come_moves_a_tenant_up_again():
    queue = queue_of(a=1, b=1)
    enqueue(queue, "a", "a")
    enqueue(queue, "b", "b")
    queue.charge("a", 0.0, outstanding=100)
    assert head_of(queue).info.tenant == "b"
    queue.charge("b", 10.0)
    queue.charge("a", 0.0, outstanding=-100)
    assert head_of(queue).info.tenant == "a"


def test_a_late_tenant_is_next_and_banks_no_more_than_its_burst():
    policy = FairPolicy(burst=30.0)
    queue = queue_of(policy, a=1, b=1, late=2)
    enqueue(queue, "a", *"a" * 100)
    enqueue(queue, "b", *"b" * 100)
    for _ in range(100):
        dispatch(queue)
    enqueue(queue, "late", *"l" * 100)
    assert counter(queue, "late") == queue.virtual_time - 30.0 / 2
    order = "".join(dispatch(queue) for _ in range(40))
    assert order.startswith("lll")
    # 30 banked are three requests beyond its half of the service.
    assert order.count("l") == pytest.approx(20 + 1.5, abs=1.5)


def test_service_is_not_banked_over_a_gap_in_which_nobody_waits():
    """V is monotone: b was idle while a had 1,000, and nothing is queued when both come."""
    queue = queue_of(a=1, b=1)
    for _ in range(100):
        enqueue(queue, "a", "a")
        dispatch(queue)
    enqueue(queue, "b", *"b" * 10)
    enqueue(queue, "a", *"a" * 10)
    assert "".join(dispatch(queue) for _ in range(8)).count("a") == pytest.approx(4, abs=1)


def test_the_virtual_time_never_falls():
    queue = queue_of(a=1, b=1)
    enqueue(queue, "a", "a", "a")
    queue.charge("a", 100.0)
    dispatch(queue)
    assert queue.virtual_time == 100.0
    queue.charge("a", -90.0)
    dispatch(queue)
    assert queue.virtual_time == 100.0


def test_a_tenant_at_its_concurrency_is_passed_over_until_something_of_it_ends():
    queue = FairQueue(NO_BURST)
    queue.configure([Tenant(id="a", max_concurrency=1), Tenant(id="b", max_concurrency=9)])
    first = request_of("a", "a1")
    queue.push(first)
    enqueue(queue, "a", "a2")
    enqueue(queue, "b", "b1", "b2")
    assert [dispatch(queue, cost=0.0) for _ in range(3)] == ["a1", "b1", "b2"]
    assert head_of(queue) is None
    queue.remove(first)
    assert dispatch(queue) == "a2"


def test_a_tenant_that_its_concurrency_has_held_back_comes_back_level():
    """Blocked while others were served, it banks its burst and no more."""
    queue = FairQueue(NO_BURST)
    limits = {"a": {"max_concurrency": 1, "burst": 30.0}, "b": {"max_concurrency": 999}}
    queue.configure([Tenant(id=name, **values) for name, values in limits.items()])
    running = request_of("a", "a1")
    queue.push(running)
    dispatch(queue)
    enqueue(queue, "a", *"a" * 50)
    enqueue(queue, "b", *"b" * 200)
    for _ in range(100):
        dispatch(queue)
    assert counter(queue, "a") == 10.0
    queue.remove(running)
    assert counter(queue, "a") == queue.virtual_time - 30.0 > 900.0


def test_a_skipped_tenant_comes_back_in_its_place():
    queue = queue_of(a=1, b=1)
    enqueue(queue, "a", "a")
    enqueue(queue, "b", "b")
    queue.charge("b", 5.0)
    queue.bands[0].set_aside()
    assert head_of(queue).info.tenant == "b"
    queue.bands[0].set_aside()
    assert head_of(queue) is None
    queue.bands[0].restore()
    assert head_of(queue).info.tenant == "a"


def test_new_limits_hold_at_once():
    queue = FairQueue(NO_BURST)
    queue.configure([Tenant(id="a", max_concurrency=1)])
    enqueue(queue, "a", "1", "2", "3")
    dispatch(queue)
    assert head_of(queue) is None
    queue.configure([Tenant(id="a", max_concurrency=2)])
    assert dispatch(queue) == "2"
    queue.configure([Tenant(id="a", max_concurrency=3)])
    assert head_of(queue) is not None
    queue.retire(["a"])
    assert head_of(queue) is None


def test_a_tenant_that_is_gone_leaves_once_nothing_of_it_is_left():
    queue = queue_of(a=1)
    request = request_of("a")
    queue.push(request)
    queue.retire(["a"])
    assert list(queue.tenants()) == ["a"]
    queue.remove(request)
    queue.retire(["a"])
    assert not queue.tenants()


def test_counters_resume_where_an_earlier_router_left_them():
    queue = queue_of(FairPolicy(burst=10.0), a=1, b=1, c=1)
    enqueue(queue, "c", "c")
    queue.resume({"a": 1000.0, "b": 980.0, "unknown": 1.0})
    assert [counter(queue, name) for name in "abc"] == [1000.0, 980.0, 970.0]
    queue.resume({"a": 10.0})
    assert counter(queue, "a") == 1000.0


@pytest.mark.parametrize(
    "fields",
    [
        {"w_p": -1.0},
        {"w_c": 2.0},
        {"w_q": 0.0},
        {"lam": 1.5},
        {"burst": -1},
        {"max_overtakes": -1},
        {"locality": -1.0},
        {"reserve_rows": -1},
        {"max_waiting": 0},
        {"band_shares": (0.5, 0.5, 0.0, 0.0)},
        {"band_shares": (0.5,)},
        {"band_wait_s": 0.0},
    ],
)
def test_a_policy_that_cannot_work_is_refused(fields):
    with pytest.raises(ValueError, match="fairness needs"):
        FairPolicy(**fields)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["push", "dispatch", "finish", "charge", "expect", "serve", "serve"]),
        st.sampled_from("abc"),
        st.integers(-20, 40),
    ),
    max_size=80,
)


@given(EVENTS)
def test_the_head_is_of_the_eligible_tenant_with_the_least_key(events):
    """Against the definition: c + lam * w_q * O / w over all eligible tenants. Who becomes
    eligible, after idleness or its own limit, has banked its burst at most."""
    policy = FairPolicy(burst=15.0)
    queue = FairQueue(policy)
    queue.configure(
        [Tenant(id=n, weight=w, max_concurrency=2) for n, w in [("a", 1.0), ("b", 2.0), ("c", 5.0)]]
    )
    for tenant in "abc":
        enqueue(queue, tenant, "x", "x")
    virtual_time = 0.0
    for event, tenant, amount in events:
        state = queue.tenant(tenant)
        held_back = [q for q in queue.tenants().values() if not q.eligible]
        if event == "push":
            enqueue(queue, tenant, "x")
        elif event in ("dispatch", "serve") and (head := head_of(queue)):
            eligible = [q for q in queue.tenants().values() if q.eligible]
            virtual_time = max(virtual_time, min(q.counter.value for q in eligible))
            queue.bands[0].advance()
            queue.start(head)
            if event == "serve":
                queue.charge(head.info.tenant, float(abs(amount)))
                queue.remove(head)
        elif event == "finish" and state.running:
            queue.remove(next(iter(state.running)))
        elif event == "charge":
            queue.charge(tenant, float(amount))
        elif event == "expect":
            queue.charge(tenant, 0.0, outstanding=max(amount, -state.counter.outstanding))
        assert queue.virtual_time == virtual_time
        for back in (q for q in held_back if q.eligible):
            assert back.counter.value >= virtual_time - 15.0 / back.counter.weight
        keys = {
            name: q.counter.value + 0.25 * 2.0 * q.counter.outstanding / q.counter.weight
            for name, q in queue.tenants().items()
            if q.eligible
        }
        head = head_of(queue)
        assert (head is None) == (not keys)
        assert head is None or keys[head.info.tenant] == min(keys.values())
