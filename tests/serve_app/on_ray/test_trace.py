"""`fairstream-trace` against a running service: any ingress finds the engine that is meant."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from serve_app.telemetry.scraping import KEY as ADMIN_KEY_NAME
from serve_app.trace import main
from tests import timelines
from tests.serve_app.on_ray.site import ADMIN_KEY, Site, long_stream, until


async def test_a_running_engine_is_traced_one_at_a_time(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_KEY_NAME, ADMIN_KEY)
    path = tmp_path / "trace.json"
    async with site.openai() as client, site.http(ADMIN_KEY) as admin:
        stream = asyncio.create_task(long_stream(client, "on and on", 15_000))

        async def listed() -> list[dict[str, str]]:
            return (await admin.get("/admin/requests")).json()["data"]

        async def is_running() -> bool:
            return [each["state"] for each in await listed()] == ["running"]

        await until(is_running)
        [request] = await listed()
        names = await site.offering()
        command = [site.url, "--steps", "50", "--replica", request["replica"], "-o", str(path)]
        await asyncio.to_thread(main, command)
        assert "decode eager" in capsys.readouterr().out
        made = json.loads(path.read_text())
        timelines.check(made)
        assert request["replica"] in made["otherData"]["engine"]
        assert len(timelines.lane(made, "compute")) == 50
        # Ingresses take turns: it is the engine that refuses all but one.
        [idle] = [name for name in names if name != request["replica"]]
        asked = [admin.post(f"/admin/trace?seconds=1&replica={idle}") for _ in range(4)]
        codes = Counter(reply.status_code for reply in await asyncio.gather(*asked))
        assert codes == {200: 1, 409: 3}
        stream.cancel()
        await asyncio.wait({stream})
    async with site.http() as tenant:
        assert (await tenant.post("/admin/trace")).status_code == 401
