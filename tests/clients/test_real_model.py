"""The same clients against the server of configs/local.yaml. Its model is small, so its choices are
forced; which tools it takes where it may choose is its own affair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.clients.client import Client, Target
from tests.clients.conftest import Kind
from tests.clients.toolbox import TOOLS, Verdict

QUESTION = "Is it warm in Paris?"
CHOICES = ["required", "Weather", "required", "Weather", "none"]
CALL_TOKENS = 50
"""More than any call of the tool Weather has."""
STEP = 7
"""Tokens between the lengths at which answers are cut; 1 with --long."""

AT_ONCE = 16
"""Requests; the demo's tenants may have 32."""


def limits(config: pytest.Config) -> Sequence[int]:
    return range(1, CALL_TOKENS, 1 if config.getoption("--long") else STEP)


@pytest.fixture
async def local_client(kind: Kind, local_server: Target) -> AsyncIterator[Client]:
    async with kind(local_server) as client:
        yield client


async def test_agents(local_client: Client, request: pytest.FixtureRequest) -> None:
    """A plain one beside a streamed one; with --long they have a full toolbox."""
    tools = len(TOOLS) if request.config.getoption("--long") else 3
    asked = [local_client.agent(QUESTION, CHOICES, tools=tools, stream=s) for s in (False, True)]
    for run in await asyncio.gather(*asked):
        assert [bool(turn) for turn in run.turns] == [True] * 4
        assert {call.name for call in (*run.turns[1], *run.turns[3])} == {"Weather"}
        assert isinstance(run.verdict, Verdict)


async def test_answers_are_objects(local_client: Client) -> None:
    assert isinstance(await local_client.decide(QUESTION), Verdict)


async def test_answers_that_were_cut_can_be_sent_back(
    local_client: Client, request: pytest.FixtureRequest
) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def cut(limit: int, stream: bool) -> str:
        async with room:
            return await local_client.cut(QUESTION, limit, stream=stream)

    asked = [cut(limit, stream) for limit in limits(request.config) for stream in (False, True)]
    assert all(await asyncio.gather(*asked))
