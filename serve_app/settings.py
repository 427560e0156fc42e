"""The settings of the application: the `args` of a Serve configuration file.

Everything is checked here, once, before anything starts; no other module reads files of
settings or the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from replica.config import EngineConfig
from router.policy import FairPolicy
from router.tenant import Tenant, Tenants, load_tenants
from serve_app.limits import Limits


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

    def load(self) -> Tenants:
        """Raises OSError or ValueError on tenants that cannot be read."""
        if isinstance(self.tenants, Path):
            return load_tenants(self.tenants)
        return Tenants(tenants=self.tenants)


class AppConfig(BaseModel):
    """All that a deployment of the server can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model_name: Annotated[str, Field(min_length=1)]
    """What clients call the model."""
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

    @property
    def lookahead_credits(self) -> int:
        if self.lookahead is None:
            return max(1, self.engine.max_rows // 8)
        return self.lookahead

    @property
    def tenants_source(self) -> TenantsSource:
        return TenantsSource(tenants=self.tenants)
