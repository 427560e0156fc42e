"""Checks a Serve configuration file before anything starts: `fairstream-check FILE`, or
`python -m serve_app.check FILE`.

Serve ignores a key that it does not know, so a misspelt option silently does nothing. Here it
is an error, at every level; so is a model that cannot be served. The module knows Serve's
schema and our settings, and starts nothing.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from serve_app.checks.model import check_model
from serve_app.checks.usage import check_admission, check_shared, check_usage
from serve_app.checks.warnings import about, about_address
from serve_app.scaling.types import read_limits
from serve_app.settings import BUILDER, AppConfig, TenantsSource, require_prices

POLICY = "serve_app.scaling_policy:ScalingPolicy"
DEPLOYMENTS = ("Admission", "Ingress")
"""What `BUILDER` builds beside replicas, and a file may set options of."""


def check_serve_config(path: Path) -> list[AppConfig]:
    """The settings of our applications in it. Raises ValueError with a line per mistake, OSError
    if a file cannot be read."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: this is not YAML: {error}") from None
    mistakes = list(_unknown_keys(ServeDeploySchema, data, ""))
    with _noted(mistakes):
        ServeDeploySchema.model_validate(data)
    configs = []
    for application in _ours(data):
        with _noted(mistakes):
            configs.append(AppConfig.model_validate(application.get("args", {})))
    _raise(path, mistakes)
    checked = [
        _check_application(ServeApplicationSchema.model_validate(application), config, mistakes)
        for application, config in zip(_ours(data), configs, strict=True)
    ]
    with _noted(mistakes):
        check_shared(checked)
    _raise(path, mistakes if checked else [f"no application has the import_path {BUILDER}"])
    return checked


@contextmanager
def _noted(mistakes: list[str]) -> Iterator[None]:
    """What is wrong is written down, and what does not depend on it is looked at, too."""
    try:
        yield
    except ValidationError as error:
        mistakes += _sentences(error)
    except ValueError as error:
        mistakes += str(error).splitlines()


def _raise(path: Path, mistakes: Iterable[str]) -> None:
    if lines := [f"{path}: {mistake}" for mistake in mistakes]:
        raise ValueError("\n".join(lines))


def _ours(data: Any) -> list[dict[str, Any]]:
    """Our applications in a file that may be anything."""
    applications = data.get("applications") if isinstance(data, dict) else None
    each = applications if isinstance(applications, list) else []
    return [one for one in each if isinstance(one, dict) and one.get("import_path") == BUILDER]


def _check_application(
    application: ServeApplicationSchema, config: AppConfig, mistakes: list[str]
) -> AppConfig:
    """What each part means beside the others."""
    with _noted(mistakes):
        require_prices(config.tenants_source.load(), config.prices)
    with _noted(mistakes):
        check_usage(config.usage)
    with _noted(mistakes):
        _check_scaling(application, config)
    known = (*DEPLOYMENTS, *config.replica_deployments)
    for deployment in application.deployments:
        if deployment.name not in known:
            there_are = ", ".join(known)
            mistakes.append(f"there is no deployment {deployment.name}; there are {there_are}")
            continue
        if deployment.name == "Admission":
            with _noted(mistakes):
                check_admission(deployment)
        if isinstance(deployment.user_config, dict):
            with _noted(mistakes):
                source = TenantsSource.model_validate(deployment.user_config)
                require_prices(source.load(), config.prices)
                # Admission goes by it, and tells the others.
                config = config.model_copy(update={"tenants": source.tenants})
    return config


def _check_scaling(application: ServeApplicationSchema, config: AppConfig) -> None:
    """The bounds stand in our settings, the rest with Serve's: one without the other scales
    nothing, or by counting requests."""
    written = application.autoscaling_policy or {}
    if mistakes := list(_unknown_keys(AutoscalingPolicy, written, "autoscaling_policy.")):
        raise ValueError("\n".join(mistakes))
    policy = AutoscalingPolicy.model_validate(written)
    scaled = any(model.autoscaling is not None for model in config.served)
    if policy.policy_function != POLICY:
        if scaled:
            raise ValueError(f"autoscaling needs autoscaling_policy.policy_function: {POLICY}")
        return
    if not scaled:
        raise ValueError(f"{POLICY} needs args with autoscaling: {{max_replicas: ...}}")
    try:
        read_limits(policy.policy_kwargs)
    except ValueError as error:
        raise ValueError(f"autoscaling_policy.policy_kwargs: {error}") from None


def _sentences(error: ValidationError) -> Iterator[str]:
    """What pydantic found, one line each, without the values."""
    for item in error.errors(include_url=False, include_input=False):
        yield f"{'.'.join(map(str, item['loc']))}: {item['msg']}"


def _unknown_keys(model: type[BaseModel], data: Any, where: str) -> Iterator[str]:
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            close = difflib.get_close_matches(str(key), model.model_fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{where}{key} is not an option of Ray Serve{hint}"
        elif (nested := _model_within(field.annotation)) is not None:
            for place, item in _items(value, f"{where}{key}"):
                yield from _unknown_keys(nested, item, f"{place}.")


def _items(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{where}[{index}]", item) for index, item in enumerate(value))
    else:
        yield where, value


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Optional[Model]`, `list[Model]` or `dict | Model`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_within, get_args(annotation))), None)


def _warn(name: str, warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"{name}: warning: {warning}", file=sys.stderr)


def _check(name: str) -> bool:
    """Whether a file is fine; what is wrong is told."""
    path, mistakes = Path(name), list[str]()
    try:
        configs = check_serve_config(path)
        for model in (model for config in configs for model in config.served):
            with _noted(mistakes):
                check_model(model.engine)
        _raise(path, mistakes)
        for config in configs:
            _warn(name, about(config))
        _warn(name, about_address(path))
    except OSError as error:
        print(f"{name}: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    else:
        print(f"{name}: fine")
        return True
    return False


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("usage: fairstream-check FILE ...")
    fine = [_check(name) for name in sys.argv[1:]]
    sys.exit(not all(fine))


if __name__ == "__main__":
    main()
