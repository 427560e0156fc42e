from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from serve_app.http import pacing
from serve_app.http.choices import Piece, joined
from serve_app.http.pacing import Outgoing, Pace
from serve_app.protocol.errors import ApiError
from tests.serve_app.conftest import KEY, LIMITS, Site, serve
from tests.serve_app.sse import texts
from tests.serve_app.streams import chat, completion, stream
from tests.serve_app.text_backend import TextBackend

MAX_DELAY_S = 0.03
LATE_S = 0.25
"""What a busy machine may add to any delay."""
SOON_S = 5.0


def busy(max_delay_s: float = MAX_DELAY_S) -> Pace:
    """Of a server with so many streams that each waits as long as it may."""
    pace = Pace(max_delay_s, processors=1)
    pace.choices = 10_000
    return pace


class Source:
    """Gives batches, each after a while, and remembers when and how it ended."""

    def __init__(self, *timed: tuple[float, list[Piece]], failure: Exception | None = None) -> None:
        self.given: list[tuple[float, Piece]] = []
        self.closed = False
        self._timed, self._failure = timed, failure

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        try:
            for wait_s, batch in self._timed:
                await asyncio.sleep(wait_s)
                self.given += [(time.monotonic(), piece) for piece in batch]
                yield batch
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True


async def taken(source: Source, pace: Pace) -> list[tuple[float, list[Piece]]]:
    """Everything, with the time of each take."""
    all_taken = []
    async with Outgoing(source.batches(), pace) as outgoing:
        while not outgoing.ended:
            pieces = await outgoing.take(SOON_S)
            all_taken.append((time.monotonic(), pieces))
    return all_taken


def words(*texts: str, wait_s: float = 0.0) -> list[tuple[float, list[Piece]]]:
    return [(wait_s, [Piece(0, text, None)]) for text in texts]


def test_the_more_streams_there_are_the_rarer_each_sends_up_to_a_bound() -> None:
    pace = Pace(0.15, processors=2)
    intervals = []
    for pace.choices in (0, 1, 2, 8, 1000):
        intervals.append(pace.interval_s)
    assert intervals == pytest.approx([0, 0, 0.015, 0.105, 0.15])


def test_the_chunks_of_all_streams_take_a_bounded_share_of_the_processors() -> None:
    pace = Pace(60.0, processors=4)
    for pace.choices in (2, 10, 200):
        cost_s = pace.choices * pacing.CHUNK_CPU_S / pace.interval_s  # per second
        assert cost_s <= 2 * 4 * pacing.CPU_SHARE


def test_a_delay_of_nothing_holds_nothing() -> None:
    assert busy(0.0).interval_s == 0


async def test_a_stream_that_is_alone_sends_each_token_at_once() -> None:
    pace = Pace(MAX_DELAY_S)
    source = Source(*words("a", "b", "c", wait_s=0.005))
    sent = await taken(source, pace)
    assert [[piece.text for piece in pieces] for _, pieces in sent if pieces] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert pace.choices == 0


async def test_a_busy_server_joins_what_comes_in_between() -> None:
    end = (0.0, [Piece(0, "", "stop")])
    source = Source(*words("a"), *words("b", "c", "d", wait_s=0.005), end)
    sent = await taken(source, busy(10.0))
    assert [pieces for _, pieces in sent] == [[Piece(0, "a", None)], [Piece(0, "bcd", "stop")]]


async def test_the_first_token_of_each_choice_is_never_held() -> None:
    source = Source(
        (0.0, [Piece(0, "a", None)]), (0.01, [Piece(1, "b", None)]), (30.0, [Piece(1, "", "stop")])
    )
    async with Outgoing(source.batches(), busy(30.0)) as outgoing:
        assert await outgoing.take(SOON_S) == [Piece(0, "a", None)]
        assert await outgoing.take(SOON_S) == [Piece(1, "b", None)]


async def test_what_is_held_leaves_in_time_although_nothing_follows() -> None:
    source = Source(*words("a"), *words("b", wait_s=0.001), *words("c", wait_s=30.0))
    async with Outgoing(source.batches(), busy()) as outgoing:
        assert await outgoing.take(SOON_S) == [Piece(0, "a", None)]
        assert await outgoing.take(SOON_S) == [Piece(0, "b", None)]
        held_s = time.monotonic() - source.given[-1][0]
        assert MAX_DELAY_S * 0.9 <= held_s <= MAX_DELAY_S + LATE_S
        assert await outgoing.take(0.01) == []
    assert source.closed


async def test_what_came_before_a_failure_is_taken_before_it_is_raised() -> None:
    source = Source(*words("a"), *words("b", wait_s=0.005), failure=KeyError("lost"))
    async with Outgoing(source.batches(), busy(30.0)) as outgoing:
        assert await outgoing.take(SOON_S) == [Piece(0, "a", None)]
        assert await outgoing.take(SOON_S) == [Piece(0, "b", None)]
        assert not outgoing.ended
        with pytest.raises(KeyError, match="lost"):
            await outgoing.take(SOON_S)


