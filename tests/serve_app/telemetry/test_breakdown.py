"""Where a request's time went: over real HTTP, and the clock that counts it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from serve_app.telemetry import records
from serve_app.telemetry.breakdown import MAX_TURNS, Breakdown, Phase, furthest, server_timing
from serve_app.telemetry.records import Records
from tests.serve_app.metered_site import SLOTS, MeteredSite, key_of, metered_site, until
from tests.serve_app.telemetry.test_records import Lines, lines  # noqa: F401  # a fixture

TIMED = {"X-Fairstream-Timing": "1"}
TOLD = re.compile(r"(\w+);dur=([0-9.]+)")


def told(text: str) -> dict[str, float]:
    """Milliseconds by phase."""
    return {name: float(ms) for name, ms in TOLD.findall(text)}


async def asked(site: MeteredSite, tenant: str = "a", **fields: object) -> str:
    """What a client that asks for it is told of its time, streamed or not."""
    body = {"model": "text", "prompt": "hello", "max_tokens": 20, "ignore_eos": True} | fields
    headers = {"Authorization": f"Bearer {key_of(tenant)}"} | TIMED
    reply = await site.calls.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200
    return reply.text if fields.get("stream") else reply.headers["Server-Timing"]


@given(st.lists(st.tuples(st.sampled_from(["enter", "during", "leave"]), st.sampled_from(Phase))))
def test_every_moment_belongs_to_one_phase(turns: list[tuple[str, Phase]]) -> None:
    now = 0.0
    breakdown = Breakdown(lambda: now)
    opened = []
    for number, (turn, phase) in enumerate(turns):
        now += 1 + number
        if turn == "enter":
            breakdown.enter(phase)
        elif turn == "during":
            opened.append(breakdown.during(phase))
            opened[-1].__enter__()
        elif opened:
            opened.pop().__exit__()
    assert sum(breakdown.so_far().values()) == now


def test_what_is_counted_apart_is_not_the_requests_phase() -> None:
    now = 0.0
    breakdown = Breakdown(lambda: now)
    breakdown.enter(Phase.DECODE)
    now = 1.0
    with breakdown.during(Phase.SEND):
        now = 3.0
        breakdown.enter(Phase.ADMISSION)
        with breakdown.during(Phase.TEXT):
            now = 4.0
        now = 6.0
    now = 10.0
    seconds = {phase: s for phase, s in breakdown.so_far().items() if s}
    assert seconds == {Phase.DECODE: 1, Phase.SEND: 4, Phase.TEXT: 1, Phase.ADMISSION: 4}


def test_of_several_sequences_the_furthest_counts() -> None:
    assert furthest([Phase.ADMISSION, Phase.DECODE, Phase.PREFILL]) is Phase.DECODE
    assert furthest([]) is None


def test_what_a_phase_began_with_may_belong_to_an_earlier_one() -> None:
    now = 0.0
    breakdown = Breakdown(lambda: now)
    breakdown.enter(Phase.PREFILL)
    now = 10.0
    breakdown.split(4.0, Phase.REPLICA_QUEUE)
    breakdown.enter(Phase.DECODE)
    now = 11.0
    seconds = {phase: s for phase, s in breakdown.so_far().items() if s}
    assert seconds == {Phase.REPLICA_QUEUE: 4, Phase.PREFILL: 6, Phase.DECODE: 1}
    assert breakdown.turns == [
        (Phase.READ, 0.0),
        (Phase.REPLICA_QUEUE, 0.0),
        (Phase.PREFILL, 4.0),
        (Phase.DECODE, 10.0),
    ]


@given(told_s=st.floats(), passed_s=st.floats(0, 1e6))
def test_nobody_says_of_a_phase_that_it_was_longer_than_it_was(
    told_s: float, passed_s: float
) -> None:
    """A replica's clock may be set, or its word be nonsense."""
    now = 0.0
    breakdown = Breakdown(lambda: now)
    breakdown.enter(Phase.PREFILL)
    now = passed_s
    breakdown.split(told_s, Phase.REPLICA_QUEUE)
    assert sum(breakdown.so_far().values()) == passed_s
    assert min(breakdown.seconds.values()) >= 0


def test_turns_do_not_grow_without_end() -> None:
    breakdown = Breakdown()
    for _ in range(1000):
        breakdown.enter(Phase.ADMISSION)
        breakdown.enter(Phase.PREFILL)
        breakdown.split(1e-9, Phase.REPLICA_QUEUE)
    assert len(breakdown.turns) <= MAX_TURNS


