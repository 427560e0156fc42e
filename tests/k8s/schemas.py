"""Whether resources are what a cluster would take, with every unknown field an error.

Kubernetes' own kinds: kubernetes-validate. Others: the schemas of their custom resource
definitions, JSON files in a folder that `--crd-schemas` names. It knows no field by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from jsonschema.protocols import Validator

from tests.k8s.kustomize import Resource

KUBERNETES = "1.33"
METADATA = {"name", "namespace", "labels", "annotations"}


def schema_problems(resources: list[Resource], crds: Path | None) -> Iterator[str]:
    """A line for each. Without `crds`, custom resources pass unseen, but not the pods in them."""
    for one in resources:
        if unknown := one["metadata"].keys() - METADATA:
            yield f"{one['kind']}: metadata has no {sorted(unknown)}"
        yield from _core(one) if _is_core(one) else _custom(one, crds)
    for template in pod_templates(resources):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": template["spec"],
        }
        yield from _core(pod)


def pod_templates(value: Any) -> list[Resource]:
    """Of all pods that the resources would make."""
    if isinstance(value, list):
        return [found for one in value for found in pod_templates(one)]
    if not isinstance(value, dict):
        return []
    here = [value] if "containers" in value.get("spec", ()) else []
    return here + pod_templates(list(value.values()))


def _is_core(resource: Resource) -> bool:
    group = resource["apiVersion"].rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway."))


def _core(resource: Resource) -> Iterator[str]:
    try:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{resource['kind']} {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"{resource['kind']}: {error}"


def _custom(resource: Resource, crds: Path | None) -> Iterator[str]:
    if crds is None:
        return
    key = resource["apiVersion"], resource["kind"]
    if key not in _validators(crds):
        yield f"{key}: there is no such kind"
        return
    for error in _validators(crds)[key].iter_errors(resource):
        yield f"{resource['kind']} {error.json_path}: {error.message[:200]}"


@cache
def _validators(crds: Path) -> dict[tuple[str, str], Validator]:
    found = {}
    for path in crds.glob("*.json"):
        spec = json.loads(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {"metadata": {"type": "object"}}
            name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found[name] = jsonschema.Draft202012Validator(schema)
    return found


def _strict(schema: Any) -> Any:
    """Refuses what the API server would drop; a field with a default need not be there."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    properties = strict.get("properties")
    if not isinstance(properties, dict):
        return strict
    defaults = {
        key for key, one in properties.items() if isinstance(one, dict) and "default" in one
    }
    if isinstance(strict.get("required"), list):
        strict["required"] = [key for key in strict["required"] if key not in defaults]
    if not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict
