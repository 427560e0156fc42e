"""A tenant as administrators see it: its limits, how much of them is left, and why it waits. No
keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from router.messages import HeldBack
from router.pricing import MICRO
from router.snapshot import Snapshot, TenantSnapshot
from router.tenant import Tenant
from serve_app.usage.tenant_updates import PART


async def tenant_states(
    tenants: Sequence[Tenant],
    snapshot: Callable[[Collection[str]], Snapshot],
    unfinished: Mapping[str, tuple[int, int]],
    paused: Collection[str],
    only: str | None = None,
) -> list[dict[str, Any]]:
    """Each tenant; then those that are gone from the file, as long as something of theirs waits or
    runs.

    unfinished: by tenant, how many requests wait and run. only: of one tenant.
    """
    wanted = [tenant for tenant in tenants if only in (None, tenant.id)]
    told: list[dict[str, Any]] = []
    for begin in range(0, len(wanted), PART):
        part = wanted[begin : begin + PART]
        state = snapshot([tenant.id for tenant in part])
        told += [tenant_state(tenant, state, paused) for tenant in part]
        await asyncio.sleep(0)
    configured = {tenant.id for tenant in tenants}
    gone = (
        {"id": name, "removed": True, "queued": queued, "running": running}
        for name, (queued, running) in unfinished.items()
        if name not in configured and only in (None, name)
    )
    return told + [each | {"paused": each["id"] in paused} for each in gone]


def tenant_state(
    tenant: Tenant, snapshot: Snapshot, paused: Collection[str] = ()
) -> dict[str, Any]:
    """Settings by their names in the file, then the present state; values for JSON."""
    state = snapshot.tenants[tenant.id]
    spent = {window: amount / MICRO for window, amount in state.spent_micro_dollars.items()}
    is_paused = tenant.id in paused
    return tenant.model_dump(mode="json", exclude={"keys"}) | {
        "queued": state.queued,
        "running": state.running,
        "held_back": state.held_back,
        "why": list(_why(tenant, state, snapshot.virtual_times, is_paused)),
        "rates_left": state.rates_left,
        "spent": spent,
        "held": state.held_micro_dollars / MICRO,
        "paused": is_paused,
    }


def _why(
    tenant: Tenant, state: TenantSnapshot, virtual_times: Mapping[str, float], is_paused: bool
) -> Iterator[str]:
    """What holds its requests back at this moment, for people."""
    if is_paused:
        yield "an administrator has paused it: whatever it asks for gets a 403"
    for limit, left in state.rates_left.items():
        if left <= 0:
            yield f"nothing is left of its {limit} per minute: what comes gets a 429"
    for window, left in state.unspent_micro_dollars.items():
        if left <= 0:
            yield f"its budget of the {window} is spent or held: what comes gets a 429"
    if state.queued >= tenant.max_queued and state.queued:
        yield f"as many wait as may (max_queued {tenant.max_queued}): what comes gets a 429"
    for model, why in state.held_back.items():
        ahead = state.virtual_times.get(model, 0.0) - virtual_times.get(model, 0.0)
        yield f"{model}: {_meaning(why, tenant, state.running, ahead)}"


def _meaning(why: HeldBack, tenant: Tenant, running: int, ahead: float) -> str:
    match why:
        case HeldBack.CONCURRENCY:
            return f"{running} of its requests run, and max_concurrency is {tenant.max_concurrency}"
        case HeldBack.FAIR_SHARE:
            return f"others had less than their share; it is {ahead:.0f} ahead of the virtual time"
        case HeldBack.CAPACITY:
            return "it is next, and no replica has room"
        case HeldBack.NO_REPLICA:
            return "no replica is in service"
