"""Calls that no queue sees, such as /tokenize, against the tenant's requests a minute.

They are counted in this process alone. The module does not know what the calls do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.rate import Bucket
from router.tenant import Tenant
from serve_app.protocol.backend import Refused


class CallRate:
    """The rates of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, tenant: Tenant) -> None:
        """One call. Raises Refused for a tenant that has made as many as it may."""
        limit, now = tenant.requests_per_minute, self._clock()
        if limit is None:
            return
        bucket = self._buckets.setdefault(tenant.id, Bucket(limit, now))
        if bucket.limit != limit:
            bucket.resize(limit, now)
        if wait_s := bucket.wait_s(1.0, now):
            raise Refused(f"The limit of {limit} requests a minute is reached.", wait_s)
        bucket.take(1.0)
