"""Reads the tenants file and finds what has changed: the part that a thread can do.

There may be ten thousand, which takes seconds to read; what is left for the event loop comes in
parts. Knows neither Ray nor the router.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Mapping
from typing import NamedTuple

from router.pricing import Prices
from router.quota import windows_of
from router.store import Store
from router.tenant import Tenant, Tenants
from serve_app.settings import TenantsSource, require_prices

logger = logging.getLogger(__name__)

PART = 100
"""Tenants that are taken over at once, in a few milliseconds."""


class Part(NamedTuple):
    """A batch of tenants that are new or have changed."""

    tenants: list[Tenant]
    spent: dict[tuple[str, str], int]
    """Micro-dollars by tenant and window of their budgets."""


class Update(NamedTuple):
    tenants: Tenants
    """All."""
    packed: bytes
    """The same, pickled: each ingress is told."""
    parts: list[Part]
    gone: set[str]
    """Ids of those that are no more."""


def read_update(
    source: TenantsSource, known: Tenants, prices: Mapping[str, Prices], store: Store
) -> Update:
    """Raises OSError or ValueError on tenants that cannot be used."""
    tenants = source.load()
    require_prices(tenants, prices)
    before = {tenant.id: tenant for tenant in known.tenants}
    changed = [tenant for tenant in tenants.tenants if before.get(tenant.id) != tenant]
    parts = [changed[start : start + PART] for start in range(0, len(changed), PART)]
    return Update(
        tenants,
        pickle.dumps(tenants),
        [Part(part, _spent(part, store, starting=not known.tenants)) for part in parts],
        before.keys() - {tenant.id for tenant in tenants.tenants},
    )


def _spent(tenants: list[Tenant], store: Store, *, starting: bool) -> dict[tuple[str, str], int]:
    """A store that does not tell raises OSError at the start; later it keeps no key from being
    revoked, and what it knows is learnt afterwards."""
    now = time.time()
    accounts = [(tenant.id, window) for tenant in tenants for window in windows_of(tenant, now)]
    try:
        return dict(zip(accounts, store.spending(accounts), strict=True))
    except OSError as error:
        if starting:
            raise
        logger.error("New tenants count their spending from zero for now: %s", error)
        return {}
