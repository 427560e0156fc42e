"""What we set of the variables that Ray, Serve and uvicorn read, for a cluster that this process
starts. Manifests set the same. Who has said something else keeps it."""

from __future__ import annotations

import os

from serve_app import request_ids

DEFAULTS = {
    request_ids.VARIABLE: request_ids.LAYERS,
    # Ray starts workers at niceness 15, behind all else on the machine. An engine's threads wait
    # for each other a hundred times a step: one program that computes would bring it to a stand.
    "RAY_worker_niceness": "0",
    # Behind HAProxy every client is at 127.0.0.1, whom uvicorn believes what X-Forwarded-For says:
    # anybody could take a new address, and a new bucket of refusals, for each request.
    "FORWARDED_ALLOW_IPS": "",
}


def install() -> None:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
