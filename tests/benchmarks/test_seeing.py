from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from benchmarks import seeing, seeing_clock
from benchmarks.report import Report
from benchmarks.seeing_clock import Clock
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import Records, RequestRecord


async def receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Message) -> None:
    pass


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    with records.current().sequence(prompt_tokens=1) as sequence:
        sequence.reach(Phase.PREFILL)
        sequence.answer(0.0)
        sequence.tell(1, 1.0)
        with records.current().breakdown.during(Phase.TEXT):
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})


def scope(path: str) -> Scope:
    headers = [(b"x-request-id", path.encode())]
    return {"type": "http", "method": "GET", "path": path, "headers": headers}


async def test_telemetry_is_switched_off_and_on_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its clock runs on. All is as it was afterwards."""
    noted: list[RequestRecord] = []
    monkeypatch.setenv(seeing_clock.FILE, str(tmp_path / "clock"))
    app = Clock(Records(answer, Counter(), observe=noted.append))
    for switch, ended in (("off", 0), ("on", 1)):
        await app(scope(f"/seeing/{switch}"), receive, send)
        await app(scope(f"/{switch}"), receive, send)
        assert len(noted) == ended
    assert sum(noted[0].breakdown.seconds.values()) > 0
    lines = [line.split() for line in (tmp_path / "clock").read_text().splitlines()]
    assert [name for name, seconds in lines if float(seconds) > 0] == ["/off", "/on"]


def test_series_of_many_names_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for names in (200, 400):
        monkeypatch.setattr(seeing, "NAMES", names)
        report = Report("seeing")
        seeing.measure_series(report)
        counts.append(report.figures["series_at_10k_names"])
    assert counts[0] == counts[1] > 100
