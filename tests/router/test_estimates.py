from router.estimates import Estimates, RunningMean


def test_a_running_mean_starts_at_its_first_value_and_follows_a_change():
    mean = RunningMean()
    mean.add(100.0)
    assert mean.value == 100.0
    for _ in range(100):
        mean.add(10.0)
    assert abs(mean.value - 10.0) < 1.0


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
