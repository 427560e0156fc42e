"""The settings of the application: the `args` of a Serve configuration file.

Everything is checked here, once, before anything starts; no other module reads files of
settings or the environment.
"""

from __future__ import annotations

import hmac
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replica.config import EngineConfig
from router.policy import FairPolicy
from router.pricing import Prices
from router.tenant import Digest, Tenant, Tenants, digest, load_tenants
from serve_app.limits import Limits
from serve_app.reasoning import ReasoningTags


def key_secret() -> bytes:
    """What keyed digests of API keys are keyed with; empty where there is none."""
    return os.environ.get("FAIRSTREAM_KEY_SECRET", "").encode()


class TenantsSource(BaseModel):
    """Where the tenants are written down: a YAML file, or right here.

    It is also the `user_config` of the Admission deployment, which Serve applies to the
    running process: so tenants change without a restart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    tenants: Path | list[Tenant]
    """A relative path starts at the working directory of the server."""
    revision: int = 0
    """Raise it when a file has changed: Serve applies a `user_config` that differs."""

    def stamp(self) -> tuple[int, int] | None:
        """Differs once the file has changed; None where there is no file."""
        try:
            status = os.stat(self.tenants) if isinstance(self.tenants, Path) else None
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size) if status is not None else None

    def load(self) -> Tenants:
        """Raises OSError or ValueError on tenants that cannot be read."""
        if isinstance(self.tenants, Path):
            return load_tenants(self.tenants)
        return Tenants(tenants=self.tenants)


RedisUrl = Annotated[str, Field(pattern=r"^(rediss?|unix)://.")]


class AppConfig(BaseModel):
    """All that a deployment of the server can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model_name: Annotated[str, Field(min_length=1)]
    """What clients call the model."""
    model_aliases: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further names that clients may call it by."""
    reasoning: ReasoningTags | None = None
    """Of a model that thinks before it answers: what stands between these tags is told apart, as
    `reasoning_content`."""
    engine: EngineConfig
    tenants: Path | list[Tenant]
    """A YAML file, or the list itself. See `TenantsSource`."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines, each with the whole model."""
    ingresses: Annotated[int, Field(ge=1)] = 1
    """HTTP front ends."""
    lookahead: Annotated[int, Field(ge=0)] | None = None
    """Requests that a replica takes beyond its rows, so that a row never waits for the router;
    by default an eighth of the rows."""
    fairness: FairPolicy = FairPolicy()
    api: Limits = Limits()
    prices: dict[str, Prices] = {}
    """By model name, in dollars per million tokens; what budgets are counted in."""
    gpu_dollars_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What one replica's device costs us: `/admin/usage` then tells our own cost."""
    usage: Annotated[RedisUrl | Path | None, Field(union_mode="left_to_right")] = Path("usage.db")
    """Where usage and spending are kept: an SQLite file, or a Redis whose budgets several clusters
    share; null keeps them in memory only."""
    admin_keys: list[Digest] = []
    """Digests of keys that may read `/admin/tenants` and `/admin/usage`."""

    @model_validator(mode="after")
    def _redis_is_installed(self) -> AppConfig:
        if isinstance(self.usage, str) and importlib.util.find_spec("redis") is None:
            raise ValueError("usage is a Redis: pip install 'fairstream[redis]'")
        return self

    @model_validator(mode="after")
    def _prices_are_of_the_model(self) -> AppConfig:
        for name in self.prices.keys() - {self.model_name}:
            raise ValueError(f"prices names {name!r}, but the model is called {self.model_name!r}")
        return self

    @property
    def lookahead_credits(self) -> int:
        if self.lookahead is None:
            return max(1, self.engine.max_rows // 8)
        return self.lookahead

    def is_admin(self, key: str) -> bool:
        """Whether a key is one of an administrator. All are compared, in constant time."""
        presented = {digest(key), digest(key, key_secret())}
        matches = [
            hmac.compare_digest(known, one) for known in self.admin_keys for one in presented
        ]
        return bool(key) and any(matches)

    @property
    def tenants_source(self) -> TenantsSource:
        return TenantsSource(tenants=self.tenants)


def require_prices(tenants: Tenants, prices: Mapping[str, Prices]) -> None:
    """Raises ValueError for a budget that nothing would ever be counted against."""
    for tenant in tenants.tenants:
        if (tenant.daily_budget, tenant.monthly_budget) != (None, None) and not prices:
            raise ValueError(f"tenant {tenant.id!r} has a budget, but `prices` names no model")
