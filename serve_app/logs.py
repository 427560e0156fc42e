"""Where the processes of the service write their logs: beside Serve's own, in files of our own.

Serve holds its lines back, a thousand at a time where it is optimised for throughput, and with
them what is written to standard error. Ours are there at once. The module knows where files
lie and who the process is, not what is logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ray import serve
from ray.serve.exceptions import RayServeException

from replica.logs import Fields, LogFile, log_to, no_fields
from serve_app.ray_private import logs_folder
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
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    names = ("fairstream", context.app_name, context.deployment, context.replica_tag)
    name = "_".join(re.sub(r"[^\w.-]", "-", each) for each in names)
    path = logs_folder() / f"{name}{part and f'_{part}'}.log"
    process = {"deployment": context.deployment, "replica": context.replica_tag}
    return LogFile(str(path), process | ({"process": part} if part else {}))
