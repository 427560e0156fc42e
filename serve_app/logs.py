"""Where the processes of the service write their logs: beside Serve's own, in files of our own.

Serve holds its lines back, a thousand at a time where it is optimised for throughput, and with
them what is written to standard error. Ours are there at once. The module knows where files
lie and who the process is, not what is logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_internal_replica_context

from replica.logs import Fields, LogFile, log_to, no_fields
from serve_app.settings import secrets


def start(request: Callable[[], Fields] = no_fields) -> None:
    """Called by an actor as it begins. Outside of Serve, as in tests, nothing changes.

    request: fields of the request in whose context a line is logged.
    """
    if (file := log_file()) is not None:
        log_to(file, request, secrets())


def log_file(part: str = "") -> LogFile | None:
    """That of this actor, or of a process of its own that is called `part`: the name says which
    deployment and which replica it is."""
    context = _get_internal_replica_context()
    if context is None:
        return None
    replica = context.replica_id
    names = ("fairstream", replica.deployment_id.app_name, context.deployment)
    name = "_".join(re.sub(r"[^\w.-]", "-", each) for each in (*names, replica.unique_id))
    path = Path(get_serve_logs_dir()) / f"{name}{part and f'_{part}'}.log"
    process = {"deployment": context.deployment, "replica": replica.unique_id}
    return LogFile(str(path), process | ({"process": part} if part else {}))
