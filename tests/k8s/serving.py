"""Whether the Serve configuration of an overlay is one, and agrees with the pods that it runs on.

The configuration itself is checked by our own check; what the pods offer, by Ray's autoscaler's own
reading of them.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ray.autoscaler._private.kuberay.autoscaling_config import (
    _generate_available_node_types_from_ray_cr_spec,
)

from serve_app import leave_node
from serve_app.check import DEPLOYMENTS, check_serve_config
from serve_app.settings import BUILDER, AppConfig
from tests.k8s.kustomize import Resource
from tests.k8s.manifests import Manifests, Pods

MARGIN_S = 15
"""For a command to start, and for Ray's own processes to end."""


def serving_problems(made: Manifests) -> Iterator[str]:
    try:
        (config,) = _check(made)
    except (ValueError, OSError) as error:
        yield f"serve.yaml: {error}"
        return
    (application,) = made.serve["applications"]
    deployments = {*DEPLOYMENTS, *config.replica_deployments}
    if application["import_path"] != BUILDER or set(made.actors) != deployments:
        yield "serve.yaml: each of our deployments must say where it runs"
        return
    yield from _place_problems(made)
    yield from _http_problems(made)
    yield from _file_problems(made)
    yield from _usage_problems(made)
    yield from _device_problems(made)
    yield from _leaving_problems(made, config.grace_s)


