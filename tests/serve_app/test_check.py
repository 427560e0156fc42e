from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.app import Admission, Ingress, Replica
from serve_app.check import DEPLOYMENTS, check_serve_config
from serve_app.checks.warnings import about, about_address
from serve_app.settings import AppConfig
from tests.models import save_tiny

CONFIGS = sorted(
    path
    for folder in ("configs", "benchmarks")
    for path in Path(folder).glob("*.yaml")
    if "applications" in path.read_text()
)


def good() -> dict[str, Any]:
    return {
        "http_options": {"port": 8000},
        "applications": [
            {
                "name": "app",
                "import_path": "serve_app.app:build",
                "args": {"model_name": "m", "engine": {"model": "m"}, "tenants": []},
                "deployments": [{"name": "Replica", "ray_actor_options": {"num_gpus": 1}}],
            }
        ],
    }


@pytest.fixture
def check(tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    def write_and_check(data: dict[str, Any]) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(data))
        check_serve_config(path)

    return write_and_check


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_configuration_that_we_ship_is_fine(path: Path) -> None:
    check_serve_config(path)


def test_there_are_configurations_to_check() -> None:
    assert {path.name for path in CONFIGS} >= {"local.yaml", "two-models.yaml", "hub.yaml"}


def test_a_good_configuration_passes(check: Callable[[dict[str, Any]], None]) -> None:
    check(good())


def test_an_unknown_key_is_named_with_its_place_at_every_level(
    check: Callable[[dict[str, Any]], None],
) -> None:
    data = good()
    application = data["applications"][0]
    data["http_option"] = {}
    data["http_options"]["prot"] = 1
    application["rout_prefix"] = "/"
    application["deployments"][0]["num_replica"] = 2
    application["deployments"][0]["ray_actor_options"]["num_gpu"] = 1
    application["deployments"][0]["autoscaling_config"] = {"min_replica": 1}
    with pytest.raises(ValueError, match="not an option") as caught:
        check(data)
    message = str(caught.value)
    for place, meant in [
        ("http_option ", "http_options"),
        ("http_options.prot", "port"),
        ("applications[0].rout_prefix", "route_prefix"),
        ("applications[0].deployments[0].num_replica ", "num_replicas"),
        ("applications[0].deployments[0].ray_actor_options.num_gpu ", "num_gpus"),
        ("applications[0].deployments[0].autoscaling_config.min_replica ", "min_replicas"),
    ]:
        assert any(place in line and meant in line for line in message.splitlines()), place


def test_our_own_settings_are_checked_too(check: Callable[[dict[str, Any]], None]) -> None:
    data = good()
    data["applications"][0]["args"]["engine"]["max_rowz"] = 3
    with pytest.raises(ValueError, match=r"engine\.max_rowz: "):
        check(data)


def test_all_mistakes_are_told_at_once(check: Callable[[dict[str, Any]], None]) -> None:
    """Those of form first; once there is none, those of meaning."""
    data = good()
    [application] = data["applications"]
    other = application | {"name": "other", "route_prefix": "/other", "args": {"tenants": []}}
    data["applications"].append(other)
    data["http_option"] = {}
    data["http_options"]["port"] = "http"
    application["args"] = application["args"] | {"grace_s": -1, "replicas": 0}
    with pytest.raises(ValueError, match="http_option is") as caught:
        check(data)
    for words in ("http_options.port", "grace_s", "replicas", "name the model"):
        assert words in str(caught.value)
    data = good()
    [application] = data["applications"]
    application["args"] |= {"tenants": [{"id": "a", "daily_budget": 1}]}
    application["autoscaling_policy"] = POLICY
    user_config = {"tenants": [{"id": "a", "wait": 1, "weight": 0}]}
    application["deployments"] = [
        {"name": "Replicas"},
        {"name": "Admission", "user_config": user_config},
    ]
    with pytest.raises(ValueError, match="has a budget") as caught:
        check(data)
    for words in ("needs args with autoscaling", "no deployment Replicas", ".wait: ", ".weight: "):
        assert words in str(caught.value)


