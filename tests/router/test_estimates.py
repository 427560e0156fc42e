from router.estimates import Estimates


def test_expectations_follow_a_change():
    estimates = Estimates(expected_output=256)
    for tokens, seconds in [(100, 9.0), *[(10, 1.0)] * 100]:
        estimates.finished("a", tokens, seconds)
    assert estimates.output("a", 1000) == 11
    assert estimates.duration("a") < 1.1
    assert estimates.output("b", 1000) < 20


def test_what_rates_hold_is_what_nine_of_ten_stay_within():
    estimates = Estimates(expected_output=256)
    assert estimates.high_output("a", 1000) == 256
    for tokens in range(1, 33):
        estimates.finished("a", tokens, 1.0)
    assert estimates.high_output("a", 1000) == 29
    assert estimates.high_output("a", 7) == 7


def test_expected_output_is_of_the_tenant_then_of_the_pool_then_a_guess():
    estimates = Estimates(expected_output=256)
    assert estimates.output("a", max_tokens=1000) == 256
    estimates.finished("b", output_tokens=20, duration_s=1.0)
    assert estimates.output("b", 1000) == 20
    assert 20 < estimates.output("a", 1000) < 256


def test_expected_output_lies_between_one_and_the_limit():
    estimates = Estimates(expected_output=256)
    assert estimates.output("a", max_tokens=7) == 7
    estimates.finished("a", output_tokens=0, duration_s=1.0)
    assert estimates.output("a", max_tokens=7) == 1


def test_durations_are_of_the_tenant_then_of_the_pool():
    estimates = Estimates(expected_output=256)
    assert estimates.duration("a") == 0.0
    estimates.finished("b", 10, duration_s=4.0)
    assert estimates.duration("a") == estimates.duration("b") == 4.0
