"""Clients that people have, each in its own way, against a model that plays a part: agents of five
turns, answers cut at every length and sent back, and all that may go wrong between them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

import pytest

from router.messages import RefusalKind
from serve_app.protocol.backend import Refused
from serve_app.text.call_forms import HERMES
from tests.clients.client import Call, Client, Target
from tests.clients.conftest import Kind
from tests.clients.stage import AGENT, CALL, CUT, MODEL, SAID, STORY, TURNS, VERDICT, Stage
from tests.clients.toolbox import TOOLS, Verdict
from tests.serve_app.conftest import KEY, Site

CALLED = re.escape(HERMES.mark) + ".+" + re.escape(HERMES.end) + ".+"
HISTORY = re.compile(rf"({CALLED})?Go on\.", re.DOTALL)
"""Nothing, or a call and its result."""


async def test_an_agent_of_five_turns(client: Client, stage: Stage, stream: bool) -> None:
    """The second and the fourth have two calls."""
    run = await client.agent(AGENT, ["auto"] * 5, tools=len(TOOLS), stream=stream)
    assert run.turns == [[Call(*call) for call in turn] for turn in TURNS]
    assert run.verdict == Verdict(**VERDICT)
    assert run.tokens == sum(len(text) + 1 for text in map(str.encode, SAID))
    assert len(stage.generations) == 5


async def test_answers_cut_at_every_length_can_be_sent_back(
    client: Client, stage: Stage, stream: bool
) -> None:
    limits = range(1, len(CALL) + 3)
    asked = [client.cut(CUT, limit, stream=stream) for limit in limits]
    assert await asyncio.gather(*asked) == ["Yes"] * len(limits)
    prompts = [bytes(generation.prompt_ids).decode() for generation in stage.generations]
    histories = [prompt.partition(CUT)[2] for prompt in prompts if "Go on." in prompt]
    assert len(histories) == len(limits)
    assert all(HISTORY.fullmatch(history) for history in histories)


async def test_clients_that_may_ask_again_wait_as_long_as_they_are_told(
    kinds: Mapping[str, Kind], stage_site: Site, stage: Stage
) -> None:
    """All at once, each for a plain answer and a stream: by themselves they wait for less."""
    refusals = [Refused("too many", 3.0), Refused("too full", 3.0, RefusalKind.OVERLOAD)]
    stage.refusals = refusals * len(kinds)
    target = Target(f"{stage_site.url}/v1", KEY, MODEL.name)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(new(target, 1)) for new in kinds.values()]
        asked = [client.ask("hello", stream=s) for client in clients for s in (False, True)]
        started = time.monotonic()
        assert await asyncio.gather(*asked) == ["hello"] * len(asked)
    assert time.monotonic() - started >= 3.0
    assert len(stage.generations) == 2 * len(asked)


async def test_a_failure_is_told_in_our_words(client: Client, stage: Stage, stream: bool) -> None:
    """Within a stream, too, behind a part of the answer."""
    stage.fail_after = 3
    with pytest.raises(Exception, match="The engine failed while it generated"):
        await client.ask("hello", stream=stream)


async def test_a_refusal_is_told_in_our_words(client: Client, stage: Stage, stream: bool) -> None:
    stage.refusals = [Refused("The budget is spent.", 60.0, RefusalKind.BUDGET)]
    with pytest.raises(Exception, match="The budget is spent"):
        await client.ask("hello", stream=stream)


async def test_who_leaves_ends_the_generation(
    client: Client, stage_site: Site, stage: Stage
) -> None:
    stage.delay_s = 0.005
    await client.leave(STORY)
    await asyncio.to_thread(stage_site.wait_until_idle)
    assert stage.outcomes == {"cancelled": 1}


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("show_image", "only parts"),
        ("embed", "no such URL.*has /v1/chat/completions"),
        ("respond", "no such URL.*has /v1/chat/completions"),
    ],
)
async def test_what_is_not_supported_is_said(client: Client, method: str, told: str) -> None:
    with pytest.raises(Exception, match=told):
        await getattr(client, method)()


async def test_a_wrong_key_is_said(kind: Kind, stage_site: Site, stream: bool) -> None:
    async with kind(Target(f"{stage_site.url}/v1", "wrong", MODEL.name)) as client:
        with pytest.raises(Exception, match="A valid API key is required"):
            await client.ask("hello", stream=stream)


async def test_texts_come_as_they_are(client: Client, stage: Stage, stream: bool) -> None:
    text = "a\u2028b\u2029c\x85d\r\ne\n\nf\x1cg\x0bh\td 日本 👩\u200d💻 data: [DONE]\n: \\u2028"
    assert await client.ask(text, stream=stream) == text
