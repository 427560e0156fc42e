from hypothesis import given
from hypothesis import strategies as st

from router.ledger import NOTHING, Charge, Ledger, Usage
from router.messages import Outcome, RequestInfo

INFO = RequestInfo("r", "a", prompt_tokens=100, max_tokens=50)


def dispatched() -> Ledger:
    ledger = Ledger()
    ledger.open(INFO)
    ledger.dispatch("r")
    return ledger


def usage_of(ledger: Ledger, tenant: str = "a") -> Usage:
    return ledger.usage()[tenant]


def test_a_prompt_is_charged_at_the_first_dispatch_only():
    ledger = Ledger()
    ledger.open(INFO)
    assert usage_of(ledger).prompt_tokens == 0
    assert ledger.dispatch("r") == 100
    ledger.open(INFO)
    assert ledger.dispatch("r") == 0
    assert usage_of(ledger).prompt_tokens == 100


def test_the_first_report_of_cached_tokens_corrects_the_prompt():
    ledger = dispatched()
    assert ledger.progress("r", 0, None) == NOTHING
    assert ledger.progress("r", 0, 64) == Charge(-64, 64, 0)
    assert ledger.progress("r", 0, 100) == NOTHING
    assert usage_of(ledger).cached_tokens == 64


def test_output_is_counted_once_whatever_order_reports_come_in():
    ledger = dispatched()
    charges = [ledger.progress("r", produced, None).output for produced in (3, 1, 3, 7, 0, 7)]
    assert charges == [3, 0, 0, 4, 0, 0]
    assert usage_of(ledger).output_tokens == 7


def test_a_request_ends_once():
    """C02: exactly one outcome, and nothing is booked after it."""
    ledger = dispatched()
    ledger.close(INFO, Outcome.CANCELLED)
    ledger.close(INFO, Outcome.SUCCEEDED)
    assert ledger.progress("r", 9, 9) == NOTHING
    assert ledger.dispatch("r") == 0
    assert usage_of(ledger).outcomes == {
        Outcome.SUCCEEDED: 0,
        Outcome.CANCELLED: 1,
        Outcome.FAILED: 0,
    }
    assert len(ledger) == 0


def test_a_refusal_has_no_outcome():
    ledger = Ledger()
    ledger.open(INFO)
    ledger.close(INFO, None)
    assert usage_of(ledger) == Usage()


def test_a_cancelled_stream_is_charged_for_what_it_produced():
    """C50: prompt and the three tokens of twenty that were generated."""
    ledger = dispatched()
    ledger.progress("r", 3, 0)
    assert ledger.refund("r") == 0
    ledger.close(INFO, Outcome.CANCELLED)
    usage = usage_of(ledger)
    assert (usage.prompt_tokens, usage.output_tokens) == (100, 3)


def test_a_prompt_that_nobody_worked_on_is_given_back_once():
    ledger = dispatched()
    assert ledger.refund("r") == 100
    assert ledger.refund("r") == 0
    assert usage_of(ledger).prompt_tokens == 0


def test_work_without_a_dispatch_is_charged_with_its_prompt():
    ledger = Ledger()
    ledger.open(INFO)
    assert ledger.progress("r", 0, None) == NOTHING
    assert ledger.progress("r", 5, 40) == Charge(60, 40, 5)
    assert ledger.dispatch("r") == 0


def test_what_an_earlier_router_charged_is_not_charged_again():
    ledger = Ledger()
    ledger.resume(INFO, produced=20, cached=None)
    assert ledger.dispatch("r") == 0
    assert ledger.progress("r", 23, 10) == Charge(-10, 10, 3)
    assert ledger.produced("r") == 23


def test_totals_handed_out_do_not_change_later():
    ledger = dispatched()
    before = ledger.usage()
    ledger.progress("r", 5, None)
    ledger.close(INFO, Outcome.FAILED)
    assert before["a"].output_tokens == 0
    assert before["a"].outcomes[Outcome.FAILED] == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.one_of(st.none(), st.integers(0, 120))), max_size=20)
)
def test_charges_add_up_to_the_usage(reports):
    """C59: per-request charges and per-tenant totals never disagree."""
    ledger = Ledger()
    ledger.open(INFO)
    charges = [(ledger.dispatch("r"), 0, 0), *(ledger.progress("r", p, c) for p, c in reports)]
    uncached, cached, output = (sum(column) for column in zip(*charges, strict=True))
    usage = usage_of(ledger)
    assert (uncached + cached, cached) == (usage.prompt_tokens, usage.cached_tokens)
    assert usage.prompt_tokens == 100
    assert usage.output_tokens == output == max([p for p, _ in reports], default=0)
    assert 0 <= usage.cached_tokens <= 100
