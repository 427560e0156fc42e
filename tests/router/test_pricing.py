import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing import PriceList, Prices

PRICES = PriceList({"m": Prices(prompt=0.15, cached=0.075, output=0.60)})


def test_a_price_in_dollars_per_million_is_one_in_micro_dollars_per_token():
    assert PRICES.cost("m", prompt=1000, cached=400, output=100) == 90 + 30 + 60


def test_a_request_is_rounded_up_once():
    assert PRICES.cost("m", 1, 0, 0) == 1
    assert PRICES.cost("m", 1, 1, 1) == 1
    assert PRICES.cost("m", 0, 0, 0) == 0


def test_a_model_without_a_price_is_free():
    assert PRICES.cost("other", 10**9, 0, 10**9) == 0
    assert PRICES.affordable_output("other", 10**9, 500, 0) == 500
    assert "m" in PRICES
    assert "other" not in PRICES


@pytest.mark.parametrize(
    "prices", [{"prompt": -1.0}, {"cached": 1.0}, {"output": -0.1}, {"prompt": float("nan")}]
)
def test_prices_that_cannot_be_are_refused(prices):
    with pytest.raises(ValueError, match="prices need"):
        Prices(**prices)


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(0, 20_000), st.floats(0, 100))
def test_what_is_affordable_costs_no_more_than_there_is_and_one_token_more_does(
    prompt, wanted, money, price
):
    prices = PriceList({"m": Prices(prompt=0.5, cached=0.1, output=price)})
    output = prices.affordable_output("m", prompt, wanted, money)
    if output < 0:
        assert prices.cost("m", prompt, 0, 0) > money
        return
    assert prices.cost("m", prompt, 0, output) <= money
    assert output == wanted or prices.cost("m", prompt, 0, output + 1) > money
    for cached in (0, prompt // 2, prompt):
        assert prices.cost("m", prompt, cached, output) <= prices.cost("m", prompt, 0, output)
