from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from router.pricing import Prices
from router.tenant import Tenant, Tenants, digest
from serve_app import settings
from serve_app.settings import AppConfig, TenantsSource, require_prices


def config(**options: Any) -> AppConfig:
    least = {"model_name": "m", "engine": {"model": "some/model"}, "tenants": []}
    return AppConfig.model_validate(least | options)


@pytest.mark.parametrize(
    ("usage", "kept_in"),
    [
        ("usage.db", Path("usage.db")),
        (None, None),
        ("redis://:secret@host:6379/1", "redis://:secret@host:6379/1"),
        ("unix:///run/redis", "unix:///run/redis"),
    ],
)
def test_usage_is_kept_in_a_file_or_in_a_redis(usage: str | None, kept_in: object) -> None:
    assert config(usage=usage).usage == kept_in


def test_a_redis_without_its_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"pip install 'fairstream\[redis\]'") as caught:
        config(usage="redis://:secret@host")
    assert "secret" not in str(caught.value)


OTEL = ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")  # fmt: skip


@pytest.mark.parametrize(
    ("spans_to", "variables", "url"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", {}, "https://c/otlp/v1/traces"),
        (None, {"ENDPOINT": "http://e:4318"}, "http://e:4318/v1/traces"),
        (None, {"ENDPOINT": "http://e:4318/otlp/"}, "http://e:4318/otlp/v1/traces"),
        (None, {"ENDPOINT": "http://e", "TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ("http://c", {"ENDPOINT": "http://e:4318"}, "http://c/v1/traces"),
        (None, {"ENDPOINT": "http://e:4317", "PROTOCOL": "grpc"}, None),
        (None, {"ENDPOINT": "http://e", "PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf"},
         "http://e/v1/traces"),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {"ENDPOINT": "http://e", "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"ENDPOINT": "http://e", "OTEL_TRACES_EXPORTER": "otlp"}, "http://e/v1/traces"),
    ],
)  # fmt: skip
def test_spans_go_where_the_setting_says_or_opentelemetrys_variables(
    spans_to: str | None,
    variables: dict[str, str],
    url: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OTEL:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        known = name if name.startswith("OTEL_") else f"OTEL_EXPORTER_OTLP_{name}"
        monkeypatch.setenv(known, value)
    assert config(spans_to=spans_to).spans_url == url


def test_spans_without_opentelemetry_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find_spec in (missing, lambda name: None):
        monkeypatch.setattr(settings.importlib.util, "find_spec", find_spec)
        with pytest.raises(ValidationError, match=r"pip install 'fairstream\[otel\]'"):
            config(spans_to="http://collector:4318")
    with pytest.raises(ValidationError, match="spans_to"):
        config(spans_to="collector:4318")


def test_a_price_of_a_gpu_is_an_amount_of_money() -> None:
    assert config(gpu_dollars_per_hour=2).gpu_dollars_per_hour == 2.0
    for price in (-1, float("nan"), float("inf"), "much"):
        with pytest.raises(ValidationError, match="gpu_dollars_per_hour"):
            config(gpu_dollars_per_hour=price)


def test_what_is_left_out_has_a_default() -> None:
    (model,) = config().served
    assert (model.replicas, config().ingresses) == (1, 1)
    assert model.engine.max_rows == 16


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"replica": 2}, "replica"),
        ({"engine": {"model": "m", "max_row": 3}}, "max_row"),
        ({"fairness": {"lambda": 0.5}}, "lambda"),
        ({"api": {"max_body": 5}}, "max_body"),
        ({"tenants": [{"id": "a", "wait": 3}]}, "wait"),
        ({"reasoning": {"begin": "<think>"}}, "begin"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level(options: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError, match=where):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"model_name": ""},
        {"replicas": 0},
        {"ingresses": 0},
        {"lookahead": -1},
        {"engine": {"model": "m", "max_rows": 0}},
        {"engine": {"model": "m", "device": "abacus"}},
        {"fairness": {"lam": 2.0}},
        {"api": {"max_choices": 0}},
        {"reasoning": {"end": ""}},
        {"model_aliases": [""]},
        {"prices": {"another": {"prompt": 1.0}}},
        {"prices": {"m": {"prompt": -1.0}}},
        {"admin_keys": ["sk-plain"]},
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**options)


def test_an_error_does_not_quote_what_was_given() -> None:
    with pytest.raises(ValidationError) as caught:
        config(tenants=[{"id": "a", "keys": ["sk-secret"]}])
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(("rows", "lookahead"), [(1, 1), (8, 1), (16, 2), (256, 32)])
def test_the_lookahead_is_an_eighth_of_the_rows_by_default(rows: int, lookahead: int) -> None:
    (model,) = config(engine={"model": "m", "max_rows": rows}).served
    assert model.lookahead_credits == lookahead
    assert config(lookahead=0).served[0].lookahead_credits == 0


def models(*options: dict[str, Any], **others: Any) -> AppConfig:
    """An application with several models."""
    named = [{"engine": {"model": "some/model"}} | each for each in options]
    return AppConfig.model_validate({"models": named, "tenants": []} | others)


def test_one_model_is_written_flat_and_several_as_a_list() -> None:
    """Both say the same of a model."""
    options = {"reasoning": {"start": "<a>"}, "replicas": 3, "lookahead": 5}
    flat = config(model_aliases=["alias"], **options)
    listed = models({"name": "m", "aliases": ["alias"], **options}, {"name": "other"})
    assert flat.served == listed.served[:1]
    assert list(flat.replica_deployments) == ["Replica"]


def test_the_replicas_of_each_model_are_a_deployment_of_their_own() -> None:
    both = models({"name": "Qwen/Qwen3"}, {"name": "small.1"})
    assert list(both.replica_deployments) == ["Replica-Qwen-Qwen3", "Replica-small.1"]
    assert list(both.replica_deployments.values()) == list(both.served)
    with pytest.raises(ValidationError, match="special characters"):
        models({"name": "a/b"}, {"name": "a b"})


@pytest.mark.parametrize(
    "names",
    [
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a"}, {"name": "b", "aliases": ["a"]}],
        [{"name": "a", "aliases": ["x"]}, {"name": "b", "aliases": ["x"]}],
        [{"name": "a", "aliases": ["a"]}],
    ],
)
def test_a_name_stands_for_one_model(names: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError, match="twice"):
        models(*names)


def test_prices_are_by_model() -> None:
    prices = {"a": {"prompt": 1.0}, "b": {"prompt": 2.0}}
    assert models({"name": "a"}, {"name": "b"}, prices=prices).prices["b"].prompt == 2.0
    with pytest.raises(ValidationError, match="prices names 'b', but there is only 'a'"):
        models({"name": "a", "aliases": ["alias"]}, prices=prices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": []}, "models"),
        ({"model_name": "m"}, "model_name and engine, or a list of models"),
        ({"engine": {"model": "m"}}, "model_name and engine, or a list of models"),
        ({}, "model_name and engine, or a list of models"),
        ({"models": [{"name": "a"}]}, "engine"),
        ({"models": [{"name": "a", "engine": {"model": "m"}, "replica": 2}]}, r"models\.0\.repl"),
        ({"models": [{"name": "a", "engine": {"model": "m"}}], "replicas": 2}, "replicas cannot"),
    ],
)
def test_models_are_described_in_one_way(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AppConfig.model_validate({"tenants": []} | options)


def test_tenants_come_from_a_file_or_from_the_settings_themselves(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: [{{id: acme, keys: ['{digest('k')}'], weight: 2}}]")
    tenant = {"id": "acme", "keys": [digest("k")], "weight": 2}
    expected = [Tenant(id="acme", keys=[digest("k")], weight=2)]
    assert config(tenants=str(file)).tenants_source.load().tenants == expected
    assert config(tenants=[tenant]).tenants_source.load().tenants == expected


def test_tenants_survive_the_way_through_serves_user_config() -> None:
    source = config(tenants=[{"id": "acme", "weight": 2.5}]).tenants_source
    assert TenantsSource.model_validate(source.model_dump(mode="json")) == source


def test_tenants_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        TenantsSource(tenants=tmp_path / "nowhere.yaml").load()
    with pytest.raises(ValueError, match="twice"):
        TenantsSource(tenants=[Tenant(id="a"), Tenant(id="a")]).load()


def test_a_budget_needs_prices() -> None:
    tenants = Tenants(tenants=[Tenant(id="a", daily_budget=1.0)])
    with pytest.raises(ValueError, match="'a' has a budget"):
        require_prices(tenants, {})
    require_prices(tenants, {"m": Prices(prompt=1.0)})
    require_prices(Tenants(tenants=[Tenant(id="a")]), {})


def test_an_administrator_is_known_by_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRSTREAM_KEY_SECRET", "pepper")
    keys = [digest("plain"), digest("keyed", b"pepper"), digest("")]
    admins = config(admin_keys=keys)
    assert admins.is_admin("plain")
    assert admins.is_admin("keyed")
    assert not admins.is_admin("other")
    assert not admins.is_admin("")
    assert not config().is_admin("plain")


def test_a_file_of_tenants_has_another_stamp_once_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    source = TenantsSource(tenants=path)
    assert source.stamp() is None
    path.write_text("tenants: []")
    before = source.stamp()
    assert before == source.stamp() is not None
    path.write_text("tenants: [] # changed")
    assert source.stamp() != before
    assert TenantsSource(tenants=[]).stamp() is None


@pytest.mark.parametrize("in_place", [True, False], ids=["rewritten", "another file"])
def test_neither_size_nor_time_hides_that_a_file_of_tenants_has_changed(
    tmp_path: Path, in_place: bool
) -> None:
    """A revoked key that stays valid: copies keep their times, and all digests are as long."""
    path, other = tmp_path / "tenants.yaml", tmp_path / "other.yaml"
    path.write_text("tenants: [{id: a}]")
    source = TenantsSource(tenants=path)
    before, status = source.stamp(), path.stat()
    written = path if in_place else other
    written.write_text("tenants: [{id: b}]")
    os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
    written.replace(path)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert source.stamp() != before
