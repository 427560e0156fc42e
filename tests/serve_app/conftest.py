from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

from router.tenant import Tenant, Tenants, digest
from serve_app.http.api import create_app
from serve_app.http.models import Offer
from serve_app.protocol.limits import Limits
from tests.serve_app.browser import launched
from tests.serve_app.text_backend import TextBackend, byte_tokenizer
from tests.serve_app.tokenizers_made import smollm2_tokenizer

KEY = "sk-acme-0123456789"
ACME = Tenants(tenants=[Tenant(id="acme", keys=[digest(KEY)], max_queued=1000)])
LIMITS = Limits(default_max_tokens=50, refusals_per_minute=10**6)


@dataclass
class Site:
    """The real application behind a real HTTP server."""

    url: str
    backend: Any
    app: object

    def wait_until_idle(self, seconds: float = 1.0) -> None:
        """All sequences have ended; fails the test if they do not."""
        deadline = time.monotonic() + seconds
        while self.backend.running and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.backend.running == 0


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Any]:
    async with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    return smollm2_tokenizer()


@contextmanager
def serve(
    backend: Any, tokenizer: PreTrainedTokenizerFast, limits: Limits, **options: Any
) -> Iterator[Site]:
    """One model, until the end of the block; options are the offer's."""
    offer = Offer(backend.model_.name, backend, tokenizer, aliases=["text-alias"], **options)
    with serve_offers([offer], limits) as site:
        yield site


@contextmanager
def serve_offers(offers: list[Offer], limits: Limits, tenants: Tenants = ACME) -> Iterator[Site]:
    """Models behind one server; the first one's backend is the site's."""
    app = create_app(offers, tenants.find_by_key, limits)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Site(f"http://127.0.0.1:{port}", offers[0].backend, app)
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="session")
def running_site(tokenizer: PreTrainedTokenizerFast) -> Iterator[Site]:
    with serve(TextBackend(), tokenizer, LIMITS) as site:
        yield site


@pytest.fixture
def site(running_site: Site) -> Iterator[Site]:
    """Fresh for each test; afterwards nothing may run any more."""
    running_site.backend.reset()
    yield running_site
    running_site.wait_until_idle()


@pytest.fixture
def backend(site: Site) -> TextBackend:
    return site.backend


@pytest.fixture
def http(site: Site) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=site.url, headers=headers, timeout=10) as client:
        yield client


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
