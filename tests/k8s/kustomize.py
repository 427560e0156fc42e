"""Renders a kustomization: the part of kustomize that `k8s/` uses, and an error for all else.

So that what is tested is what `kubectl apply -k` applies, without kubectl; where there is one, a
test compares the two. It knows no kind of resource, except where labels or namespaces say so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

LOCAL = "config.kubernetes.io/local-config"
"""Annotation of what is there to be read while rendering, and applied by nobody."""
CLUSTER_WIDE = {"Namespace"}
HEADER = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def render(folder: Path) -> list[Resource]:
    """The resources of `folder/kustomization.yaml`. Raises ValueError on what this renderer does
    not know, and on what kustomize would refuse; OSError on files that are not there."""
    return [one for one in _render(folder) if LOCAL not in one["metadata"].get("annotations", {})]


def documents(text: str) -> list[Any]:
    """Each with nodes of its own: aliases are copies, as JSON has none."""
    return [_unshared(one) for one in yaml.safe_load_all(text)]


def _render(folder: Path) -> list[Resource]:
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if {name: plan.pop(name, None) for name in HEADER} != HEADER:
        raise ValueError(f"{folder}: not a kustomization")
    if unknown := plan.keys() - STEPS.keys() - {"resources", "generatorOptions"}:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")
    resources: list[Resource] = []
    for name in plan.get("resources", []):
        _add(resources, _load(folder / name))
    _generate(folder, plan, resources)
    for name, step in STEPS.items():
        step(folder, plan.get(name), resources)
    return resources


def _load(path: Path) -> list[Resource]:
    return _render(path) if path.is_dir() else documents(path.read_text())


def _add(resources: list[Resource], more: list[Resource]) -> None:
    known = {_identity(one) for one in resources}
    for one in more:
        if _identity(one) in known:
            raise ValueError(f"{_identity(one)} is there twice")
        resources.append(one)


def _identity(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def _generate(folder: Path, plan: Resource, resources: list[Resource]) -> None:
    general = plan.get("generatorOptions", {})
    for made in plan.get("configMapGenerator", []):
        _only(made, {"name", "files", "options", "behavior"}, folder)
        options = general | made.get("options", {})
        _only(options, {"disableNameSuffixHash", "labels", "annotations"}, folder)
        if options.get("disableNameSuffixHash") is not True:
            raise ValueError(f"{folder}: names with a hash are not known here")
        data = {name: (folder / name).read_text() for name in made["files"]}
        if made.get("behavior") == "replace":
            _one(resources, "ConfigMap", made["name"])["data"] = data
            continue
        metadata = {"name": made["name"]}
        metadata |= {key: options[key] for key in ("labels", "annotations") if key in options}
        whole = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        _add(resources, [whole])


def _patch(folder: Path, patches: list[Resource] | None, resources: list[Resource]) -> None:
    for patch in patches or []:
        _only(patch, {"path", "target"}, folder)
        (content,) = documents((folder / patch["path"]).read_text())
        if "target" not in patch:
            _delete(content, resources)
            continue
        target = _one(resources, patch["target"]["kind"], patch["target"]["name"])
        for operation in content:
            _apply(operation, target)


def _delete(patch: Resource, resources: list[Resource]) -> None:
    if patch.get("$patch") != "delete" or patch.keys() - {"apiVersion", "kind", "metadata"} != {
        "$patch"
    }:
        raise ValueError(f"only a deletion needs no target: {_identity(patch)}")
    resources.remove(_one(resources, *_identity(patch)))


def _apply(operation: Resource, target: Resource) -> None:
    """One of RFC 6902."""
    _only(operation, {"op", "path", "value"}, Path())
    *way, last = (part.replace("~1", "/") for part in operation["path"].split("/")[1:])
    place: Any = target
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    kind, key = operation["op"], int(last) if isinstance(place, list) and last != "-" else last
    if kind == "add" and isinstance(place, list):
        place.insert(len(place) if key == "-" else key, operation["value"])
    elif kind == "add":
        place[key] = operation["value"]
    elif kind == "replace":
        _ = place[key]  # It must be there.
        place[key] = operation["value"]
    elif kind == "remove":
        del place[key]
    elif kind != "test" or place[key] != operation["value"]:
        raise ValueError(f"this operation fails: {operation}")


def _set_namespace(folder: Path, name: str | None, resources: list[Resource]) -> None:
    for one in resources if name else []:
        if one["kind"] not in CLUSTER_WIDE:
            one["metadata"]["namespace"] = name


def _label(folder: Path, labels: list[Resource] | None, resources: list[Resource]) -> None:
    for label in labels or []:
        _only(label, {"pairs"}, folder)
        for one in resources:
            one["metadata"].setdefault("labels", {}).update(label["pairs"])


def _set_images(folder: Path, images: list[Resource] | None, resources: list[Resource]) -> None:
    for image in images or []:
        _only(image, {"name", "newName", "newTag"}, folder)
        name = image.get("newName", image["name"])
        for container in _containers(resources):
            if container["image"].split(":")[0] == image["name"]:
                container["image"] = f"{name}:{image['newTag']}"


def _containers(value: Any) -> list[Resource]:
    """Of all pods, wherever their templates are."""
    if isinstance(value, list):
        return [found for one in value for found in _containers(one)]
    if not isinstance(value, dict):
        return []
    here = [*value.get("initContainers", []), *value.get("containers", [])]
    return here + _containers(list(value.values()))


def _replace(folder: Path, rules: list[Resource] | None, resources: list[Resource]) -> None:
    for rule in rules or []:
        source, (target,) = rule["source"], rule["targets"]
        found = _one(resources, source["kind"], source["name"])
        prefix, _, key = source["fieldPath"].partition(".[")
        (path,) = target["fieldPaths"]
        *way, last = path.split(".")
        place = _one(resources, target["select"]["kind"], target["select"]["name"])
        for part in way:
            place = place[part]
        if last not in place and target.get("options") != {"create": True}:
            raise ValueError(f"{folder}: there is no {path}")
        place[last] = found[prefix][key.removesuffix("]")]


def _one(resources: list[Resource], kind: str, name: str) -> Resource:
    try:
        (found,) = (one for one in resources if _identity(one) == (kind, name))
    except ValueError:
        raise ValueError(f"there is not one {kind} {name}") from None
    return found


def _only(mapping: Resource, known: set[str], folder: Path) -> None:
    if unknown := mapping.keys() - known:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(one) for key, one in value.items()}
    return [_unshared(one) for one in value] if isinstance(value, list) else value


STEPS: dict[str, Callable[[Path, Any, list[Resource]], None]] = {
    "configMapGenerator": lambda folder, plan, resources: None,  # comes first, see _generate
    "patches": _patch,
    "namespace": _set_namespace,
    "labels": _label,
    "images": _set_images,
    "replacements": _replace,
}
"""In kustomize's own order."""
