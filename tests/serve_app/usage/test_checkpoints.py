from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec
import pytest

from router.messages import Ending, LeaseInfo, Outcome, RequestInfo, Sync
from router.policy import FairPolicy
from router.pricing import Prices
from router.store import SqliteStore
from serve_app.admission import Admission
from serve_app.usage import checkpoints
from tests.router.test_store import journal
from tests.serve_app.test_admission import AdmissionAlone, no_self_check, report

__all__ = ["no_self_check"]

PRICES = {"m": Prices(prompt=1.0, output=2.0)}
STREAM = RequestInfo("stream", "acme", 10, 900, model="m")
SUMS = ("prompt_tokens", "cached_tokens", "output_tokens", "micro_dollars", "failed", "succeeded")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, no_self_check: None) -> None:
    """HangDetector of a tenth of a second is a loss."""
    for name in ("LOST_S", "LOOK_S"):
        monkeypatch.setattr(checkpoints, name, 0.1)


async def start(path: Path) -> AdmissionAlone:
    admission = AdmissionAlone(FairPolicy(), PRICES, path)
    await admission.reconfigure({"tenants": [{"id": "acme", "daily_budget": 1.0}]})
    await admission.report(report("r", "m", slots=4))
    return admission


async def say(admission: Admission, ingress: str = "i", **said: object) -> None:
    sync = Sync(ingress, sequence=time.monotonic_ns(), epoch=1, **said)
    await admission.sync(msgspec.msgpack.encode(sync))


async def runs(admission: Admission, produced: int, ingress: str = "i") -> None:
    await say(admission, ingress, leases=(LeaseInfo(STREAM, "r", produced, 4, 0.5),))


async def kill(admission: AdmissionAlone) -> None:
    """What it has not written is lost."""
    admission.stop()
    admission._store.close()


async def booked(admission: Admission, seconds: float = 0.3) -> dict[str, int]:
    """Once what is lost is looked for."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await admission._journal.flush()
        await asyncio.sleep(0.02)
    rows = admission._store.usage(0, 1e12)
    return {name: sum(row.sums[name] for row in rows) for name in SUMS}


async def test_what_ran_is_booked_although_its_ingress_and_admission_died_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it was written down last: two flushes before the end, and one. Once, and it counts
    against the budget."""
    first = await start(tmp_path / "usage.db")
    for produced in (100, 500):
        await runs(first, produced)
        await first._journal.flush()
    await runs(first, 526)
    await kill(first)
    for _ in range(2):
        admission = await start(tmp_path / "usage.db")
        with caplog.at_level(logging.WARNING):
            sums = await booked(admission)
        assert sums == {
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "output_tokens": 500,
            "micro_dollars": 1006,
            "failed": 1,
            "succeeded": 0,
        }
        [state] = await admission.tenant_states()
        assert list(state["spent"].values()) == [1006e-6]
        await asyncio.sleep(0.5)
        admission._check()  # its clock goes on
        await kill(admission)
    assert caplog.text.count("1 requests are booked as failed") == 1


async def test_what_an_ingress_still_runs_is_not_lost(tmp_path: Path) -> None:
    """Admission alone died: the ingress shows its stream, and how it ends."""
    first = await start(tmp_path / "usage.db")
    await runs(first, 500)
    await first._journal.flush()
    await kill(first)
    admission = await start(tmp_path / "usage.db")
    await runs(admission, 600)
    assert (await booked(admission))["output_tokens"] == 0
    await say(admission, endings=(Ending(STREAM, Outcome.SUCCEEDED, 700, 4),))
    await booked(admission)
    await say(admission)
    sums = await booked(admission)
    assert (sums["output_tokens"], sums["succeeded"], sums["failed"]) == (700, 1, 0)
    assert admission._store.lost(1e12) == {}
    await kill(admission)


async def test_what_ended_while_admission_was_away_is_booked_as_it_ended(tmp_path: Path) -> None:
    """Nothing runs there any more, so nothing is lost with it later."""
    first = await start(tmp_path / "usage.db")
    await runs(first, 500)
    await first._journal.flush()
    await kill(first)
    admission = await start(tmp_path / "usage.db")
    await say(admission, endings=(Ending(STREAM, Outcome.SUCCEEDED, 700, 4),))
    sums = await booked(admission)
    assert (sums["output_tokens"], sums["succeeded"], sums["failed"]) == (700, 1, 0)
    assert admission._store.lost(1e12) == {}
    await kill(admission)


async def test_an_ingress_that_died_alone_is_settled_once(tmp_path: Path) -> None:
    """By the router, which forgets it; then nothing of it is written any more."""
    admission = await start(tmp_path / "usage.db")
    await runs(admission, 500)
    await admission._journal.flush()
    admission._router._forget_s = 0.0
    admission._router.expire()
    sums = await booked(admission)
    assert (sums["output_tokens"], sums["failed"]) == (500, 1)
    assert admission._store.lost(1e12) == {}
    await kill(admission)


async def test_what_others_of_a_shared_store_ran_is_waited_for_longer(tmp_path: Path) -> None:
    """Their Admission may be away for a while, and their ingresses go on."""
    first = await start(tmp_path / "usage.db")
    await runs(first, 500)
    await first._journal.flush()
    await kill(first)
    admission = await start(tmp_path / "usage.db")
    admission._store.shared = True
    assert (await booked(admission))["failed"] == 0
    await kill(admission)


async def test_what_cannot_be_read_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(tmp_path / "usage.db")
    store.book(journal(running={"i": '[["x", "acme"]]'}), 0.0)
    store.close()
    admission = await start(tmp_path / "usage.db")
    assert (await booked(admission))["failed"] == 0
    assert "cannot be read" in caplog.text
    assert admission._store.lost(1e12) == {}
    await kill(admission)
