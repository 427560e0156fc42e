"""Names that one part of the manifests uses and another defines: a line for each that is not there.

Also what every pod must have: who it runs as, where it may write, that it says what it needs.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from ray.scripts.scripts import start

from tests.k8s.kustomize import Resource
from tests.k8s.manifests import ROOT, VERSION, Manifests, Pods

HA_PROXY = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
READ_BY = {
    "RAY_SERVE_": "ray.serve._private.constants",
    "RAY_worker_": "ray._private.ray_constants",
    "RAY_USAGE_": "ray._common.usage.usage_constants",
    "FAIRSTREAM_": "serve_app.settings",
    "HF_HOME": "huggingface_hub.constants",
    "HF_TOKEN": "huggingface_hub.utils._auth",
}
"""The module that reads the variables of a prefix."""
AGENT_PORT = 52365
"""Of Ray's agent on each node, by default."""


def reference_problems(made: Manifests) -> Iterator[str]:
    for pods in made.pods:
        own = [*_pod_problems(made, pods), *(_ray_problems(pods) if pods.ray else ())]
        yield from (f"{pods.name}: {problem}" for problem in own)
    for one in made.resources:
        named = f"{one['kind']} {one['metadata']['name']}"
        yield from (f"{named} {problem}" for problem in _resource_problems(one))
    yield from _size_problems(made.cluster["autoscalerOptions"]["resources"])
    yield from _secret_problems(made.resources)
    yield from _selector_problems(made)
    yield from _route_problems(made)
    yield from _drain_problems(made)
    yield from _version_problems(made)
    if unknown := made.names("RayService") - {"fairstream"}:
        yield f"docs/kuberay.md does not speak of {unknown}"


def _resource_problems(one: Resource) -> Iterator[str]:
    if one["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "fairstream":
        yield "does not say whose it is"
    if "serve.yaml" in one.get("data", {}):
        yield "is there to be read while rendering only"
    claims = [one, *_values(one.get("spec", {}), "volumeClaimTemplates")]
    for requests in _values([claim for claim in claims if _is_claim(claim)], "requests"):
        if requests.keys() != {"storage"}:
            yield f"does not say how large it is: {requests}"
    if one["kind"] == "StatefulSet":
        labels = one["spec"]["template"]["metadata"]["labels"]
        if one["spec"]["selector"]["matchLabels"] != labels:
            yield "does not know its pods"


def _is_claim(value: Any) -> bool:
    """Or claims' templates."""
    return isinstance(value, list) or value["kind"] == "PersistentVolumeClaim"


def _pod_problems(made: Manifests, pods: Pods) -> Iterator[str]:
    container = pods.container
    mounts = {one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pods.spec.get("volumes", [])}
    volumes |= {name: {} for name in pods.claims}
    if mounts != volumes.keys():
        yield f"volumes {sorted(volumes)}, but mounts {sorted(mounts)}"
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in made.names("PersistentVolumeClaim"):
            yield f"there is no claim {claim}"
        config = volume.get("configMap", {}).get("name")
        if config is not None and config not in made.names("ConfigMap"):
            yield f"there is no ConfigMap {config}"
    yield from _probe_problems(pods)
    yield from _security_problems(pods.spec, container)
    yield from _size_problems(container["resources"])
    for spread in pods.spec.get("topologySpreadConstraints", []):
        if pods not in made.selected(spread["labelSelector"]["matchLabels"]):
            yield "it is spread among others"


def _size_problems(sizes: Resource) -> Iterator[str]:
    """Kubernetes takes any word for a resource that some device may offer."""
    for amounts in sizes.values():
        if not {"cpu", "memory"} <= amounts.keys() <= {"cpu", "memory", "nvidia.com/gpu"}:
            yield f"it does not say what it needs: {amounts}"
    if sizes["requests"].get("memory") != sizes["limits"].get("memory"):
        yield "memory that is not reserved"


def _secret_problems(value: Any) -> Iterator[str]:
    documented = (ROOT / "docs/kuberay.md").read_text()
    for name, key in _secrets(value):
        if not re.search(rf"create secret generic {name} .*--from-literal={key}=", documented):
            yield f"docs/kuberay.md does not make the secret {name} with {key}"


def _secrets(value: Any) -> Iterator[tuple[str, str]]:
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return
    if isinstance(value, dict) and "secretKeyRef" in value:
        yield value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]
    for child in children:
        yield from _secrets(child)


def _probe_problems(pods: Pods) -> Iterator[str]:
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = pods.container[kind]
        port = (probe.get("httpGet") or probe["tcpSocket"])["port"]
        if port != AGENT_PORT and port not in pods.ports:
            yield f"its {kind} asks port {port}, which it does not have"


def _security_problems(spec: Resource, container: Resource) -> Iterator[str]:
    user, own = spec["securityContext"], container["securityContext"]
    if user["runAsNonRoot"] is not True or not user["runAsUser"] or not user["fsGroup"]:
        yield "it may run as root"
    if own["readOnlyRootFilesystem"] is not True or own["allowPrivilegeEscalation"] is not False:
        yield "it may change its own files, or become more than it is"
    if own["capabilities"] != {"drop": ["ALL"]} or user["seccompProfile"] != {
        "type": "RuntimeDefault"
    }:
        yield "it may do more than it needs"


