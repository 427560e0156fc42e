import pytest

from router.accounts import Accounts
from router.dispatcher import Dispatcher
from router.messages import Outcome, ReplicaReport, RequestInfo
from router.policy import FairPolicy
from router.request import Request, State
from tests.router.world import Clock, tenants_of

POLICY = FairPolicy(burst=0.0, max_overtakes=3)


class Pool:
    """A dispatcher with short ways to feed it."""

    def __init__(self, policy: FairPolicy = POLICY, **tenants: dict[str, object]) -> None:
        self.clock = Clock()
        accounts, configured = Accounts(self.clock), tenants_of(**tenants).tenants
        accounts.configure(configured)
        self.dispatcher = Dispatcher(policy, self.clock, 2.0, accounts)
        self.dispatcher.configure(configured)
        self.count = 0

    def report(self, name: str, slots: int, kv_tokens: int = 10_000) -> None:
        self.dispatcher.credits.report(ReplicaReport(name, slots, kv_tokens))

    def enqueue(
        self, tenant: str, prompt: int = 10, expected: int = 10, prefixes: tuple[int, ...] = ()
    ) -> Request:
        self.count += 1
        name = f"{tenant}{self.count}"
        info = RequestInfo(name, tenant, prompt, expected, prefixes=prefixes)
        request = Request(info, "ingress", expected)
        self.dispatcher.enqueue(request)
        return request

    def dispatch(self) -> list[str]:
        return [request.info.tenant for request in self.dispatcher.dispatch()]

    def counter(self, tenant: str) -> float:
        return self.dispatcher.queue.tenant(tenant).counter.value


def test_every_free_credit_is_given_while_somebody_waits():
    pool = Pool(a={}, b={})
    pool.report("r1", slots=2)
    pool.report("r2", slots=1)
    for tenant in "aaab":
        pool.enqueue(tenant)
    assert sorted(pool.dispatch()) == ["a", "a", "b"]
    assert pool.dispatch() == []


def test_a_prompt_is_charged_at_the_grant_and_corrected_by_what_was_cached():
    pool = Pool(FairPolicy(w_p=1.0, w_c=0.25, w_q=2.0), a={"weight": 2.0})
    pool.report("r", slots=1)
    request = pool.enqueue("a", prompt=100)
    assert pool.counter("a") == 0.0
    pool.dispatch()
    assert pool.counter("a") == 50.0
    pool.dispatcher.progress(request, produced=0, cached=80)
    assert pool.counter("a") == (20 + 0.25 * 80) / 2
    pool.dispatcher.progress(request, produced=5, cached=80)
    assert pool.counter("a") == (20 + 0.25 * 80 + 2 * 5) / 2


def test_a_request_started_again_is_not_charged_again():
    pool = Pool(a={})
    pool.report("r", slots=1)
    request = pool.enqueue("a", prompt=100)
    pool.dispatch()
    pool.dispatcher.release(request)
    pool.dispatcher.enqueue(request, front=True)
    pool.dispatch()
    assert pool.counter("a") == 100.0


def test_a_grant_that_nobody_took_up_is_given_back_at_the_end():
    pool = Pool(a={})
    pool.report("r", slots=1)
    request = pool.enqueue("a", prompt=100)
    pool.dispatch()
    pool.dispatcher.end(request, Outcome.CANCELLED)
    assert pool.counter("a") == 0.0


def test_a_cancelled_lease_stays_charged():
    pool = Pool(a={})
    pool.report("r", slots=1)
    request = pool.enqueue("a", prompt=100)
    pool.dispatch()
    request.taken_up = True
    pool.dispatcher.end(request, Outcome.CANCELLED)
    assert pool.counter("a") == 100.0


def test_expected_output_is_outstanding_until_it_is_produced_or_over():
    pool = Pool(a={})
    pool.report("r", slots=2)
    first, second = pool.enqueue("a", expected=10), pool.enqueue("a", expected=10)
    pool.dispatch()
    owed = pool.dispatcher.queue.tenant("a").counter
    assert owed.outstanding == 20
    pool.dispatcher.progress(first, produced=25, cached=0)
    assert owed.outstanding == 10
    pool.dispatcher.end(second, Outcome.SUCCEEDED)
    assert owed.outstanding == 0


def test_later_requests_are_expected_to_be_as_long_as_earlier_ones():
    pool = Pool(a={})
    pool.report("r", slots=1)
    request = pool.enqueue("a")
    pool.dispatch()
    pool.clock.now += 3.0
    pool.dispatcher.progress(request, produced=7, cached=0)
    pool.dispatcher.end(request, Outcome.SUCCEEDED)
    assert pool.dispatcher.estimates.output("a", 1000) == 7
    assert pool.dispatcher.place_interval("a") == 3.0