async def test_time_that_is_over_ends_the_source_behind_what_it_gave() -> None:
    source = Source(*words("a"), *words("b", wait_s=0.01), *words("c", wait_s=30.0))
    async with Outgoing(source.batches(), busy(30.0), timeout_s=0.1) as outgoing:
        assert await outgoing.take(SOON_S) == [Piece(0, "a", None)]
        assert await outgoing.take(SOON_S) == [Piece(0, "b", None)]
        assert source.closed
        with pytest.raises(ApiError, match="time"):
            await outgoing.take(SOON_S)


async def test_a_stream_that_is_left_ends_its_source_at_once_and_no_longer_counts() -> None:
    pace = busy(30.0)
    before = pace.choices
    source = Source(*words("a"), *words("b", wait_s=0.005), *words("c", wait_s=30.0))
    async with Outgoing(source.batches(), pace) as outgoing:
        await outgoing.take(SOON_S)
        assert pace.choices == before + 1
        await asyncio.sleep(0.02)
        left = time.monotonic()
    assert time.monotonic() - left < LATE_S
    assert source.closed
    assert pace.choices == before


PIECES = st.builds(Piece, st.integers(0, 2), st.text(max_size=3), st.none())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.001, 0.004]), st.lists(PIECES, min_size=1, max_size=4)),
        max_size=6,
    ),
    st.sampled_from([0.0, 0.003, 0.01]),
)
def test_nothing_is_lost_repeated_reordered_or_held_too_long(
    timed: list[tuple[float, list[Piece]]], max_delay_s: float
) -> None:
    source = Source(*timed)
    sent = asyncio.run(taken(source, busy(max_delay_s)))
    for choice in range(3):
        given = [(at, piece) for at, piece in source.given if piece.choice == choice]
        told = [(at, piece) for at, pieces in sent for piece in pieces if piece.choice == choice]
        assert bool(given) == bool(told)
        if given:
            assert joined([p for _, p in given]) == joined([p for _, p in told])
        for at, pieces in sent:
            due = "".join(piece.text for t, piece in given if t < at - max_delay_s - LATE_S)
            text = "".join(piece.text for t, piece in told if t <= at)
            assert text.startswith(due)
            assert len({piece.choice for piece in pieces}) == len(pieces)


@pytest.fixture(scope="module")
def running_busy_site(tokenizer: PreTrainedTokenizerFast) -> Iterator[Site]:
    """Two choices are many for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "CPU_SHARE", 1e-6)
        with serve(TextBackend(), tokenizer, LIMITS) as site:
            yield site


@pytest.fixture
def busy_http(running_busy_site: Site) -> Iterator[httpx.Client]:
    running_busy_site.backend.reset()
    running_busy_site.backend.delay_s = 0.002
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=running_busy_site.url, headers=headers, timeout=10) as client:
        yield client
    running_busy_site.wait_until_idle()


TEXT = "A 日本 é́ \ufffd one END two" * 2


def test_joined_chunks_are_the_plain_answer(busy_http: httpx.Client) -> None:
    """Its logprobs and usage, too; and they are far fewer than tokens."""
    more = {"n": 2, "logprobs": 2, "stream_options": {"include_usage": True}}
    body = completion(TEXT, n=2, logprobs=2)
    plain = busy_http.post("/v1/completions", json=body).json()
    *chunks, last, done = stream(busy_http, "/v1/completions", completion(TEXT, **more))
    assert done == "[DONE]"
    assert last["usage"] == plain["usage"]
    assert texts(chunks) == {0: TEXT, 1: TEXT}
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert len(own) < len(TEXT.encode()) / 3
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [value for c in own if c["logprobs"] for value in c["logprobs"][name]]
            assert told == plain["choices"][index]["logprobs"][name]


def test_a_stop_string_ends_the_sequence_whatever_is_held_back(
    busy_http: httpx.Client, running_busy_site: Site
) -> None:
    body = chat(TEXT, n=2, stop=["END"])
    *chunks, _ = stream(busy_http, "/v1/chat/completions", body)
    assert texts(chunks) == {0: TEXT.partition("END")[0], 1: TEXT.partition("END")[0]}
    backend: TextBackend = running_busy_site.backend
    assert backend.deltas_sent == 2 * len((TEXT.partition("END")[0] + "END").encode())
    assert backend.outcomes == {"enough": 2}


def test_a_failure_comes_behind_all_text_before_it(
    busy_http: httpx.Client, running_busy_site: Site
) -> None:
    running_busy_site.backend.fail_after = 9
    *chunks, error = stream(busy_http, "/v1/chat/completions", chat("0123456789abc", n=2))
    assert error["error"]["code"] == "engine_failure"
    assert "012345678" in texts(chunks).values()
