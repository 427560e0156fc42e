"""What we use of Ray beyond its public interface is where we think it is, and nowhere else."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import ray

OURS = Path("serve_app/ray_private.py")
PRIVATE = re.compile(r"\b_\w+")
PARTS = {
    "ray.serve._private.long_poll.LongPollNamespace": {"DEPLOYMENT_TARGETS"},
    "ray.serve._private.common.DeploymentID": {"app_name", "name"},
    "ray.serve._private.common.ReplicaID": {"unique_id", "deployment_id"},
    "ray.serve._private.common.DeploymentTargetInfo": {"running_replicas"},
    "ray.serve.context.ReplicaContext": {"_deployment_config", "replica_id", "replica_tag"},
    "ray.serve.handle.DeploymentHandle": {"is_initialized", "_init"},
    "ray._private.worker": {"_global_node"},
}
"""And what of them."""


def imports(file: Path) -> Iterator[str]:
    """Full names of what a module takes of Ray."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "ray")


def find(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    moved = f"Ray {ray.__version__} has no {name}: see serve_app/ray_private.py for what needs it"
    try:
        found = getattr(import_module(module), attribute, None) if module else import_module(name)
    except ImportError:
        found = None
    assert found is not None, moved
    return found


@pytest.mark.parametrize("name", sorted(set(imports(OURS)) - {"ray"}))
def test_it_is_where_we_think(name: str) -> None:
    find(name)


@pytest.mark.parametrize("name", PARTS)
def test_it_has_what_we_use_of_it(name: str) -> None:
    found = find(name)
    fields = set(dir(found)) | set(getattr(found, "__annotations__", {}))
    lacks = PARTS[name] - fields
    assert not lacks, f"{name} of Ray {ray.__version__} has no {', '.join(sorted(lacks))}"


def test_a_listener_still_says_whether_it_is_told() -> None:
    from ray.serve._private.long_poll import LongPollClient

    assert "is_running" in LongPollClient.__init__.__code__.co_names


def test_handles_still_answer_without_the_object_store() -> None:
    from ray.serve._private.common import RequestMetadata

    assert "_by_reference" in inspect.signature(RequestMetadata).parameters


def test_nobody_else_uses_a_private_part() -> None:
    files = [file for file in Path("serve_app").rglob("*.py") if file != OURS]
    assert len(files) > 60
    private = {
        f"{file}: {name}" for file in files for name in imports(file) if PRIVATE.search(name)
    }
    assert private == set()
