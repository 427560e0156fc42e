"""Each is one sentence before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from replica.config import EngineConfig
from router.policy import FairPolicy
from router.store import SqliteStore
from router.tenant import digest
from serve_app import ray_private
from serve_app.check import check_serve_config
from serve_app.checks import usage as check_usage
from serve_app.checks.warnings import about
from serve_app.fleet import membership
from serve_app.settings import AppConfig
from serve_app.usage.stores import open_store
from tests.models import save_tiny
from tests.serve_app.test_admission import AdmissionAlone
from tests.serve_app.test_check import good

Check = Callable[[dict[str, Any]], None]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def write_and_check(data: dict[str, Any]) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(data))
        check_serve_config(path)

    return write_and_check


def with_usage(usage: object) -> dict[str, Any]:
    data = good()
    data["applications"][0]["args"]["usage"] = str(usage)
    return data


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": 2},
        {"num_replicas": "auto"},
        {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
        {"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}},
    ],
)
def test_there_is_one_admission(check: Check, options: dict[str, Any]) -> None:
    data = good()
    data["applications"][0]["deployments"] = [{"name": "Admission", **options}]
    with pytest.raises(ValueError, match="Admission must be one process"):
        check(data)


@pytest.mark.parametrize(
    "options",
    [{"num_replicas": 1}, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}],
)
def test_one_admission_may_be_written_down(check: Check, options: dict[str, Any]) -> None:
    data = good()
    data["applications"][0]["deployments"] = [{"name": "Admission", **options}]
    check(data)


@pytest.mark.parametrize(("most", "number"), [(None, 2), (3, 1)])
def test_a_second_admission_does_not_start(
    monkeypatch: pytest.MonkeyPatch, most: int | None, number: int
) -> None:
    scaling = None if most is None else SimpleNamespace(max_replicas=most)
    config = SimpleNamespace(autoscaling_config=scaling, num_replicas=number)
    context = SimpleNamespace(_deployment_config=config)
    here = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(ray_private, "serve", here)
    with pytest.raises(ValueError, match="Admission must be one process"):
        AdmissionAlone(FairPolicy())
    config.autoscaling_config, config.num_replicas = None, 1
    membership.require_alone()


@pytest.mark.parametrize(
    "usage", ["reds://localhost", "REDIS://localhost", "http://localhost/x", "sqlite:///usage.db"]
)
def test_another_url_is_no_file(check: Check, usage: str) -> None:
    with pytest.raises(ValueError, match=r"usage.*neither a file nor a URL of a Redis"):
        check(with_usage(usage))


def test_a_redis_has_a_port(check: Check) -> None:
    with pytest.raises(ValueError, match="usage: this is no URL of a Redis"):
        check(with_usage("redis://localhost:port/1"))
    check(with_usage("redis://localhost:6379/1"))


def test_a_file_of_something_else_is_told(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "usage.db"
    file.write_text("tenants: []\n" * 1000)
    with pytest.raises(ValueError, match="is no intact file of SQLite's: file is not a database"):
        check(with_usage(file))
    with pytest.raises(ValueError, match="cannot be used: file is not a database"):
        open_store(file)


def test_a_file_that_broke_is_told_and_an_intact_one_is_not_touched(
    check: Check, tmp_path: Path
) -> None:
    file = tmp_path / "usage.db"
    store = SqliteStore(file)
    check(with_usage(file))  # while a server uses it
    store.close()
    intact = file.read_bytes()
    check(with_usage(file))
    assert file.read_bytes() == intact
    file.write_bytes(intact[:4096] + b"\xff" * (len(intact) - 4096))
    with pytest.raises(ValueError, match="is no intact file of SQLite's"):
        check(with_usage(file))


def test_a_place_that_cannot_be_written_to_is_told(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs the tests may write everywhere."""
    with pytest.raises(ValueError, match="is no file"):
        check(with_usage(tmp_path))
    writable = {tmp_path / "usage.db"}
    monkeypatch.setattr(check_usage.os, "access", lambda path, mode: path in writable)
    with pytest.raises(ValueError, match=r"usage: .*usage\.db cannot be made"):
        check(with_usage(tmp_path / "usage.db"))
    SqliteStore(tmp_path / "usage.db").close()
    with pytest.raises(ValueError, match=r"cannot be made: .* cannot be written to"):
        check(with_usage(tmp_path / "usage.db"))
    writable = {tmp_path}
    with pytest.raises(ValueError, match=r"usage\.db cannot be written to"):
        check(with_usage(tmp_path / "usage.db"))
    elsewhere = tmp_path / "not" / "here" / "usage.db"
    check(with_usage(elsewhere))
    writable = set()
    [told] = check_usage.about_usage(elsewhere)
    assert f"{tmp_path} cannot be written to" in told


def test_two_applications_have_two_files(check: Check, tmp_path: Path) -> None:
    data = with_usage(tmp_path / "usage.db")
    [application] = data["applications"]
    other = copy.deepcopy(application) | {"name": "other", "route_prefix": "/other"}
    data["applications"].append(other)
    other["args"]["usage"] = str(tmp_path / "folder" / ".." / "usage.db")
    with pytest.raises(ValueError, match="two applications would write"):
        check(data)
    for usage in (str(tmp_path / "other.db"), None):
        other["args"]["usage"] = usage
        check(data)
    for one in data["applications"]:
        one["args"]["usage"] = "redis://localhost/1"
    check(data)


def test_a_context_that_the_memory_does_not_hold_is_refused(check: Check) -> None:
    data = good()
    data["applications"][0]["args"]["engine"] |= {"kv_tokens": 100, "max_model_len": 101}
    with pytest.raises(ValueError, match="max_model_len is 101 tokens, but the KV pool holds"):
        check(data)
    held = EngineConfig(model="m").block_size * 6
    EngineConfig(model="m", kv_tokens=held, max_model_len=held)
    EngineConfig(model="m", device="cuda", max_model_len=10**6)  # measured when it starts


def told(tmp_path: Path, **args: Any) -> list[str]:
    model = save_tiny(tmp_path / "model")
    config = {"model_name": "m", "engine": {"model": model}, "tenants": []} | args
    return list(about(AppConfig.model_validate(config)))


def test_a_daily_budget_above_the_monthly_one_is_told(tmp_path: Path) -> None:
    tenants = [
        {"id": "a", "daily_budget": 20, "monthly_budget": 10},
        {"id": "b", "daily_budget": 10, "monthly_budget": 10},
    ]
    warnings = told(tmp_path, tenants=tenants)
    assert [line for line in warnings if "budget" in line] == [
        "tenant a: daily_budget (20.0) is above monthly_budget (10.0)"
    ]


def test_keyed_digests_want_their_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed, plain = digest("sk-a", b"secret"), digest("sk-b")
    args = {"tenants": [{"id": "a", "keys": [keyed, plain]}], "admin_keys": [digest("x", b"s")]}
    monkeypatch.delenv("FAIRSTREAM_KEY_SECRET", raising=False)
    [line] = [line for line in told(tmp_path, **args) if "digest" in line]
    assert line.startswith("2 keys are hmac-sha256: digests, and FAIRSTREAM_KEY_SECRET is not set")
    monkeypatch.setenv("FAIRSTREAM_KEY_SECRET", "secret")
    assert not [line for line in told(tmp_path, **args) if "digest" in line]