def test_a_head_without_kv_room_lets_others_pass():
    """R37"""
    pool = Pool(a={}, b={})
    pool.report("r", slots=9, kv_tokens=100)
    pool.enqueue("b", prompt=50)
    pool.dispatch()
    pool.enqueue("a", prompt=80)
    pool.enqueue("b", prompt=10)
    assert pool.dispatch() == ["b"]


def test_a_head_without_kv_room_is_overtaken_a_bounded_number_of_times():
    """R37: with the replica kept for it, the head runs as soon as the others have left."""
    pool = Pool(big={}, b={})
    pool.report("r", slots=9, kv_tokens=100)
    running = [pool.enqueue("b") for _ in range(3)]
    pool.dispatch()
    head = pool.enqueue("big", prompt=90, expected=10)
    overtakes = 0
    for _ in range(50):
        running.append(pool.enqueue("b"))
        granted = pool.dispatch()
        if "big" in granted:
            break
        overtakes += len(granted)
        pool.dispatcher.progress(running[0], produced=1, cached=0)
        pool.dispatcher.end(running.pop(0), Outcome.SUCCEEDED)
    assert head.state is State.GRANTED
    assert overtakes == POLICY.max_overtakes


def test_only_one_replica_is_kept_for_a_head_without_kv_room():
    pool = Pool(big={}, b={})
    pool.report("r1", slots=9, kv_tokens=100)
    pool.report("r2", slots=9, kv_tokens=100)
    for _ in range(2):
        pool.enqueue("b")
    pool.dispatch()
    head = pool.enqueue("big", prompt=90, expected=10)
    head.overtaken = POLICY.max_overtakes
    for _ in range(10):
        pool.enqueue("b")
    assert pool.dispatch() == ["b"] * 4
    held = sorted(replica.kv_held for replica in pool.dispatcher.credits.replicas().values())
    assert held == [20, 100]


def test_a_request_can_start_when_a_credit_is_free_and_nothing_of_its_tenant_waits():
    pool = Pool(a={"max_concurrency": 2})
    info = Request(RequestInfo("new", "a", 10, 10), "ingress", 10)
    assert not pool.dispatcher.can_start(info)
    pool.report("r", slots=3)
    assert pool.dispatcher.can_start(info)
    pool.enqueue("a")
    assert not pool.dispatcher.can_start(info)
    pool.dispatch()
    assert pool.dispatcher.can_start(info)
    pool.enqueue("a")
    pool.dispatch()
    assert not pool.dispatcher.can_start(info)


def test_grants_on_a_silent_replica_wait_again_in_their_order():
    pool = Pool(a={})
    pool.report("r", slots=3)
    requests = [pool.enqueue("a") for _ in range(4)]
    pool.dispatch()
    requests[0].state = State.LEASED
    pool.clock.now += 3.0
    pool.dispatcher.expire()
    assert list(pool.dispatcher.queue.tenant("a").waiting) == requests[1:]
    assert requests[0].replica == "r"


@pytest.mark.parametrize("waited", [0.0, 90.0])
def test_the_pace_of_a_queue_is_that_of_its_running_requests_or_the_wait_of_its_head(waited):
    pool = Pool(a={})
    pool.report("r", slots=2)
    pool.dispatcher.estimates.finished("a", 10, duration_s=8.0)
    for _ in range(3):
        pool.enqueue("a")
    pool.dispatch()
    pool.clock.now += waited
    assert pool.dispatcher.place_interval("a") == max(8.0 / 2, waited)


def test_of_those_almost_first_the_one_with_the_longest_cached_prompt_goes():
    pool = Pool(FairPolicy(burst=0.0, locality=100.0), a={}, b={}, c={})
    pool.report("r", slots=1)
    warm = pool.enqueue("a", prefixes=(1, 2))
    pool.dispatch()
    pool.dispatcher.end(warm, Outcome.CANCELLED)
    pool.enqueue("a", prefixes=(7,))
    pool.enqueue("b", prefixes=(1,))
    pool.enqueue("c", prefixes=(1, 2))
    assert pool.dispatch() == ["c"]


def test_a_tenant_further_behind_than_the_quantum_is_not_drawn_forward():
    pool = Pool(FairPolicy(burst=0.0, locality=100.0), a={}, b={})
    pool.report("r", slots=1)
    warm = pool.enqueue("b", prefixes=(1, 2))
    pool.dispatch()
    pool.dispatcher.end(warm, Outcome.CANCELLED)
    pool.dispatcher.queue.charge("b", 101.0)
    pool.enqueue("a", prefixes=(7,))
    pool.enqueue("b", prefixes=(1, 2))
    assert pool.dispatch() == ["a"]


