"""Replicas killed under streams: each client reads what it would have read anyway.

The long form, with figures: `pytest tests/serve_app/on_ray/test_resume.py --kills 20 -s`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from typing import Any

import pytest

from tests.serve_app.on_ray.conftest import REPLICAS
from tests.serve_app.on_ray.flood import Flood, Stream, bodies, texts_of
from tests.serve_app.on_ray.site import MODEL, Site, actors, engines, kill, until

TOKENS = 200
STREAMS = bodies(20, 20, TOKENS)
PROMPT_TOKENS = sum(len(body["prompt"]) for body in STREAMS)


@pytest.fixture(scope="module")
async def expected(running_site: Site) -> list[str]:
    await until(running_site.at_rest)
    return await texts_of(running_site, STREAMS)


async def used(site: Site) -> tuple[int, int]:
    """Prompt and output tokens that were charged, once everything is settled."""
    await until(site.at_rest)
    usage = (await site.snapshot()).usage["bulk"]
    return usage.prompt_tokens, usage.output_tokens


async def all_run_again(site: Site) -> bool:
    return await site.all_run() and len(await site.offering()) == REPLICAS


@pytest.mark.parametrize("part", ["engine", "actor"])
async def test_streams_outlive_their_replica(
    site: Site, expected: list[str], part: str, pytestconfig: pytest.Config
) -> None:
    """Greedy or drawn, to the last token; and each token is charged once."""
    rng = random.Random(part)
    pauses: list[float] = []
    back = []
    for _ in range(pytestconfig.getoption("kills")):
        prompt, output = await used(site)
        async with Flood(site, STREAMS) as flood:
            await asyncio.sleep(rng.random() * 0.15)  # a stream takes half a second
            running = flood.running
            struck = time.monotonic()
            kill(rng.choice(engines() if part == "engine" else actors("Replica")))
            assert running > len(STREAMS) // 2  # the first may be over
            assert await flood.texts() == expected
        pauses += [stream.longest_gap_s for stream in flood.streams]
        assert await used(site) == (prompt + PROMPT_TOKENS, output + len(STREAMS) * TOKENS)
        await until(lambda: all_run_again(site), 60)
        back.append(time.monotonic() - struck)
    figures = {
        "kills": len(back),
        "streams": len(pauses),
        "pause_s_median": round(statistics.median(pauses), 2),
        "pause_s_max": round(max(pauses), 2),
        "back_s_max": round(max(back), 2),
    }
    print(json.dumps({"killed": part, **figures}))


def shaped(expected: list[str]) -> dict[str, dict[str, Any]]:
    """Requests whose next token depends on more than the text so far."""
    common = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    plain = common | {"prompt": STREAMS[0]["prompt"]}
    draws = {"temperature": 1.0, "top_k": 2, "seed": 5}
    words = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 40}
    schema = {"type": "object", "properties": {"words": words}, "required": ["words"]}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    return {
        "log probabilities": plain | {"logprobs": 3},
        "of the prompt, too": plain | {"logprobs": 3, "echo": True},
        # It spans most of the answer, so the replica is lost within it.
        "stop string": plain | {"stop": expected[0][20:60]},
        "choices": common | draws | {"prompt": "n: ", "n": 3},
        "penalties": plain
        | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        "bias": plain | {"logit_bias": {"65": 4.0}, "frequency_penalty": 0.1},
        "least": plain | {"min_tokens": TOKENS - 1, "ignore_eos": False},
        "bad words": plain | {"bad_words": ["ab", "x"]},
        "schema": common | {"prompt": "s: ", "response_format": form, "ignore_eos": False},
        "drawn schema": common
        | draws
        | {"prompt": "d: ", "response_format": form, "ignore_eos": False},
        "regex": common
        | draws
        | {"prompt": "r: ", "guided_regex": "([a-z]{3}-[0-9]{2};){40}", "ignore_eos": False},
    }


def said(stream: Stream) -> list[dict[str, Any]]:
    """What each choice came to, however it was cut into events."""
    whole: dict[int, dict[str, Any]] = {}
    for event in stream.events:
        for choice in event["choices"]:
            one = whole.setdefault(
                choice["index"], {"text": "", "tokens": [], "logprobs": [], "reason": None}
            )
            one["text"] += choice["text"]
            one["reason"] = choice["finish_reason"] or one["reason"]
            if choice["logprobs"]:
                one["tokens"] += choice["logprobs"]["tokens"]
                one["logprobs"] += choice["logprobs"]["token_logprobs"]
    return [one for _, one in sorted(whole.items())]


@pytest.mark.parametrize("part", ["engine", "actor"])
async def test_whatever_shapes_an_answer_survives_its_replica(
    site: Site, expected: list[str], part: str
) -> None:
    """Penalties, grammars, held stops and log probabilities go on behind what was said."""
    kinds = [body for body in shaped(expected).values() for _ in range(2)]
    async with Flood(site, kinds) as calm:
        await calm.ended()
    async with Flood(site, kinds) as flood:
        kill((engines() if part == "engine" else actors("Replica"))[0])
        await flood.ended()
    for body, before, after in zip(kinds, calm.streams, flood.streams, strict=True):
        for one, other in zip(said(before), said(after), strict=True):
            assert other.pop("logprobs") == pytest.approx(one.pop("logprobs"), abs=1e-4), body
            assert one == other, body
            assert one["reason"] == ("stop" if "stop" in body else one["reason"])
    await until(lambda: all_run_again(site), 60)
