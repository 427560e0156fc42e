"""The settings of the application: the `args` of a Serve configuration file.

Everything is checked here, once, before anything starts; no other module reads files of
settings or the environment.
"""

from __future__ import annotations

import hmac
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, IPvAnyNetwork, model_validator

from replica.config import EngineConfig
from router.policy import FairPolicy
from router.pricing import Prices
from router.tenant import Digest, Tenant, Tenants, digest, load_tenants
from serve_app.protocol.limits import Limits
from serve_app.text.reasoning import ReasoningTags

BUILDER = "serve_app.app:build"
"""`import_path` of an application that these are the settings of."""


def key_secret() -> bytes:
    """What keyed digests of API keys are keyed with; empty where there is none."""
    return os.environ.get("FAIRSTREAM_KEY_SECRET", "").encode()


def redis_password() -> str | None:
    """The password of the Redis that keeps usage, if its URL has none: many can read the file with
    the URL."""
    return os.environ.get("FAIRSTREAM_REDIS_PASSWORD") or None


def has_opentelemetry() -> bool:
    """Whether spans can be sent."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _spans_url_of_environment() -> str | None:
    """Where OpenTelemetry's variables say that spans are posted, over HTTP, if they do."""

    def value(*names: str) -> str:
        return next((found for name in names if (found := os.environ.get(name, "").strip())), "")

    protocol = value("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        return None
    if url := value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return url
    base = value("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"{base.rstrip('/')}/v1/traces" if base else None


def _spans_are_off() -> bool:
    """By OpenTelemetry's own variables."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return off or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp")


def secrets() -> list[str]:
    """What no log may show."""
    names = ("FAIRSTREAM_KEY_SECRET", "FAIRSTREAM_REDIS_PASSWORD", "HF_TOKEN", "RAY_AUTH_TOKEN")
    return [found for name in names if (found := os.environ.get(name))]


Stamp: TypeAlias = tuple[int, ...]


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

    def stamp(self) -> Stamp | None:
        """Differs once the file has changed, or is another; None where there is no file."""
        try:
            found = os.stat(self.tenants) if isinstance(self.tenants, Path) else None
        except OSError:
            return None
        if found is None:
            return None
        # Times and sizes can be equal by chance or on purpose; nobody can set a ctime.
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def load(self) -> Tenants:
        """Raises OSError or ValueError on tenants that cannot be read."""
        if isinstance(self.tenants, Path):
            return load_tenants(self.tenants)
        return Tenants(tenants=self.tenants)


class Autoscaling(BaseModel):
    """The bounds between which replicas follow the load. `autoscaling_policy` in the same file says
    how they follow it, see docs/scaling.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """0: without requests there is no replica, and the first one waits for it to start."""
    max_replicas: Annotated[int, Field(ge=1)]
    """Never more, whatever waits."""
    window_s: Annotated[float, Field(gt=1.0)] = 5.0
    """Signals are means over so long."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas")
        return self


RedisUrl = Annotated[str, Field(pattern=r"^(rediss?|unix)://.")]


def _is_no_url(path: Path) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)):
        raise ValueError("is neither a file nor a URL of a Redis (redis://, rediss:// or unix://)")
    return path


Usage = Annotated[
    RedisUrl | Annotated[Path, AfterValidator(_is_no_url)] | None,
    Field(union_mode="left_to_right"),
]


Name = Annotated[str, Field(min_length=1)]


class ModelConfig(BaseModel):
    """One model: what it is called, and the replicas that serve it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Name
    """What clients call it, and answers, prices and tenants' `models`."""
    aliases: tuple[Name, ...] = ()
    """Further names that clients may call it by."""
    reasoning: ReasoningTags | None = None
    """For a model that thinks before it answers: text between these tags is returned as
    `reasoning_content`, apart from the answer."""
    engine: EngineConfig
    """The engine that runs it."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines, each with the whole model."""
    autoscaling: Autoscaling | None = None
    """The number of replicas follows the load; `replicas` then says nothing."""
    lookahead: Annotated[int, Field(ge=0)] | None = None
    """Requests that a replica takes beyond its rows, so that a row never waits for the router;
    by default an eighth of the rows."""

    @property
    def lookahead_credits(self) -> int:
        if self.lookahead is None:
            return max(1, self.engine.max_rows // 8)
        return self.lookahead

    @property
    def sleeps(self) -> bool:
        """There may be no replica at all."""
        return self.autoscaling is not None and not self.autoscaling.min_replicas


def deployment_of(model: str) -> str:
    """What the deployment of a model's replicas is called where there are several models."""
    return f"Replica-{re.sub(r'[^A-Za-z0-9._-]', '-', model)}"


OF_ONE_MODEL = {
    "model_name": "name",
    "model_aliases": "aliases",
    **{name: name for name in ("reasoning", "engine", "replicas", "autoscaling", "lookahead")},
}
"""Options of an application with one model, and what they are in `ModelConfig`."""


class AppConfig(BaseModel):
    """The options of one application.

    One model is described by options of the application itself, several by `models`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)] | None = None
    """Each with its own replicas."""
    model_name: Name | None = None
    """Where there is one model only, in place of `models`: its `name`."""
    model_aliases: tuple[Name, ...] = ()
    """Its `aliases`."""
    reasoning: ReasoningTags | None = None
    """Its `reasoning`."""
    engine: EngineConfig | None = None
    """Its `engine`."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Its `replicas`."""
    autoscaling: Autoscaling | None = None
    """Its `autoscaling`."""
    lookahead: Annotated[int, Field(ge=0)] | None = None
    """Its `lookahead`."""
    tenants: Path | list[Tenant]
    """A YAML file with a list `tenants`, or the list itself. A relative path starts at the working
    directory of the server."""
    ingresses: Annotated[int, Field(ge=1)] = 1
    """HTTP front ends, each for all models."""
    grace_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """How long a process that is removed may go on with what it has. Then requests of a replica go
    on at another one, and those of an ingress end with an error."""
    fairness: FairPolicy = FairPolicy()
    """Who is served next."""
    api: Limits = Limits()
    """Bounds and defaults of the HTTP API."""
    prices: dict[str, Prices] = {}
    """By model name, in dollars per million tokens; what budgets are counted in. A model without
    prices is free."""
    gpu_dollars_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What one replica's device costs us: `/admin/usage` then tells our own cost."""
    usage: Usage = Path("usage.db")
    """Where usage and spending are kept: an SQLite file, or a Redis whose budgets several clusters
    share; null keeps them in memory only."""
    admin_keys: list[Digest] = []
    """Digests of keys that may read `/admin/tenants` and `/admin/usage`."""
    metrics_from: list[IPvAnyNetwork] = []
    """Who may read `/metrics` without a key of an administrator's: addresses or networks, as this
    server sees them. Behind a proxy that is the proxy's."""
    vllm_metrics: bool = False
    """`/metrics` tells the figures under vLLM's names, too, for dashboards and endpoint pickers."""

    spans_to: Annotated[str, Field(pattern=r"^https?://.")] | None = None
    """Where each request is told as OpenTelemetry spans, by OTLP over HTTP: a collector, such as
    `http://collector:4318`. By default where `OTEL_EXPORTER_OTLP_ENDPOINT` says; else none are
    made. Needs `fairstream[otel]`."""

    @model_validator(mode="after")
    def _opentelemetry_is_installed(self) -> AppConfig:
        if self.spans_to is not None and not has_opentelemetry():
            raise ValueError("spans_to needs OpenTelemetry: pip install 'fairstream[otel]'")
        return self

    @model_validator(mode="after")
    def _redis_is_installed(self) -> AppConfig:
        if isinstance(self.usage, str) and importlib.util.find_spec("redis") is None:
            raise ValueError("usage is a Redis: pip install 'fairstream[redis]'")
        return self

    @model_validator(mode="after")
    def _models_are_described_once(self) -> AppConfig:
        of_one = sorted(OF_ONE_MODEL.keys() & self.model_fields_set)
        if self.models is not None and of_one:
            raise ValueError(f"{of_one[0]} cannot stand beside models: say it of one of them")
        if self.models is None and (self.model_name is None or self.engine is None):
            raise ValueError("name the model: model_name and engine, or a list of models")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> AppConfig:
        names = [name for model in self.served for name in (model.name, *model.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is the name or alias of a model twice")
        if len(self.replica_deployments) < len(self.served):
            raise ValueError("names of models must differ in more than special characters")
        for name in self.prices.keys() - {model.name for model in self.served}:
            called = ", ".join(repr(model.name) for model in self.served)
            raise ValueError(f"prices names {name!r}, but there is only {called}")
        return self

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """The models, however they were described."""
        if self.models is not None:
            return self.models
        options = {known: getattr(self, option) for option, known in OF_ONE_MODEL.items()}
        return (ModelConfig.model_construct(**options),)

    @property
    def price_list(self) -> dict[str, Prices]:
        """Prices of all models, also of those that are free; none where nothing has a price."""
        free = {model.name: Prices() for model in self.served} if self.prices else {}
        return free | self.prices

    @property
    def replica_deployments(self) -> dict[str, ModelConfig]:
        """By name of the deployment that runs a model's replicas: "Replica" of an application
        with one model, else "Replica-" and the model's name, special characters as "-"."""
        if self.models is None:
            return {"Replica": self.served[0]}
        return {deployment_of(model.name): model for model in self.models}

    @property
    def spans_url(self) -> str | None:
        """Where spans are posted, if there are to be any."""
        if _spans_are_off():
            return None
        if self.spans_to is not None:
            return f"{self.spans_to.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
        return _spans_url_of_environment()

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
