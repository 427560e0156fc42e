from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI

from router.tenant import digest
from serve_app import ingress
from serve_app.http.live_page import LivePage
from serve_app.ingress import Ingress
from serve_app.settings import AppConfig
from serve_app.telemetry.metrics import IngressMetrics
from serve_app.telemetry.recent import OwnRecent
from serve_app.telemetry.records import RequestRecord
from tests.models import byte_tokenizer

LOAD_S = 0.4


def built(names: list[str]) -> Any:
    """What Serve builds the application of, once its constructor is over."""
    models = [{"name": name, "engine": {"model": f"some/{name}"}} for name in names]
    config = AppConfig.model_validate(
        {"models": models, "tenants": [], "admin_keys": [digest("k")]}
    )
    parts = MagicMock(
        _config=config,
        _streams=dict.fromkeys(names, MagicMock()),
        _departure=SimpleNamespace(leaves=False),
        _refusals=Counter(),
        _find_tenant=lambda key: None,
    )
    for method in ("_build_api", "_layers", "_offer", "__serve_build_asgi_app__"):
        setattr(parts, method, getattr(Ingress, method).__get__(parts))
    return parts


async def test_the_loop_lives_while_tokenizers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the self-check of an ingress with many models takes the load for a hang."""
    tokenizer = byte_tokenizer()
    loaded: list[str] = []

    def load(model: str, revision: str | None) -> Any:
        time.sleep(LOAD_S)
        loaded.append(model)
        return tokenizer

    monkeypatch.setattr(ingress, "load_tokenizer", load)
    building = asyncio.ensure_future(built(["a", "b", "c"]).__serve_build_asgi_app__())
    longest, began = 0.0, time.perf_counter()
    while len(loaded) < 3:
        longest, began = max(longest, time.perf_counter() - began), time.perf_counter()
        await asyncio.sleep(0.01)
    assert isinstance(await building, FastAPI)
    assert loaded == ["some/a", "some/b", "some/c"]
    assert longest < LOAD_S / 2


def noting(spans: Any) -> Any:
    parts = SimpleNamespace(_recent=OwnRecent("i"), _metrics=IngressMetrics(), _spans=spans)
    parts._take_note = Ingress._take_note.__get__(parts)
    return parts


def test_spans_that_fail_harm_no_request() -> None:
    """What is told elsewhere of a request is told, and the next request has no span."""
    spans = MagicMock()
    spans.note.side_effect = ValueError("nobody's plan")
    parts, record = noting(spans), RequestRecord({"method": "POST", "path": "/"}, "r")
    for _ in range(2):
        parts._take_note(record)
    assert len(parts._recent.find("r")) == 2
    assert spans.note.call_count == 1


def test_an_ingress_starts_although_spans_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@collector:4318")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    config = AppConfig.model_validate(
        {"model_name": "m", "engine": {"model": "some/m"}, "tenants": []}
    )
    assert ingress._spans(config, "i") is None
    monkeypatch.setattr(ingress, "has_opentelemetry", lambda: False)
    assert ingress._spans(config, "i") is None
    assert len(caplog.records) == 2
    assert "secret" not in caplog.text


async def test_who_watches_the_live_page_holds_up_no_departure() -> None:
    ingress = built(["a"])
    [live] = [each for each in ingress._layers() if each.cls is LivePage]
    with live.kwargs["figures"].viewing() as events:
        await anext(events)
        ingress._departure.leaves = True
        async with asyncio.timeout(5):
            assert len([event async for event in events]) <= 1


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(model: str, revision: str | None) -> Any:
        raise ValueError(f"No tokenizer for {model!r}.")

    monkeypatch.setattr(ingress, "load_tokenizer", load)
    with pytest.raises(ValueError, match="No tokenizer for 'some/a'"):
        await built(["a"]).__serve_build_asgi_app__()
