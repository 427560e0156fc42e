"""Who may use the server: tenants, their keys and their limits.

Knows configuration only: no counters, no requests, no clock. Plain keys are never stored.
"""

from __future__ import annotations

import hashlib
import hmac
from os import PathLike
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


def digest(key: str) -> str:
    """What is stored of an API key: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Tenant(BaseModel):
    """One customer of the server."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Name
    keys: list[Digest] = []
    """Digests of the API keys that identify this tenant."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the service: twice the weight, twice the tokens under contention."""
    max_concurrency: Annotated[int, Field(ge=1)] = 8
    """Most requests that run at once; the next one waits."""
    max_queued: Annotated[int, Field(ge=0)] = 64
    """Most requests that wait; the next one is refused."""
    prefix_group: Name | None = None
    """Tenants of one group share cached prefixes; by default a tenant shares with nobody."""

    @property
    def cache_salt(self) -> str:
        """Domain of the prefix cache, tagged: a tenant and a group of one name differ."""
        if self.prefix_group is not None:
            return f"group:{self.prefix_group}"
        return f"tenant:{self.id}"


class Tenants(BaseModel):
    """All tenants. Ids are unique, and so are digests."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenants: list[Tenant]
    _owners: list[tuple[str, Tenant]] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _index(self) -> Tenants:
        _require_unique("id", [tenant.id for tenant in self.tenants])
        self._owners = [(key, tenant) for tenant in self.tenants for key in tenant.keys]
        _require_unique("key digest", [key for key, _ in self._owners])
        return self

    def find_by_key(self, key: str) -> Tenant | None:
        """The tenant that an API key belongs to, or None.

        Every digest is compared whatever was presented, so that the time tells nothing
        about which keys exist.
        """
        presented, found = digest(key), None
        for stored, tenant in self._owners:
            if hmac.compare_digest(stored, presented):
                found = tenant
        return found


def _require_unique(what: str, values: list[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} appears twice")
        seen.add(value)


def load_tenants(path: str | PathLike[str]) -> Tenants:
    """Read tenants from a YAML file: a mapping with the one key `tenants`, a list.

    Raises OSError when the file cannot be read, ValueError naming file and field when its
    content is wrong. Messages never quote the offending value.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return Tenants.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: not valid YAML") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise ValueError(f"{path}: {problems}") from None