@pytest.mark.parametrize("content", ["", "3", "applications: 3", "applications: [3]"])
def test_a_file_of_another_form_is_a_mistake(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        check_serve_config(path)


def test_a_deployment_that_does_not_exist_is_refused(
    check: Callable[[dict[str, Any]], None],
) -> None:
    data = good()
    data["applications"][0]["deployments"][0]["name"] = "Replicas"
    with pytest.raises(
        ValueError, match="no deployment Replicas; there are Admission, Ingress, Replica"
    ):
        check(data)


def test_the_user_config_of_admission_is_checked(check: Callable[[dict[str, Any]], None]) -> None:
    data = good()
    data["applications"][0]["deployments"] = [
        {"name": "Admission", "user_config": {"tenants": [{"id": "a", "wait": 1}]}}
    ]
    with pytest.raises(ValueError, match="wait"):
        check(data)


def test_the_names_of_the_deployments_are_those_of_their_classes() -> None:
    assert set(DEPLOYMENTS) == {Admission.__name__, Ingress.__name__}
    args = good()["applications"][0]["args"]
    assert list(AppConfig.model_validate(args).replica_deployments) == [Replica.__name__]


def test_each_of_several_models_has_its_own_deployment(
    check: Callable[[dict[str, Any]], None],
) -> None:
    data = good()
    engine = {"model": "m"}
    models = [{"name": "a", "engine": engine}, {"name": "b/c", "engine": engine}]
    data["applications"][0]["args"] = {"models": models, "tenants": []}
    with pytest.raises(ValueError, match="there are Admission, Ingress, Replica-a, Replica-b-c"):
        check(data)
    data["applications"][0]["deployments"][0]["name"] = "Replica-b-c"
    check(data)
    models[1]["engine"] = {"model": "m", "max_rowz": 3}
    with pytest.raises(ValueError, match=r"models\.1\.engine\.max_rowz: "):
        check(data)


def test_the_command_looks_at_every_model(tmp_path: Path) -> None:
    """The first can be served, the second does not exist."""
    engines = [save_tiny(tmp_path), str(tmp_path / "nowhere")]
    models = [{"name": f"m{n}", "engine": {"model": path}} for n, path in enumerate(engines)]
    data = good()
    data["applications"][0] |= {"args": {"models": models, "tenants": []}, "deployments": []}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-W", "ignore", "-m", "serve_app.check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nowhere" in done.stderr


def test_the_command_ends_with_one_readable_line(tmp_path: Path) -> None:
    data = good()
    data["applications"][0]["args"]["engine"]["max_rowz"] = 3
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-W", "ignore", "-m", "serve_app.check"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"{path}: engine.max_rowz: Unexpected keyword argument"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("applications:\n\t- name: x", "this is not YAML"),
        ("applications: [{name: a, import_path: 'serve_app.app:biuld'}]", "no application has"),
    ],
)
def test_a_file_that_serves_nothing_of_ours_is_no_fine_one(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        check_serve_config(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.mark.parametrize(
    ("engine", "tenants", "words"),
    [
        ({}, [{"id": "a"}], []),
        ({}, [], ["no tenants"]),
        ({"kv_tokens": 128}, [{"id": "a"}], ["holds 128 tokens"]),
        ({"kv_tokens": 128, "max_model_len": 128}, [{"id": "a"}], []),
        ({"device": "cuda"}, [{"id": "a"}], ["no GPU"]),
        ({}, [{"id": "a", "models": ["m"]}, {"id": "b", "models": []}], []),
        ({}, [{"id": "a", "models": ["m", "n"]}], ["may use n, which is not served; there is m"]),
        ({}, [{"id": "a", "models": ["alias"]}], ["an alias: write m"]),
    ],
)
def test_what_may_not_be_meant_is_a_warning(
    tiny: str,
    engine: dict[str, Any],
    tenants: list[dict[str, Any]],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    engine = {"model": tiny, "kv_tokens": 4096} | engine
    args = {"model_name": "m", "model_aliases": ["alias"], "engine": engine, "tenants": tenants}
    config = AppConfig.model_validate(args)
    told = list(about(config))
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_warnings_are_about_the_tenants_that_will_hold(tmp_path: Path, tiny: str) -> None:
    data, path = good(), tmp_path / "config.yaml"
    [application] = data["applications"]
    application["args"] |= {"engine": {"model": tiny, "kv_tokens": 4096}, "tenants": [{"id": "a"}]}
    tenants = {"tenants": [{"id": "b", "models": ["typo"]}]}
    application["deployments"] = [{"name": "Admission", "user_config": tenants}]
    path.write_text(yaml.safe_dump(data))
    [config] = check_serve_config(path)
    assert ["tenant b may use typo" in line for line in about(config)] == [True]


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    data, path = good(), tmp_path / "config.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        data["http_options"] = {"host": "127.0.0.1", "port": port}
        path.write_text(yaml.safe_dump(data))
        assert [str(port) in line for line in about_address(path)] == [True]
    assert list(about_address(path)) == []


POLICY = {"policy_function": "serve_app.scaling_policy:ScalingPolicy"}


def test_scaling_needs_both_its_bounds_and_its_policy(
    check: Callable[[dict[str, Any]], None],
) -> None:
    data = good()
    [application] = data["applications"]
    application["args"]["autoscaling"] = {"min_replicas": 0, "max_replicas": 3}
    with pytest.raises(ValueError, match=r"autoscaling_policy\.policy_function: serve_app"):
        check(data)
    application["autoscaling_policy"] = POLICY | {"policy_kwargs": {"hold_s": 60}}
    check(data)
    del application["args"]["autoscaling"]
    with pytest.raises(ValueError, match="needs args with autoscaling"):
        check(data)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"policy_kwargs": {"hold": 60}}, "hold is not a limit"),
        ({"policy_kwargs": {"spare": 2.0}}, "spare"),
        ({"policy_kwarg": {}}, r"did you mean policy_kwargs\?"),
    ],
)
def test_a_mistake_in_the_policy_is_named(
    check: Callable[[dict[str, Any]], None], policy: dict[str, Any], words: str
) -> None:
    data = good()
    [application] = data["applications"]
    application["args"]["autoscaling"] = {"max_replicas": 3}
    application["autoscaling_policy"] = POLICY | policy
    with pytest.raises(ValueError, match=words):
        check(data)


def test_bounds_in_the_wrong_order_are_refused(check: Callable[[dict[str, Any]], None]) -> None:
    data = good()
    data["applications"][0]["args"]["autoscaling"] = {"min_replicas": 3, "max_replicas": 2}
    with pytest.raises(ValueError, match="min_replicas is above max_replicas"):
        check(data)
