from __future__ import annotations

import pytest

from router.tenant import Tenant
from serve_app.protocol.backend import Refused
from serve_app.throttling.call_rate import CallRate


def test_a_tenant_makes_as_many_calls_a_minute_as_it_may() -> None:
    now = [0.0]
    rate = CallRate(clock=lambda: now[0])
    few, other = (Tenant(id=name, requests_per_minute=2) for name in ("few", "other"))
    for _ in range(2):
        rate.take(few)
    with pytest.raises(Refused) as refused:
        rate.take(few)
    assert refused.value.retry_after_s == pytest.approx(30)
    rate.take(other)
    now[0] += 31
    rate.take(few)


def test_a_limit_may_change_and_may_be_none() -> None:
    rate = CallRate(clock=lambda: 0.0)
    for _ in range(100):
        rate.take(Tenant(id="t"))
    rate.take(Tenant(id="t", requests_per_minute=1))
    rate.take(Tenant(id="t", requests_per_minute=2))
    with pytest.raises(Refused, match="limit of 2 "):
        rate.take(Tenant(id="t", requests_per_minute=2))
