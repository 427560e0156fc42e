"""A tenant as administrators see it: its limits and how much of them is left. No keys."""

from __future__ import annotations

from typing import Any

from router.pricing import MICRO
from router.snapshot import TenantSnapshot
from router.tenant import Tenant


def tenant_state(tenant: Tenant, state: TenantSnapshot | None) -> dict[str, Any]:
    """Settings by their names in the file, then the present state; values for JSON."""
    settings = tenant.model_dump(mode="json", exclude={"keys"})
    if state is None:
        return settings | {"queued": 0, "running": 0, "spent": {}, "held": 0.0, "held_back": {}}
    spent = {window: amount / MICRO for window, amount in state.spent_micro_dollars.items()}
    return settings | {
        "queued": state.queued,
        "running": state.running,
        "held_back": state.held_back,
        "rates_left": state.rates_left,
        "spent": spent,
        "held": state.held_micro_dollars / MICRO,
    }
