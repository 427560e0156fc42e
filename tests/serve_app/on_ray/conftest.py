from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from router.tenant import digest
from serve_app import environment
from tests.models import save_tiny
from tests.serve_app.collector import collector
from tests.serve_app.on_ray.site import ADMIN_KEY, APP, BULK_KEY, KEY, MODEL, PAGE, Site, until

REPLICAS = 2
MAX_ROWS = 32
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "OTEL_BSP_SCHEDULE_DELAY": "500",
    **environment.DEFAULTS,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Long answers, so that there is time to break something."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=16384)


@pytest.fixture(scope="package")
async def running_site(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Gone when these tests are over: others start clusters of their own."""
    with pytest.MonkeyPatch.context() as patch, collector() as taken:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        usage = tmp_path_factory.mktemp("usage") / "usage.db"
        site = Site(port, configuration(model, str(usage), taken.url), taken)
        await site.deploy()
        yield site
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
async def site(running_site: Site) -> AsyncIterator[Site]:
    """Everything is up before each test, and nothing runs after it."""

    async def is_complete() -> bool:
        return len(await running_site.offering()) == REPLICAS

    await until(is_complete, 60)
    await running_site.wait_ready()
    yield running_site
    await until(running_site.at_rest)


def configuration(model: str, usage: str, spans_to: str | None = None) -> dict[str, object]:
    engine = {
        "model": model,
        "dtype": "float32",
        "threads": 1,
        "max_rows": MAX_ROWS,
        "kv_tokens": 131072,
    }
    args = {
        "model_name": MODEL,
        "engine": engine,
        "replicas": REPLICAS,
        "ingresses": 2,
        "tenants": [
            {
                "id": "acme",
                "keys": [digest(KEY)],
                "max_concurrency": 8,
                "tokens_per_minute": 10_000_000,
                "monthly_budget": 1000.0,
            },
            {"id": "bulk", "keys": [digest(BULK_KEY)], "max_concurrency": 64},
        ],
        "prices": {MODEL: {"prompt": 1.0, "output": 2.0}},
        "usage": usage,
        "admin_keys": [digest(ADMIN_KEY)],
        "vllm_metrics": True,
        "spans_to": spans_to,
        "api": {"cors_origins": [PAGE]},
    }
    application = {"name": APP, "import_path": "serve_app.app:build", "args": args}
    return {"applications": [application]}
