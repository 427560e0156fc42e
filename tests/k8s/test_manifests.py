"""What `kubectl apply -k` would apply is valid, and agrees with itself and with us."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from serve_app.settings import deployment_of
from tests.k8s.kustomize import Resource, render
from tests.k8s.manifests import OVERLAYS, ROOT, Manifests, manifests
from tests.k8s.monitoring import monitoring_problems
from tests.k8s.references import reference_problems
from tests.k8s.schemas import schema_problems
from tests.k8s.serving import serving_problems

K8S = ROOT / "k8s"


@pytest.fixture(scope="module", params=OVERLAYS)
def made(request: pytest.FixtureRequest) -> Manifests:
    return manifests(K8S, request.param)


def test_there_is_no_other_overlay() -> None:
    assert {path.name for path in (K8S / "overlays").iterdir()} == set(OVERLAYS)


def test_kinds_of_kubernetes_are_valid_and_have_no_unknown_fields(made: Manifests) -> None:
    assert list(schema_problems(made.resources, None)) == []


def test_custom_resources_are_valid_and_have_no_unknown_fields(
    made: Manifests, known_crds: Path
) -> None:
    assert list(schema_problems(made.resources, known_crds)) == []


def test_every_name_that_is_used_is_defined(made: Manifests) -> None:
    assert list(reference_problems(made)) == []


def test_the_serve_configuration_agrees_with_the_pods(made: Manifests) -> None:
    assert list(serving_problems(made)) == []


def test_rules_and_dashboards_ask_for_what_is_exported(made: Manifests) -> None:
    assert list(monitoring_problems(made)) == []


def test_nothing_secret_is_written_down(made: Manifests) -> None:
    assert not made.of("Secret")


def test_demo_keys_are_of_the_demo_only() -> None:
    demo = yaml.safe_load((K8S / "overlays/local-cpu/tenants.yaml").read_text())
    keys = {key for tenant in demo["tenants"] for key in tenant["keys"]}
    for overlay in set(OVERLAYS) - {"local-cpu"}:
        text = (K8S / "overlays" / overlay / "tenants.yaml").read_text()
        assert not any(key in text for key in keys)


def test_production_outlives_its_head_and_any_one_pod() -> None:
    made = manifests(K8S, "production")
    assert made.cluster["gcsFaultToleranceOptions"]
    assert made.where("Admission").name != "head"
    for group in made.cluster["workerGroupSpecs"]:
        assert group["minReplicas"] >= 2
    assert made.args["autoscaling"]["min_replicas"] >= 2
    assert made.args["ingresses"] >= 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_renderer_of_these_tests_renders_what_kustomize_does(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl to compare with")
    command = [kubectl, "kustomize", str(K8S / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    assert _sorted(yaml.safe_load_all(text)) == _sorted(render(K8S / "overlays" / overlay))


def _sorted(resources: object) -> list[Resource]:
    return sorted(resources, key=lambda one: (one["kind"], one["metadata"]["name"]))  # type: ignore[call-overload]


@pytest.mark.parametrize("model", [None, "smollm2-135m", "Qwen/Qwen2.5-7B:a b"])
def test_restarts_of_any_model_raise_the_alert(model: str | None) -> None:
    """Where there are several, each has a deployment of its own."""
    rules = (K8S / "monitoring/rules.yaml").read_text()
    [pattern] = re.findall(r'replica_starts_total{deployment=~"(.+?)"}', rules)
    assert re.fullmatch(pattern, "Replica" if model is None else deployment_of(model))
    assert not re.fullmatch(pattern, "Ingress")


def test_pods_find_names_by_the_dns_of_their_node_too(made: Manifests) -> None:
    [policy] = [
        one for one in made.of("NetworkPolicy") if one["metadata"]["name"] == "fairstream-ray"
    ]
    [dns] = [
        rule
        for rule in policy["spec"]["egress"]
        if 53 in [p["port"] for p in rule.get("ports", [])]
    ]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]
    assert {port["protocol"] for port in dns["ports"]} == {"UDP", "TCP"}


def test_administration_is_not_public(made: Manifests) -> None:
    paths = [
        match["path"]["value"]
        for route in made.of("HTTPRoute")
        for rule in route["spec"]["rules"]
        for match in rule["matches"]
    ]
    assert not [path for path in paths if "/admin".startswith(path) or path.startswith("/admin")]
