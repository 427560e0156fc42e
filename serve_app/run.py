"""Runs a configuration as `serve run` does, and lets the service leave in order when it is told to
end by Ctrl-C or SIGTERM:

    python -m serve_app.run configs/local.yaml

`serve run` kills the HTTP proxies first, so connections break. Here new requests are turned away
at once and answers that run or wait go on, for `grace_s` at most. A second signal ends all. The
module knows Serve and the names of our deployments, not how an ingress behaves.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from replica.logs import log_to_terminal
from serve_app import environment, ray_private
from serve_app.checks.warnings import about_address
from serve_app.settings import BUILDER, AppConfig

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.25
CALL_TIMEOUT_S = 1.0
QUIET_LOOKS = 4
"""In a row that find nothing: ingresses tell what they have four times a second."""


def run(path: Path) -> None:
    """Returns when the service has left. Raises OSError or ValueError on a file that cannot be
    used, RuntimeError if an application does not start, KeyboardInterrupt on the second signal.
    """
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    graces = {
        application.name: AppConfig.model_validate(application.args).grace_s
        for application in config.applications
        if application.import_path == BUILDER
    }
    environment.install()
    ray.init(namespace="serve")
    # In place of Ray's own handler, which ends this process and all others.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if ray_private.began_here():  # Serve shares a port with others without a word
            _require(path)
        _start(config)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        leave(graces)
    finally:
        _end()


def leave(graces: dict[str, float]) -> None:
    """Returns when all answers are out or the longest grace is over.

    graces: by name of the application, seconds.
    """
    logger.warning("No new requests from now on. Another signal ends those that run, too.")
    until = time.monotonic() + max(graces.values(), default=0.0)
    quiet = 0
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        quiet = 0 if sum(map(_close, graces)) else quiet + 1
        time.sleep(LOOK_PERIOD_S)


def _close(application: str) -> int:
    """Tell it, again and again, since what Admission knows dies with it. Returns how many answers
    are not out yet, or may be."""
    answers: int | None = None
    try:
        admission = serve.get_deployment_handle("Admission", application)
        ray_private.initialize(admission)
        answers = admission.close.remote().result(timeout_s=CALL_TIMEOUT_S)
    except Exception as error:  # It is not up yet, or away for a moment.
        logger.debug("Admission cannot be told: %r", error)
    return _ingresses(application) if answers is None else answers


def _ingresses(application: str) -> int:
    """How many run."""
    state = serve.status().applications.get(application)
    ingress = state and state.deployments.get("Ingress")
    return ingress.replica_states.get("RUNNING", 0) if ingress else 0


def _start(config: ServeDeploySchema) -> None:
    serve.start(
        proxy_location=config.proxy_location,
        http_options=config.http_options.model_dump(),
        grpc_options=config.grpc_options.model_dump(),
        controller_options=config.controller_options,
    )
    ray_private.deploy(config)
    while not all(map(_is_up, [application.name for application in config.applications])):
        time.sleep(LOOK_PERIOD_S)


def _is_up(application: str) -> bool:
    state = serve.status().applications.get(application)
    if state is not None and state.status == ApplicationStatus.DEPLOY_FAILED:
        raise RuntimeError(f"application {application} does not start: {state.message}")
    return state is not None and state.status == ApplicationStatus.RUNNING


def _require(path: Path) -> None:
    """Raises OSError for an address that somebody listens at."""
    for fault in about_address(path):
        raise OSError(fault)


def _end() -> None:
    """A cluster that began here ends with this process, and faster than Serve takes to end."""
    if not ray_private.began_here():
        serve.shutdown()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.run", description=__doc__)
    parser.add_argument("config", type=Path)
    path = parser.parse_args().config
    log_to_terminal()
    try:
        run(path)
    except (OSError, ValueError, yaml.YAMLError, RuntimeError) as error:
        sys.exit(f"{path}: {error}")
    except KeyboardInterrupt:
        sys.exit("ended at once")


if __name__ == "__main__":
    main()