def _ray_problems(pods: Pods) -> Iterator[str]:
    yield from _env_problems(pods.env)
    for path in ("/tmp", "/dev/shm"):
        if "emptyDir" not in pods.mounts.get(path, {}):
            yield f"{path} cannot be written"
    if pods.env["HOME"]["value"] not in pods.mounts:
        yield "it has no home"
    if not pods.env["HF_HOME"]["value"].startswith("/var/cache/fairstream/"):
        yield "downloads are not kept"
    assert pods.ray is not None
    known = {name.lstrip("-") for option in start.params for name in option.opts}
    if unknown := pods.ray["rayStartParams"].keys() - known:
        yield f"`ray start` has no {sorted(unknown)}"
    if int(pods.ray["rayStartParams"]["metrics-export-port"]) != pods.ports["metrics"]:
        yield "its metrics are at another port"


def _env_problems(env: dict[str, Resource]) -> Iterator[str]:
    for name, variable in env.items():
        module = next((one for prefix, one in READ_BY.items() if name.startswith(prefix)), None)
        if name != "HOME" and (module is None or name not in _words(module)):
            yield f"nobody reads {name}"
        if "value" not in variable and "valueFrom" not in variable:
            yield f"{name} has no value"
    if any(env.get(name, {}).get("value") != "1" for name in HA_PROXY):
        yield "HAProxy is not switched on"


def _words(module: str) -> set[str]:
    """Of the source of an installed module."""
    return set(re.findall(r"\w+", inspect.getsource(importlib.import_module(module))))


def _selector_problems(made: Manifests) -> Iterator[str]:
    for kind in ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy", "Service"):
        for one in made.of(kind):
            spec, name = one["spec"], f"{kind} {one['metadata']['name']}"
            selector = spec.get("selector") or spec["podSelector"]
            chosen = made.selected(selector.get("matchLabels", selector))
            if not chosen:
                yield f"{name} selects no pod"
            ports = {port for pods in chosen for port in pods.ports}
            for port in _ports_of(kind, spec):
                if isinstance(port, str) and port not in ports:
                    yield f"{name} names a port that its pods lack: {port}"
    for policy in made.of("NetworkPolicy"):
        yield from _peer_problems(made, policy)


def _peer_problems(made: Manifests, policy: Resource) -> Iterator[str]:
    name = policy["metadata"]["name"]
    for peer in _values(policy["spec"], "podSelector"):
        if not made.selected(peer["matchLabels"]):
            yield f"NetworkPolicy {name} lets nobody through: {peer}"
    documented = (ROOT / "docs/kuberay.md").read_text()
    for space in _values(policy["spec"], "namespaceSelector"):
        space_name = space["matchLabels"]["kubernetes.io/metadata.name"]
        if space_name != "kube-system" and f"-n {space_name}" not in documented:
            yield f"docs/kuberay.md has no namespace {space_name}"


def _ports_of(kind: str, spec: Resource) -> Iterator[Any]:
    if kind == "PodMonitor":
        yield from (endpoint["port"] for endpoint in spec["podMetricsEndpoints"])
    if kind == "Service":
        yield from (port["targetPort"] for port in spec["ports"])
    if kind == "NetworkPolicy":
        rules = spec["ingress"]
        yield from (port["port"] for rule in rules for port in rule.get("ports", []))


def _values(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _values(one, key)
    elif isinstance(value, dict):
        if key in value:
            yield value[key]
        yield from _values(list(value.values()), key)


def _drain_problems(made: Manifests) -> Iterator[str]:
    """A budget of as many pods as there are evicts none, and a drain waits for ever."""
    for one in made.of("PodDisruptionBudget"):
        spec = one["spec"]
        for pods in made.selected(spec["selector"]["matchLabels"]):
            there = pods.ray.get("minReplicas", 1) if pods.ray else 1
            if spec["minAvailable"] >= there:
                yield f"{one['metadata']['name']} lets no pod of {pods.name} go"


def _route_problems(made: Manifests) -> Iterator[str]:
    service, port = f"{made.service['metadata']['name']}-serve-svc", 8000
    for route in made.of("HTTPRoute"):
        for path in _values(route["spec"]["rules"], "path"):
            if path["type"] == "PathPrefix" and not path["value"].startswith("/v1"):
                yield f"HTTPRoute: {path['value']} and all below it is public"
        for backend in _values(route["spec"]["rules"], "backendRefs"):
            if backend != [{"name": service, "port": port}]:
                yield f"HTTPRoute: KubeRay's service is {service}:{port}, not {backend}"


def _version_problems(made: Manifests) -> Iterator[str]:
    docker = (ROOT / "Dockerfile").read_text()
    ray = made.cluster["rayVersion"]
    if f"ARG RAY_VERSION={ray}\n" not in docker:
        yield f"the image has another version of Ray than {ray}"
    for pods in made.ray_pods.values():
        name, _, tag = pods.container["image"].partition(":")
        if name != "fairstream" or tag.removesuffix("-cuda") != VERSION:
            yield f"{pods.name}: {name}:{tag} is no image of {VERSION}"
