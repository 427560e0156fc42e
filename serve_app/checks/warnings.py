"""Warnings about settings that are allowed and probably not meant. None of them is an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from replica.model.loading import load_spec
from router.tenant import KEYED, Tenants
from serve_app.checks.usage import about_usage
from serve_app.settings import AppConfig, key_secret


def about(config: AppConfig) -> Iterator[str]:
    """The warnings about one configuration."""
    tenants = config.tenants_source.load()
    if not tenants.tenants:
        yield "there are no tenants: nobody can use this server"
    yield from _about_models_of(tenants, config)
    yield from _about_budgets_of(tenants)
    yield from _about_secret(tenants, config)
    yield from about_usage(config.usage)
    devices = {model.engine.device for model in config.served}
    if "cuda" in devices and not torch.cuda.is_available():
        yield "engine.device is cuda, and this machine has no GPU that works"
    for model in config.served:
        kv_tokens, context = model.engine.kv_tokens, model.engine.max_model_len
        longest = load_spec(model.engine.model, model.engine.revision).max_position
        if kv_tokens is not None and context is None and kv_tokens < longest:
            yield (
                f"engine.kv_tokens holds {kv_tokens} tokens: requests of {model.name} are limited "
                f"to that, although its context has {longest}"
            )


def _about_models_of(tenants: Tenants, config: AppConfig) -> Iterator[str]:
    """Names that tenants may use and nobody serves. A tenant would only get a 404."""
    names = {name: model.name for model in config.served for name in (model.name, *model.aliases)}
    served = ", ".join(model.name for model in config.served)
    for tenant in tenants.tenants:
        for name in tenant.models or ():
            if name not in names:
                yield f"tenant {tenant.id} may use {name}, which is not served; there is {served}"
            elif names[name] != name:
                yield f"tenant {tenant.id} may use {name}, an alias: write {names[name]}"


def _about_budgets_of(tenants: Tenants) -> Iterator[str]:
    for tenant in tenants.tenants:
        day, month = tenant.daily_budget, tenant.monthly_budget
        if day is not None and month is not None and day > month:
            yield f"tenant {tenant.id}: daily_budget ({day}) is above monthly_budget ({month})"


def _about_secret(tenants: Tenants, config: AppConfig) -> Iterator[str]:
    """The server may have one where it runs, and this machine none."""
    keys = [key for tenant in tenants.tenants for key in tenant.keys]
    keyed = [key for key in (*keys, *config.admin_keys) if key.startswith(KEYED)]
    if keyed and not key_secret():
        yield (
            f"{len(keyed)} keys are {KEYED} digests, and FAIRSTREAM_KEY_SECRET is not set: nobody "
            "could use them"
        )


def about_address(path: Path) -> Iterator[str]:
    """Warnings about the address to listen at: Serve itself is silent when it cannot bind it."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    options = ServeDeploySchema.model_validate(data).http_options
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            yield f"port {options.port} of {options.host} cannot be listened at: {why}"
