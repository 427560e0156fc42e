"""The application that Serve runs: `import_path: serve_app.app:build` in a configuration file.

The module puts the deployments together and holds what they need of Serve; what they do is in
their own modules.
"""

# No `from __future__ import annotations`: Serve reads the type of build's argument at run time.

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.admission import Admission
from serve_app.checks.model import check_model
from serve_app.fleet.placement import Placement
from serve_app.ingress import Ingress
from serve_app.replica_deployment import Replica
from serve_app.settings import AppConfig, Autoscaling, ModelConfig, require_prices

UNLIMITED = 1_000_000
"""Serve must never queue: the one queue is Admission's."""

SIGNALS_S = 1.0
"""How often signals reach the policy."""

COMMON: dict[str, Any] = {
    "max_ongoing_requests": UNLIMITED,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    # Serve counts a CPU for each by default, and waits for it.
    "ray_actor_options": {"num_cpus": 0},
    # How often Serve looks whether a process that it removes is done.
    "graceful_shutdown_wait_loop_s": 0.5,
    # Ingresses record each request themselves; the others are called several times a second.
    "logging_config": {"enable_access_log": False},
}

ON_GPU: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0, "num_gpus": 1}}
"""Ray hides the GPUs from an actor that asks for none."""


def _followed(bounds: Autoscaling) -> dict[str, Any]:
    """Options of a deployment whose signals the policy sees. It does its own waiting."""
    return {
        "autoscaling_config": {
            "min_replicas": bounds.min_replicas,
            "max_replicas": bounds.max_replicas,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "metrics_interval_s": SIGNALS_S,
            "look_back_period_s": bounds.window_s,
        }
    }


def _number(model: ModelConfig) -> dict[str, Any]:
    """How many replicas of a model there are."""
    if model.autoscaling is None:
        return {"num_replicas": model.replicas}
    return _followed(model.autoscaling)


def _one_admission(config: AppConfig) -> dict[str, Any]:
    """The policy sees only what Serve may scale: where it scales anything, Admission is one of
    those, from 1 to 1."""
    followed = [model.autoscaling for model in config.served if model.autoscaling is not None]
    if not followed:
        return {"num_replicas": 1}
    return _followed(Autoscaling(max_replicas=1, window_s=followed[0].window_s))


def build(config: AppConfig) -> Application:
    """Serve checks `args` against `AppConfig` and calls this. Raises ValueError or OSError on
    tenants that cannot be read and on models that cannot be served: here, once, and not in each
    replica that Serve would start again and again.
    """
    require_prices(config.tenants_source.load(), config.prices)
    for model in config.served:
        check_model(model.engine)
    grace = {"graceful_shutdown_timeout_s": config.grace_s}
    admission = serve.deployment(
        Admission,
        user_config=config.tenants_source.model_dump(mode="json"),
        **_one_admission(config),
        **COMMON,
        **grace,
    ).bind(config.fairness, config.price_list, config.usage, config.gpu_dollars_per_hour)
    replicas = {
        model.name: serve.deployment(
            Replica,
            name=deployment,
            request_router_config=RequestRouterConfig(request_router_class=Placement),
            **_number(model),
            **(COMMON | ON_GPU if model.engine.device == "cuda" else COMMON),
            **grace,
        ).bind(model.name, model.engine, model.lookahead_credits, admission, config.grace_s)
        for deployment, model in config.replica_deployments.items()
    }
    ingresses = serve.deployment(
        Ingress,
        num_replicas=config.ingresses,
        **COMMON,
        **grace,
    )
    return ingresses.bind(config, admission, replicas)