def _check(made: Manifests) -> list[AppConfig]:
    """Our own check, with the files where this machine has them. Raises ValueError or OSError."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _mounted(made.where("Admission"), made, made.args["tenants"]):
            (Path(folder) / name).write_text(text)
        text = made.service["spec"]["serveConfigV2"]
        path = Path(folder) / "serve.yaml"
        tenants = PurePosixPath(made.args["tenants"]).parent
        path.write_text(text.replace(f"{tenants}{os.sep}", f"{folder}{os.sep}"))
        return check_serve_config(path)


def _mounted(pods: Pods, made: Manifests, path: str) -> list[tuple[str, str]]:
    volume = pods.mounts.get(str(PurePosixPath(path).parent), {})
    name = volume.get("configMap", {}).get("name")
    configs = (one for one in made.of("ConfigMap") if one["metadata"]["name"] == name)
    return [entry for one in configs for entry in one["data"].items()]


def _place_problems(made: Manifests) -> Iterator[str]:
    nodes = _nodes(made)
    amounts = {
        "Admission": 1,
        "Ingress": made.args.get("ingresses", 1),
        "Replica": _most_replicas(made.args),
    }
    if nodes["headgroup"]["resources"].get("CPU") != 0:
        yield "whatever asks for a CPU may run on the head"
    for deployment, options in made.actors.items():
        wanted = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus", 0)}
        wanted |= options["resources"]
        homes = [name for name, node in nodes.items() if _fits(wanted, node["resources"])]
        if len(homes) != 1:
            yield f"{deployment} fits into {homes}"
            continue
        node = nodes[homes[0]]
        each = min(node["resources"][name] // need for name, need in wanted.items() if need)
        if math.ceil(amounts[deployment] / each) > max(node["max_workers"], 1):
            yield f"{homes[0]} has no room for {amounts[deployment]} of {deployment}"


def _most_replicas(args: Resource) -> int:
    return args["autoscaling"]["max_replicas"] if "autoscaling" in args else args["replicas"]


def _nodes(made: Manifests) -> dict[str, Resource]:
    """What the autoscaler will take each group for."""
    cluster = made.cluster
    groups = [{"maxReplicas": 1, "minReplicas": 0, **one} for one in cluster["workerGroupSpecs"]]
    return _generate_available_node_types_from_ray_cr_spec(cluster | {"workerGroupSpecs": groups})


def _fits(wanted: dict[str, float], offered: dict[str, float]) -> bool:
    return all(need <= offered.get(name, 0) for name, need in wanted.items())


def _http_problems(made: Manifests) -> Iterator[str]:
    """C58: no probe that cannot pass, none that passes before its pod is of use."""
    http = made.serve["http_options"]
    if http["host"] != "0.0.0.0":
        yield "nobody reaches Serve from outside its pod"
    everywhere = made.serve["proxy_location"] == "EveryNode"
    for pods in made.ray_pods.values():
        if pods.ports["serve"] != http["port"]:
            yield f"{pods.name}: Serve listens on {http['port']}"
        probe = pods.container["readinessProbe"]["httpGet"]
        asks_proxy = probe["port"] == "serve"
        if asks_proxy and (probe["path"] != "/-/healthz" or not everywhere):
            yield f"{pods.name} is never ready: it has no proxy to say so"
        if not asks_proxy and pods.name != "head":
            yield f"{pods.name} gets traffic before its proxy is up"
    if made.service["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "the head gets traffic before its proxy is up"


def _file_problems(made: Manifests) -> Iterator[str]:
    for pods in made.ray_pods.values():
        names = [name for name, _ in _mounted(pods, made, made.args["tenants"])]
        if PurePosixPath(made.args["tenants"]).name not in names:
            yield f"{pods.name}: there is no {made.args['tenants']}"
        if not _is_kept(pods, pods.env["HF_HOME"]["value"]):
            yield f"{pods.name}: HF_HOME is on no volume"
    if not _is_kept(made.where("Replica"), made.args["engine"]["cache_dir"]):
        yield "engine.cache_dir is on no volume"
    if "FAIRSTREAM_KEY_SECRET" not in made.where("Ingress").env:
        yield "the ingresses do not know what keys are digested with"


def _is_kept(pods: Pods, path: str) -> bool:
    parents = map(str, PurePosixPath(path).parents)
    return any("persistentVolumeClaim" in pods.mounts.get(one, {}) for one in parents)


def _usage_problems(made: Manifests) -> Iterator[str]:
    """Two clusters live side by side during a NewCluster upgrade, and must count together."""
    usage, kind = made.args["usage"], made.service["spec"]["upgradeStrategy"]["type"]
    home, fault_tolerance = made.where("Admission"), made.cluster.get("gcsFaultToleranceOptions")
    if not usage.startswith("redis://"):
        if kind != "None":
            yield f"upgradeStrategy {kind} has two Admissions write {usage}"
        if not _is_kept(home, usage):
            yield f"{usage} is on no volume"
        if made.of("StatefulSet"):
            yield "Redis is not used"
        return
    if kind != "NewCluster":
        yield f"upgradeStrategy is {kind}"
    if "FAIRSTREAM_REDIS_PASSWORD" not in home.env:
        yield "Admission does not know the password of Redis"
    url = urlsplit(usage)
    rays = (fault_tolerance or {}).get("redisAddress")
    yield from _address_problems(made, f"{url.hostname}:{url.port}", rays)
    for one in made.of("StatefulSet"):
        yield from _redis_problems(one)


def _address_problems(made: Manifests, ours: str, rays: str | None) -> Iterator[str]:
    addresses = {
        f"{one['metadata']['name']}:{port['port']}"
        for one in made.of("Service")
        for port in one["spec"]["ports"]
    }
    for address in (ours, rays):
        if address not in addresses:
            yield f"there is no Redis at {address}"
    if ours == rays:
        yield "usage and Ray's state can fill each other's Redis"


def _redis_problems(stateful_set: Resource) -> Iterator[str]:
    """It ends with an error before its container is killed, log rewriting included."""
    name = stateful_set["metadata"]["name"]
    [container] = stateful_set["spec"]["template"]["spec"]["containers"]
    options = dict(pairwise(container["args"]))
    most = options.get("--maxmemory", "0mb").removesuffix("mb")
    limit = container["resources"]["limits"]["memory"].removesuffix("Mi")
    if not most.isdigit() or not 0 < 2 * int(most) <= int(limit):
        yield f"{name} may take more memory than it has"
    if options.get("--maxmemory-policy") != "noeviction" or options.get("--appendonly") != "yes":
        yield f"{name} forgets"


def _device_problems(made: Manifests) -> Iterator[str]:
    engine, pods = made.args["engine"], made.where("Replica")
    limits = pods.container["resources"]["limits"]
    gpus = int(limits.get("nvidia.com/gpu", 0))
    on_gpu = engine["device"] == "cuda"
    if (gpus, made.actors["Replica"].get("num_gpus", 0)) != ((1, 1) if on_gpu else (0, 0)):
        yield "engine.device and the GPUs of its pods do not agree"
    if pods.container["image"].endswith("-cuda") != on_gpu:
        yield "engine.device and the image do not agree"
    if not on_gpu and engine["threads"] != int(limits["cpu"]):
        yield "engine.threads and the CPUs of its pods do not agree"
    if made.args["prices"].keys() != {made.args["model_name"]}:
        yield "prices are of another model"


def _leaving_problems(made: Manifests, grace_s: float) -> Iterator[str]:
    """A worker's pod lets Serve leave it, and Kubernetes waits for that."""
    for name, pods in made.ray_pods.items():
        if name == "head":
            continue
        if pods.spec.get("restartPolicy", "Never") != "Never":
            yield f"{name} comes back when the autoscaler has taken it away"
        *command, seconds = pods.container["lifecycle"]["preStop"]["exec"]["command"]
        if command != ["python", "-m", leave_node.__name__, "--seconds"]:
            yield f"{name} runs {command} before it stops"
        if not grace_s < float(seconds) < pods.spec["terminationGracePeriodSeconds"] - MARGIN_S:
            yield f"{name} is killed before requests have ended"
