"""A typo in any file of `k8s/` is caught: every key of it, misspelt, and every name that it uses.

The short form tries some keys of each file, the long one (`--typos 1000`) all of them.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.manifests import OVERLAYS, ROOT, manifests
from tests.k8s.monitoring import monitoring_problems
from tests.k8s.references import reference_problems
from tests.k8s.schemas import schema_problems
from tests.k8s.serving import serving_problems

K8S = ROOT / "k8s"
FILES = sorted(
    path.relative_to(K8S).as_posix() for path in K8S.rglob("*") if path.suffix in (".yaml", ".json")
)
KEY = re.compile(
    r"""^(?P<before>\s*(?:- )*(?:[&*][\w-]+ )?["']?)(?P<key>[\w$./-]+)(?=["']?:(?: |$))"""
)
FREE = {
    "grafana_dashboard",  # a label for others
    "pod-security.kubernetes.io/enforce",
    "nvidia.com/gpu.product",
    "severity",
}
"""Keys that mean something to others only, whom we cannot ask."""
VALUES = {
    "base/rayservice.yaml": [
        ('value: "1"', 'value: "0"'),
        ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_HAPROXY"),
        ("FAIRSTREAM_KEY_SECRET", "FAIRSTREAM_SECRET"),
        ("name: fairstream-keys", "name: fairstream-key"),
        ("name: fairstream-tenants", "name: fairstream-tenant"),
        ("claimName: fairstream-cache", "claimName: fairstream-caches"),
        ("containerPort: 8000", "containerPort: 8001"),
        ("containerPort: 8080", "containerPort: 8081"),
        ("port: dashboard", "port: dashbord"),
        ("path: /-/healthz", "path: /healthz"),
        (
            "spec:\n            automount",
            "spec:\n            restartPolicy: Always\n            automount",
        ),
        ("port: 52365", "port: 52356"),
        ("groupName: engine", "groupName: engines"),
        ("serve_app.leave_node", "serve_app.leave"),
        ("-m, serve_app", "-n, serve_app"),
        ('"210"', '"21"'),
        ("&patience 230", "&patience 23"),
        ('\\"engine\\": 1', '\\"engin\\": 1'),
        ('\\"head\\": 1', '\\"heads\\": 1'),
        ('num-cpus: "0"', 'num-cpus: "1"'),
        ("dashboard-host", "dashbord-host"),
        ("mountPath: /etc/fairstream", "mountPath: /etc/fairsteam"),
        ("mountPath: /var/lib/fairstream", "mountPath: /var/lib/fairsteam"),
        ("mountPath: /tmp\n                - &", "mountPath: /temp\n                - &"),
        ("part-of: fairstream", "part-of: fairsteam"),
        ("image: fairstream", "image: fairsteam"),
        ("rayVersion: 2.60.0", "rayVersion: 2.6.0"),
        ("type: None", "type: NewCluster"),
        ("runAsNonRoot: true", "runAsNonRoot: false"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        ("memory: 3Gi", "memory: 3Gib"),
        ('cpu: "2"', 'cpu: "1"'),
        ("excludeHeadPodFromServeSvc: true", "excludeHeadPodFromServeSvc: false"),
    ],
    "overlays/production/disruption.yaml": [
        ("ray.io/group: front", "ray.io/group: fronts"),
        ("minAvailable: 1", "minAvailable: 2"),
    ],
    "base/network-policy.yaml": [
        ("port: as-metrics", "port: as-metric"),
        ("component: ray", "component: rays"),
        ("kuberay-operator", "kuberay-operators"),
    ],
    "base/volumes.yaml": [("name: fairstream-usage", "name: fairstream-use")],
    "base/kustomization.yaml": [("- volumes.yaml\n", "")],
    "gateway/http-route.yaml": [
        ("type: Exact\n            value: /tokenize", "type: PathPrefix\n            value: /"),
        ("fairstream-serve-svc", "fairstream-svc"),
        ("port: 8000", "port: 800"),
    ],
    "monitoring/pod-monitor.yaml": [
        ("port: dash-metrics", "port: dash"),
        ("node-type: worker", "node-type: workers"),
    ],
    "monitoring/rules.yaml": [
        ("ray_fairstream_replicas)", "ray_fairstream_replica)"),
        ('outcome="failed"', 'outcomes="failed"'),
        ("by (state)", "by (states)"),
        ("rate(ray_fairstream_tokens_total", "(ray_fairstream_tokens_total"),
        ("$labels.tenant", "$labels.tenants"),
        ("fairstream:slo_missed_share:rate15m > 0.05", "fairstream:slo_missed:rate15m > 0.05"),
    ],
    "monitoring/dashboard.json": [
        ("ray_fairstream_slots", "ray_fairstream_slot"),
        ("{{outcome}}", "{{outcomes}}"),
    ],
    "overlays/local-cpu/serve.yaml": [
        ("serve_app.app:build", "serve_app.app:built"),
        ("/etc/fairstream/tenants.yaml", "/etc/fairstream/tenant.yaml"),
        ("/var/lib/fairstream", "/var/lib/fairsteam"),
        ("/var/cache/fairstream", "/var/caches/fairstream"),
        ("{front: 0.01}", "{fronts: 0.01}"),
        ("name: Replica", "name: Replicas"),
        ("EveryNode", "HeadOnly"),
        ("host: 0.0.0.0", "host: 127.0.0.1"),
        ("port: 8000", "port: 8001"),
        ("replicas: 1", "replicas: 9"),
        ("threads: 2", "threads: 8"),
    ],
    "overlays/h200/serve.yaml": [
        ("num_gpus: 1", "num_gpus: 2"),
        ("device: cuda", "device: cpu"),
        ("scaling_policy:ScalingPolicy", "scaling_policy:Policy"),
        ("start_s: 120", "starts_s: 120"),
        ("max_replicas: 8", "max_replicas: 80"),
    ],
    "overlays/h200/sizes.yaml": [('nvidia.com/gpu: "1"}', 'nvidia.com/gpus: "1"}')],
    "overlays/h200/kustomization.yaml": [("0.1.0-cuda", "0.1.0")],
    "overlays/production/serve.yaml": [
        ("redis://fairstream-redis", "redis://fairstream-reddis"),
        ("redis://fairstream-redis:6379/1", "/var/lib/fairstream/usage.db"),
    ],
    "overlays/production/cluster.yaml": [
        ("redisAddress: fairstream-redis-ray", "redisAddress: redis"),
        ("redisAddress: fairstream-redis-ray", "redisAddress: fairstream-redis"),
        ("key: password", "key: pasword"),
        ("FAIRSTREAM_REDIS_PASSWORD", "FAIRSTREAM_PASSWORD"),
    ],
    "overlays/production/redis.yaml": [
        ("targetPort: redis", "targetPort: reddis"),
        ("component: redis", "component: reddis"),
        ("name: data\n              mountPath", "name: date\n              mountPath"),
        ("--maxmemory\n", "--max-memory\n"),
        ("256mb", "256gb"),
    ],
    "overlays/production/redis-ray.yaml": [
        ("targetPort: redis", "targetPort: reddis"),
        ("component: redis-ray", "component: redis-rey"),
    ],
}
"""Names and values that another part relies on, by file; the first place is misspelt."""
CUSTOM = {
    "base/rayservice.yaml": ("version: v2", "version: v3"),
    "gateway/http-route.yaml": ("type: Exact", "type: Exactly"),
    "monitoring/pod-monitor.yaml": ("podMetricsEndpoints:", "podMetricEndpoints:"),
    "monitoring/rules.yaml": ("for: 2m", "for: two"),
    "overlays/h200/sizes.yaml": ('cpu: "4", memory: 8Gi', 'cpu: "4", memory: 8GB'),
    "overlays/production/cluster.yaml": ("redisPassword:", "redisPasword:"),
}
"""Files of custom resources, with something that only their schemas catch."""


@pytest.fixture
def k8s(tmp_path: Path) -> Path:
    return Path(shutil.copytree(K8S, tmp_path / "k8s"))


@pytest.mark.parametrize("name", FILES)
def test_a_misspelt_key_is_caught(
    name: str, k8s: Path, crds: Path | None, request: pytest.FixtureRequest
) -> None:
    if name in CUSTOM:
        request.getfixturevalue("known_crds")
    text = (k8s / name).read_text()
    typos = list(_misspelt_keys(text))
    count = request.config.getoption("--typos")
    escaped = []
    for key, typo in random.Random(name).sample(typos, min(count, len(typos))):
        (k8s / name).write_text(typo)
        if not _is_caught(k8s, name, crds):
            escaped.append(key)
    assert typos
    assert escaped == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [(name, *pair) for name, pairs in VALUES.items() for pair in pairs],
    ids=lambda one: str(one).split("\n")[0][:40],
)
def test_a_misspelt_name_is_caught(
    name: str, right: str, wrong: str, k8s: Path, crds: Path | None
) -> None:
    text = (k8s / name).read_text()
    assert right in text
    (k8s / name).write_text(text.replace(right, wrong, 1))
    assert _is_caught(k8s, name, crds)


@pytest.mark.parametrize("name", CUSTOM)
def test_what_only_a_schema_knows_is_caught(name: str, k8s: Path, known_crds: Path) -> None:
    text, (right, wrong) = (k8s / name).read_text(), CUSTOM[name]
    assert right in text
    (k8s / name).write_text(text.replace(right, wrong, 1))
    assert _is_caught(k8s, name, known_crds)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_caught_without_a_typo(overlay: str, k8s: Path, crds: Path | None) -> None:
    assert not _is_caught(k8s, f"overlays/{overlay}/serve.yaml", crds)


def _misspelt_keys(text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        found = KEY.match(line)
        if found and found["key"] not in FREE:
            typo = f"{found['before']}{found['key']}x{line[found.end() :]}"
            yield (
                f"{number + 1}: {found['key']}",
                "".join([*lines[:number], typo, *lines[number + 1 :]]),
            )


def _is_caught(k8s: Path, name: str, crds: Path | None) -> bool:
    """Whether the overlay that has this file is refused."""
    place = Path(name).parts
    overlay = place[1] if place[0] == "overlays" else "local-cpu"
    if place[0] in ("gateway", "monitoring"):
        overlay = "production"
    try:
        made = manifests(k8s, overlay)
        checks = (reference_problems, serving_problems, monitoring_problems)
        found = (problem for check in checks for problem in check(made))
        return any(schema_problems(made.resources, crds)) or any(found)
    except Exception:  # What cannot even be looked at is not overlooked.
        return True
