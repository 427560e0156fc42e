"""An overlay as tests look at it: what is rendered, and where things are. It judges nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.kustomize import Resource, render

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("local-cpu", "h200", "production")
PROJECT = (ROOT / "pyproject.toml").read_text()
(VERSION,) = re.findall(r'^version = "(.+)"', PROJECT, re.MULTILINE)


@dataclass(frozen=True)
class Pods:
    """One kind of pod: the head, or a group of workers, or of a StatefulSet."""

    name: str
    template: Resource
    labels: dict[str, str]
    """Those of the template, and what KubeRay adds."""
    ray: Resource | None = None
    """The group's specification, for Ray's pods."""
    claims: frozenset[str] = frozenset()
    """Volumes that a StatefulSet makes for each pod."""

    @property
    def spec(self) -> Resource:
        return self.template["spec"]

    @property
    def container(self) -> Resource:
        (only,) = self.spec["containers"]
        return only

    @property
    def ports(self) -> dict[str, int]:
        return {one["name"]: one["containerPort"] for one in self.container["ports"]}

    @property
    def env(self) -> dict[str, Resource]:
        return {one["name"]: one for one in self.container["env"]}

    @property
    def mounts(self) -> dict[str, Resource]:
        """Volumes by where they are."""
        volumes = {one["name"]: one for one in self.spec.get("volumes", [])}
        mounts = self.container["volumeMounts"]
        return {one["mountPath"]: volumes.get(one["name"], {}) for one in mounts}


@dataclass(frozen=True)
class Manifests:
    folder: Path
    resources: list[Resource]

    def of(self, kind: str) -> list[Resource]:
        return [one for one in self.resources if one["kind"] == kind]

    def names(self, kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.of(kind)}

    @cached_property
    def service(self) -> Resource:
        (only,) = self.of("RayService")
        return only

    @cached_property
    def cluster(self) -> Resource:
        return self.service["spec"]["rayClusterConfig"]

    @cached_property
    def ray_pods(self) -> dict[str, Pods]:
        head = self.cluster["headGroupSpec"]
        groups = {"head": head} | {
            one["groupName"]: one for one in self.cluster["workerGroupSpecs"]
        }
        return {name: _of_ray(name, group) for name, group in groups.items()}

    @cached_property
    def pods(self) -> list[Pods]:
        others = [
            Pods(
                one["metadata"]["name"],
                template,
                template["metadata"]["labels"],
                claims=frozenset(
                    claim["metadata"]["name"] for claim in one["spec"]["volumeClaimTemplates"]
                ),
            )
            for one in self.of("StatefulSet")
            for template in [one["spec"]["template"]]
        ]
        return [*self.ray_pods.values(), *others]

    def selected(self, labels: dict[str, str]) -> list[Pods]:
        return [one for one in self.pods if labels.items() <= one.labels.items()]

    @cached_property
    def serve(self) -> Resource:
        return yaml.safe_load(self.service["spec"]["serveConfigV2"])

    @cached_property
    def args(self) -> Resource:
        (only,) = self.serve["applications"]
        return only["args"]

    @cached_property
    def actors(self) -> dict[str, Any]:
        """What each deployment asks of Ray."""
        (only,) = self.serve["applications"]
        return {one["name"]: one["ray_actor_options"] for one in only["deployments"]}

    def where(self, deployment: str) -> Pods:
        """The pods on which it runs, by the resource that it asks for."""
        (resource,) = self.actors[deployment]["resources"]
        return self.ray_pods[resource]


def manifests(k8s: Path, overlay: str) -> Manifests:
    folder = k8s / "overlays" / overlay
    return Manifests(folder, render(folder))


def _of_ray(name: str, group: Resource) -> Pods:
    template = group["template"]
    added = {
        "ray.io/node-type": "head" if name == "head" else "worker",
        "ray.io/group": "headgroup" if name == "head" else name,
    }
    return Pods(name, template, template["metadata"]["labels"] | added, group)