def test_locality_overtakes_a_head_a_bounded_number_of_times():
    pool = Pool(FairPolicy(burst=0.0, locality=1e9, max_overtakes=3), a={}, b={})
    pool.report("r", slots=1)
    pool.enqueue("b", prefixes=(1, 2))
    order = []
    pool.enqueue("a", prefixes=(7,))
    for _ in range(6):
        pool.enqueue("b", prefixes=(1, 2))
        order += pool.dispatch()
        [running] = pool.dispatcher.credits.replicas()["r"].leases
        running.taken_up = True
        pool.dispatcher.end(running, Outcome.CANCELLED)
    assert "".join(order) in ("abbbbb", "babbbb", "bbabbb", "bbbabb", "bbbbab")
    assert order.index("a") <= 4


def test_no_more_than_sixteen_heads_are_looked_at():
    """However many are within the quantum."""
    tenants = {f"t{number:02}": {} for number in range(40)}
    pool = Pool(FairPolicy(burst=0.0, locality=1e9), **tenants)
    pool.report("r", slots=1)
    warm = pool.enqueue("t00", prefixes=(1, 2))
    pool.dispatch()
    pool.dispatcher.end(warm, Outcome.CANCELLED)
    for number in range(40):
        pool.dispatcher.queue.charge(f"t{number:02}", float(number))
        pool.enqueue(f"t{number:02}", prefixes=(1, 2) if number > 15 else (7,))
    assert pool.dispatch() == ["t00"]


def test_a_reserved_row_waits_for_a_tenant_below_its_share():
    """A flood takes all rows but one, and a newcomer that one at once."""
    pool = Pool(FairPolicy(burst=15.0, reserve_rows=1), flood={}, late={})
    pool.report("r", slots=4)
    for _ in range(9):
        pool.enqueue("flood")
    assert pool.dispatch() == ["flood"] * 3
    assert pool.dispatch() == []
    pool.enqueue("late")
    pool.enqueue("late")
    assert pool.dispatch() == ["late"]
    assert pool.dispatch() == []


def test_a_tenant_below_its_share_gets_a_reserved_row_though_something_of_it_runs():
    pool = Pool(FairPolicy(burst=50.0, reserve_rows=2), flood={}, small={})
    pool.report("r", slots=6)
    for _ in range(9):
        pool.enqueue("flood", prompt=100)
    assert pool.dispatch() == ["flood"] * 4
    for _ in range(3):
        pool.enqueue("small", prompt=1, expected=1)
    assert pool.dispatch() == ["small"] * 2


def test_a_tenant_above_its_share_gets_no_reserved_row_though_nothing_of_it_runs():
    pool = Pool(FairPolicy(burst=0.0, reserve_rows=1), flood={}, greedy={})
    pool.report("r", slots=2)
    pool.enqueue("flood")
    pool.dispatch()
    pool.enqueue("flood")
    pool.dispatcher.queue.charge("greedy", 25.0)
    pool.enqueue("greedy")
    assert pool.dispatch() == []


def test_bands_go_by_priority_and_a_lower_one_has_its_share():
    policy = FairPolicy(burst=0.0, band_shares=(0.0, 0.25, 0.0, 0.0))
    pool = Pool(policy, high={"max_concurrency": 99}, low={"band": 1, "max_concurrency": 99})
    pool.report("r", slots=40)
    for _ in range(40):
        pool.enqueue("high")
        pool.enqueue("low")
    granted = pool.dispatch()
    assert granted[0] == "high"
    assert granted.count("low") == pytest.approx(10, abs=1)


def test_a_head_of_a_lower_band_takes_what_suits_no_higher_one():
    pool = Pool(high={}, low={"band": 3})
    pool.report("r", slots=9, kv_tokens=100)
    pool.enqueue("low", prompt=50)
    pool.dispatch()
    pool.enqueue("high", prompt=80)
    pool.enqueue("low", prompt=10)
    assert pool.dispatch() == ["low"]


def test_a_tenant_that_changes_its_band_starts_level_there():
    pool = Pool(a={}, b={"band": 1})
    pool.report("r", slots=1)
    for _ in range(5):
        request = pool.enqueue("b")
        pool.dispatch()
        request.taken_up = True
        pool.dispatcher.end(request, Outcome.SUCCEEDED)
    waiting = pool.enqueue("a", prefixes=(1,))
    pool.dispatcher.configure(tenants_of(a={"band": 1}, b={"band": 1}).tenants)
    band = pool.dispatcher.queue.bands[1]
    assert pool.counter("a") == band.virtual_time > 0
    assert band.prefixed == 1
    assert pool.dispatcher.queue.bands[0].first() is None
    assert pool.dispatch() == ["a"]
    assert waiting.state is State.GRANTED


def test_who_has_waited_too_long_is_found_and_who_has_begun_is_not():
    pool = Pool(a={"max_wait_s": 5.0})
    late, begun = pool.enqueue("a"), pool.enqueue("a")
    begun.taken_up = True
    pool.clock.now += 4.9
    assert pool.dispatcher.overdue() == []
    pool.clock.now += 0.2
    assert pool.dispatcher.overdue() == [late]
    assert pool.dispatcher.overdue() == []