def test_milliseconds_are_told() -> None:
    assert (
        server_timing({Phase.READ: 0.0012, Phase.SEND: 1.0}) == "read;dur=1.200, send;dur=1000.000"
    )


async def test_phases_sum_to_the_time_that_a_request_took(lines: Lines) -> None:  # noqa: F811
    """To a millisecond, for plain answers, streams, several choices and refusals."""
    async with metered_site(a={"max_concurrency": 200, "max_queued": 2000}) as site:
        kinds: list[dict[str, object]] = [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}]
        for _ in range(3):
            await asyncio.gather(*(site.ask(**kinds[i % len(kinds)]) for i in range(40)))
        assert len(lines) == 120
    for line in lines:
        assert sum(line["phases"].values()) == pytest.approx(line["seconds"], abs=0.001)
        assert min(line["phases"].values()) >= 0
        assert line["phases"]["decode"] > 0


async def test_a_client_that_asks_is_told(lines: Lines) -> None:  # noqa: F811
    async with metered_site(a={}) as site:
        for fields in ({}, {"stream": True}, {"stream": True, "n": 2}):
            phases = told(await asked(site, **fields))
            assert set(phases) == {phase.value for phase in Phase}
            # What passes behind the last word is in the line alone.
            assert 0 < sum(phases.values()) <= lines[-1]["seconds"] * 1e3 + 1
        plain = await site.ask(stream=True)
        assert "Server-Timing" not in plain.headers
        assert "Timing" not in plain.text


async def test_a_wait_for_a_place_is_told_apart() -> None:
    async with metered_site(a={"max_concurrency": 1}) as site:
        first = asyncio.create_task(site.ask(max_tokens=400))
        await until(lambda: site.transport.engines["r"].running)
        phases = told(await asked(site, max_tokens=2))
        await first
    assert max(phases, key=phases.__getitem__) == "admission"
    assert phases["admission"] > 100


async def test_the_queue_in_the_replica_is_told_apart(lines: Lines) -> None:  # noqa: F811
    async with metered_site(step_s=0.1, a={}) as site:
        site.transport.engines["r"].queued_s = 0.06
        for fields in ({}, {"n": 2}):
            phases = told(await asked(site, max_tokens=2, **fields))
            assert phases["replica_queue"] == pytest.approx(60, abs=0.1)
            assert min(phases["prefill"], phases["decode"]) > 20
    assert [line["phases"]["replica_queue"] for line in lines] == [0.06, 0.06]


WHY = {
    "concurrency": {"a": {"max_concurrency": 1}},
    "capacity": {"a": {"max_concurrency": 100}},
    "fair_share": {"a": {"max_concurrency": 100}, "b": {"max_concurrency": 100}},
}


@pytest.mark.parametrize("why", WHY)
async def test_it_is_told_why_a_place_was_waited_for(why: str, lines: Lines) -> None:  # noqa: F811
    """Of two tenants that wait for the same place, the one that had more waits for the other."""
    async with metered_site(**WHY[why]) as site:
        many = 1 if why == "concurrency" else SLOTS
        asking = [asyncio.create_task(site.ask(max_tokens=400)) for _ in range(many)]
        await until(lambda: len(site.transport.engines["r"].running) == many)
        asking += [
            asyncio.create_task(site.ask("b", max_tokens=2)) for _ in range(len(WHY[why]) - 1)
        ]
        await asyncio.sleep(0.05)
        await site.ask(max_tokens=2)
        await asyncio.gather(*asking)
    [line] = [line for line in lines if line["output_tokens"] == 2 and line["tenant"] == "a"]
    held_back = line["held_back"]
    assert sum(held_back.values()) == pytest.approx(line["phases"]["admission"], abs=0.001)
    assert held_back[why] == max(held_back.values()) > 0.05
    assert set(held_back) <= {why, "asking", "capacity"}


async def test_a_slow_reader_is_told_apart(lines: Lines) -> None:  # noqa: F811
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with records.current().sequence(prompt_tokens=1) as sequence:
            sequence.reach(Phase.DECODE)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

    async def slow(message: Message) -> None:
        await asyncio.sleep(0.1)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await Records(app, Counter())(scope, slow, slow)
    [line] = lines
    assert line["phases"]["send"] >= 0.2 > line["phases"]["decode"]
