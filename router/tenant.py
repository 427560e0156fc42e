"""Who may use the server: tenants, their keys and their limits.

Knows configuration only: no counters, no requests, no clock. Plain keys are never stored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from router.budget import zone
from router.policy import BANDS


def _known_zone(name: str) -> str:
    zone(name)
    return name


KEYED = "hmac-sha256:"
"""Begins a digest that is keyed with a secret of the server's."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Digest = Annotated[str, StringConstraints(pattern=r"^(hmac-)?sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1, le=2**53)]
"""Exact in JSON and in a float; what is meant to be without a limit is left out."""
Dollars = Annotated[float, Field(ge=0, le=1e9)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TimeZone = Annotated[str, AfterValidator(_known_zone)]


def digest(key: str, secret: bytes = b"") -> str:
    """What is stored of an API key: a tag and 64 hexadecimal digits.

    With a secret of the server's it is a keyed digest, which tells nothing to who has only
    the file; without one, a plain SHA-256, which suits keys that are random.
    """
    data = key.encode("utf-8", "surrogatepass")
    if secret:
        return KEYED + hmac.new(secret, data, hashlib.sha256).hexdigest()
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Slo(BaseModel):
    """What a tenant was promised; answers that keep it are counted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ttft_s: Seconds | None = None
    """Seconds to the first token."""
    tpot_s: Seconds | None = None
    """Mean seconds between later tokens."""

    def met(self, first_token_s: float | None, last_token_s: float | None, tokens: int) -> bool:
        """Whether an answer that came in such times kept it."""
        if first_token_s is None or last_token_s is None:
            return self.ttft_s is None and self.tpot_s is None
        if self.ttft_s is not None and first_token_s > self.ttft_s:
            return False
        gaps = max(tokens - 1, 1)
        return self.tpot_s is None or (last_token_s - first_token_s) / gaps <= self.tpot_s


class Tenant(BaseModel):
    """One customer of the server. A limit that is not set does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Name
    """What usage, logs and metrics call it."""
    keys: list[Digest] = []
    """Digests of the API keys that identify this tenant."""
    anonymous: bool = False
    """Requests without any key are this tenant's. One tenant at most."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the service: twice the weight, twice the tokens under contention."""
    band: Annotated[int, Field(ge=0, lt=BANDS)] = 0
    """Priority: 0 goes before 1, and so on, except for what a band is guaranteed."""
    burst: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Service that it may bank while it is idle, as a cost; by default that of the policy."""
    max_concurrency: Count = 8
    """Most requests that run at once; the next one waits."""
    max_queued: Annotated[int, Field(ge=0, le=2**53)] = 64
    """Most requests that wait; the next one is refused."""
    requests_per_minute: Count | None = None
    """The next one is refused; what is unused is saved up, for one minute at most."""
    tokens_per_minute: Count | None = None
    """Prompt and output together, in the same way."""
    daily_budget: Dollars | None = None
    """Dollars in a day of its time zone, at the price list."""
    monthly_budget: Dollars | None = None
    """Dollars in a calendar month."""
    time_zone: TimeZone = "UTC"
    """Where the days and months of its budgets begin, such as Europe/Berlin."""
    max_context: Count | None = None
    """Longest prompt and output together, if less than the model's."""
    models: list[Name] | None = None
    """Names of the models that it may use; by default all."""
    max_wait_s: Seconds | None = None
    """A request that has waited for so long is dropped."""
    prefix_group: Name | None = None
    """Tenants of one group share cached prefixes; by default a tenant shares with nobody."""
    slo: Slo = Slo()
    """What it was promised."""

    @property
    def cache_salt(self) -> str:
        """Domain of the prefix cache, tagged: a tenant and a group of one name differ."""
        if self.prefix_group is not None:
            return f"group:{self.prefix_group}"
        return f"tenant:{self.id}"

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class Tenants(BaseModel):
    """All tenants. Ids are unique, and so are digests."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenants: list[Tenant]
    _owners: dict[str, Tenant] = PrivateAttr(default_factory=dict)
    _anonymous: Tenant | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _index(self) -> Tenants:
        ids: set[str] = set()
        for tenant in self.tenants:
            if tenant.id in ids:
                raise ValueError(f"id {tenant.id!r} appears twice")
            ids.add(tenant.id)
            for key in tenant.keys:
                if key in self._owners:
                    raise ValueError(f"a key digest of tenant {tenant.id!r} appears twice")
                self._owners[key] = tenant
        anonymous = [tenant for tenant in self.tenants if tenant.anonymous]
        if len(anonymous) > 1:
            raise ValueError("more than one tenant is anonymous")
        self._anonymous = anonymous[0] if anonymous else None
        return self

    def find_by_key(self, key: str | None, secret: bytes = b"") -> Tenant | None:
        """The tenant that an API key belongs to, or None; without a key the anonymous one.

        The work is the same for keys that are known, unknown and malformed. Digests are looked
        up by hash: how near a wrong one is to a right one cannot be steered by who lacks the
        key, and the last comparison takes constant time.
        """
        if key is None:
            return self._anonymous
        found = None
        for presented in {digest(key), digest(key, secret)}:
            tenant = self._owners.get(presented)
            stored = presented if tenant is not None else _NOBODY
            if hmac.compare_digest(stored, presented):
                found = tenant
        return found


_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is several times as fast; not every build of PyYAML has it."""
_NOBODY = "sha256:" + "0" * 64


def load_tenants(path: str | PathLike[str]) -> Tenants:
    """Read tenants from a YAML file: a mapping with the one key `tenants`, a list.

    Raises OSError when the file cannot be read, ValueError naming file, line and field when
    its content is wrong. Messages never quote the offending value.
    """
    text = Path(path).read_bytes().decode("utf-8", "replace")
    try:
        return Tenants.model_validate(yaml.load(text, _YAML))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: not valid YAML") from None
    except ValidationError as error:
        document = yaml.compose(text, _YAML)
        problems = "; ".join(
            f"line {_line(document, item['loc'])}: "
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise ValueError(f"{path}, {problems}") from None


def _line(node: yaml.Node | None, loc: Iterable[int | str]) -> int:
    """The line, from 1, of the value at `loc`, or of the innermost part of it that exists."""
    line = node.start_mark.line if node is not None else 0
    for step in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(step)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            found = [(v, v) for v in node.value[step : step + 1]]
        else:
            break
        if not found:
            break
        key, node = found[0]
        line = key.start_mark.line
    return line + 1
