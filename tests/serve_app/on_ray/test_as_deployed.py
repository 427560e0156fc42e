"""A server under the environment and the options that k8s/ sets: its logs, its connections."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from benchmarks import isolation
from benchmarks.report import Report
from benchmarks.server import OUR_RUN, Server, running
from router.tenant import digest
from tests.k8s.manifests import ROOT, manifests
from tests.ports import free_ports
from tests.serve_app.on_ray.site import KEY, MODEL, until

SECRET = "hunter2-hunter2"
FORWARDED = "X-Forwarded-For"
CLIENT_S = 2
"""For a client that does nothing."""
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
MADE = manifests(ROOT / "k8s", "local-cpu")
SHOWN = re.findall(r"/tmp/ray/session_latest/(logs/serve/fairstream_\S*log)\b",
                   (ROOT / "docs/kuberay.md").read_text())  # fmt: skip
"""What docs/kuberay.md tells people to look at."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of the Ray session, under the variables of all pods. Sockets want a short name."""
    name = tempfile.mkdtemp(prefix="fs-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for pods in MADE.ray_pods.values():
            for variable in pods.env.values():
                if "value" in variable:
                    patch.setenv(variable["name"], variable["value"])
        # What this machine has elsewhere, or shares with others; and no patience.
        patch.setenv("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", str(CLIENT_S))
        for setting, port in zip(PORTS, free_ports(2), strict=True):
            patch.setenv(setting, str(port))
        patch.setenv("RAY_TMPDIR", name)
        patch.setenv("RAY_ADDRESS", "local")
        patch.setenv("FAIRSTREAM_KEY_SECRET", SECRET)
        yield Path(name)
    shutil.rmtree(name, ignore_errors=True)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"id": "acme", "keys": [digest(KEY)]}]}))
    return file


@pytest.fixture(scope="module")
def server(folder: Path, tenants: Path, model: str) -> Iterator[Server]:
    """As the manifests run it, on another port and with a smaller model."""
    engine = {"model": model, "dtype": "float32", "threads": 1, "kv_tokens": 8192, "max_rows": 4}
    args = {"model_name": MODEL, "engine": engine, "tenants": str(tenants), "usage": None}
    application = {"name": "fairstream", "import_path": "serve_app.app:build", "args": args}
    [port] = free_ports(1)
    settings: dict[str, Any] = {
        "http_options": {"port": port},
        "logging_config": MADE.serve["logging_config"],
        "applications": [application],
    }
    with running(settings, module=OUR_RUN) as started:
        yield started


def lines(folder: Path, which: str) -> list[dict[str, Any]]:
    """Of all files of that name."""
    texts = [file.read_text() for file in folder.glob(f"ray/session_latest/{which}")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


async def test_operators_see_what_happens(folder: Path, server: Server, tenants: Path) -> None:
    """Requests that are served and refused, a file of tenants that cannot be read, what an
    engine warns of: at once, each with time and level."""
    async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
        key = {"Authorization": f"Bearer {KEY}", "X-Request-ID": "mine"}
        served = await client.post("/completions", json=body, headers=key)
        assert served.status_code == 200
        for _ in range(5):
            bad = await client.post("/completions", json=body | {"n": -1}, headers=key)
            assert bad.status_code == 400
        stranger = await client.post("/completions", json=body, headers={FORWARDED: "192.0.2.7"})
        assert stranger.status_code == 401
    tenants.write_text(  # noqa: ASYNC240
        f"tenants: [{{id: acme, keys: ['{digest(KEY)}'], wait: 1}}]"
    )

    async def the_file_is_told_of() -> bool:
        found = lines(folder, "logs/serve/fairstream_*Admission*.log")
        return any("stay as they were" in line["message"] for line in found)

    await until(the_file_is_told_of, 10)
    told = lines(folder, "logs/serve/fairstream_*Ingress*.log")
    records = [line for line in told if "outcome" in line]
    outcomes = [(line["outcome"], line["tenant"], line["status"]) for line in records]
    assert outcomes == [
        ("succeeded", "acme", 200),
        *[("refused", "acme", 400)] * 5,
        ("refused", "", 401),
    ]
    assert records[-1]["client"] == "127.0.0.1"  # not what it says
    first = records[0]
    assert (first["request_id"], first["answer_id"]) == ("mine", served.json()["id"])
    assert (first["output_tokens"], len(first["replicas"])) == (5, 1)
    engine = lines(folder, "logs/serve/fairstream_*Replica*_engine.log")
    assert any("limited to 8192 tokens" in line["message"] for line in engine)
    everything = lines(folder, "logs/serve/fairstream_*.log")
    assert {line["deployment"] for line in everything} == {"Admission", "Ingress", "Replica"}
    for line in everything:
        assert {"time", "level", "replica", "logger", "message"} <= line.keys()
    text = json.dumps(everything)
    assert KEY not in text
    assert SECRET not in text
    assert digest(KEY).rpartition(":")[2] not in text


async def test_who_does_nothing_is_let_go_and_who_waits_is_not(server: Server) -> None:
    """Idle connections, and half a request. An answer that takes longer than a client may be silent
    comes."""
    port = urlsplit(server.base_url).port
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    idle[0][1].write(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n")
    body = {"model": MODEL, "prompt": "on:", "max_tokens": 7000, "ignore_eos": True}
    key = {"Authorization": f"Bearer {KEY}"}
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
        asking = asyncio.create_task(client.post("/completions", json=body, headers=key))
        await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in idle)), 10)
        answer = await asking
    assert answer.status_code == 200
    assert time.monotonic() - began > CLIENT_S + 1


def test_attacks_hold_nobody_up_and_each_is_charged(
    server: Server, tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark in short; bounds are those of a machine that does other things, too."""
    monkeypatch.setattr(isolation, "SETTLE_S", 0.1)
    told = isolation.tenants()
    acme = {"id": "acme", "keys": [digest(KEY)]}
    tenants.write_text(yaml.safe_dump({"tenants": [acme, *told["tenants"]]}))
    victim = {"Authorization": f"Bearer {isolation.VICTIM}"}
    deadline = time.monotonic() + 20
    while httpx.get(f"{server.base_url}/models", headers=victim).status_code != 200:
        assert time.monotonic() < deadline, "the tenants are not read"
        time.sleep(0.1)
    report, kinds = Report("isolation"), ("parse", "refusals")
    isolation.measure(server, kinds, 1.0, report)
    isolation.measure_refusals(server, 2.0, report)
    figures = report.figures
    names = [kind + who for kind in kinds for who in ("", ".no_key")]
    assert [figures[f"uncharged.{name}"] for name in names] == [0] * 4
    assert max(figures[f"victim_gap_ms_p99.{name}"] for name in names) < 2000
    assert max(figures[f"health_ms_p99.{name}"] for name in names) < 2000
    assert figures["refusals_per_s"] > 20


@pytest.mark.parametrize("shown", SHOWN)
def test_the_files_that_the_documentation_names_are_of_our_deployments(shown: str) -> None:
    names = ("Admission", "Ingress", "Replica")
    files = [Path(f"logs/serve/fairstream_fairstream_{name}_abc.log") for name in names]
    assert any(file.match(shown) for file in files)


def test_the_documentation_names_files() -> None:
    assert SHOWN
