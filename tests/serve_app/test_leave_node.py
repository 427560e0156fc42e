from __future__ import annotations

from typing import Any

from serve_app.leave_node import is_used


def details(proxies: list[str], replicas: list[dict[str, str]]) -> dict[str, Any]:
    deployments = {"Replica": {"replicas": replicas}, "Ingress": {"replicas": []}}
    applications = {"fairstream": {"deployments": deployments}, "other": {"deployments": {}}}
    return {"proxies": {node: {} for node in proxies}, "applications": applications}


def test_a_node_is_used_by_replicas_in_any_state_and_by_its_proxy() -> None:
    stops = {"node_id": "a", "state": "STOPPING"}
    assert is_used("a", details([], [stops]))
    assert is_used("a", details(["a", "b"], []))
    assert not is_used("a", details(["b"], [stops | {"node_id": "b"}]))


def test_what_only_starts_has_no_node_yet() -> None:
    assert not is_used("a", details([], [{"state": "STARTING"}]))
