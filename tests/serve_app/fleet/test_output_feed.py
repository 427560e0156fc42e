from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.messages import Output, Sampling, Submit, TokenLogprobs
from serve_app.fleet import output_feed as feed_module
from serve_app.fleet.output_feed import OutputFeed

KEY = ("r", 0)


def submit(prior: int = 0) -> Submit:
    return Submit(
        request_id="r",
        prompt_ids=(1,),
        prior_output_ids=tuple(range(prior)),
        sampling=Sampling(max_tokens=100),
    )


def output(offset: int, *token_ids: int, last: bool = False) -> Output:
    return Output("r", 0, offset, token_ids, "stop" if last else None)


async def test_a_slow_reader_gets_several_steps_as_one_output() -> None:
    feed = OutputFeed()
    feed.open(submit())
    reader = feed.attach({KEY: 0})
    for position in range(3):
        feed.record(output(position, 10 + position))
    assert await feed.take(reader, 1.0) == [output(0, 10, 11, 12)]


async def test_take_returns_nothing_after_its_timeout() -> None:
    feed = OutputFeed()
    reader = feed.attach({})
    await feed.take(reader, 1.0)
    assert await feed.take(reader, 0.01) == []


async def test_a_new_reader_continues_at_its_offsets() -> None:
    feed = OutputFeed()
    feed.open(submit())
    feed.attach({KEY: 0})
    feed.record(output(0, 10, 11, 12))
    reader = feed.attach({KEY: 1})
    assert await feed.take(reader, 1.0) == [output(1, 11, 12)]


async def test_offsets_count_the_output_of_earlier_attempts() -> None:
    feed = OutputFeed()
    feed.open(submit(prior=5))
    reader = feed.attach({KEY: 5})
    feed.record(output(5, 10))
    assert await feed.take(reader, 1.0) == [output(5, 10)]


async def test_a_sequence_of_no_interest_to_the_new_reader_is_not_repeated() -> None:
    feed = OutputFeed()
    feed.open(submit())
    feed.record(output(0, 10, last=True))
    reader = feed.attach({})
    assert await feed.take(reader, 0.01) == []


async def test_an_end_is_told_again_to_a_reader_that_missed_it() -> None:
    feed = OutputFeed()
    feed.open(submit())
    first = feed.attach({KEY: 0})
    feed.record(output(0, 10, last=True))
    await feed.take(first, 1.0)
    second = feed.attach({KEY: 1})
    assert await feed.take(second, 1.0) == [output(1, last=True)]


async def test_the_earlier_of_two_readers_takes_nothing() -> None:
    feed = OutputFeed()
    feed.open(submit())
    first = feed.attach({KEY: 0})
    await feed.take(first, 1.0)
    waiting = asyncio.create_task(feed.take(first, 1.0))
    await asyncio.sleep(0)
    second = feed.attach({KEY: 0})
    feed.record(output(0, 10))
    assert await waiting == []
    assert await feed.take(second, 1.0) == [output(0, 10)]


def test_a_repeated_submit_is_ignored() -> None:
    feed = OutputFeed()
    assert feed.open(submit())
    assert not feed.open(submit())


def test_a_submit_overtaken_by_its_abort_is_ignored() -> None:
    feed = OutputFeed()
    assert feed.refuse(KEY)
    assert not feed.open(submit())
    assert feed.unfinished == []


def test_ended_sequences_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "KEPT_ENDED", 2)
    feed = OutputFeed()
    for name in "abc":
        feed.refuse((name, 0))
    assert not feed.refuse(("c", 0))
    assert not feed.refuse(("b", 0))
    assert feed.refuse(("a", 0))


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
async def test_a_reader_sees_each_token_once_whatever_breaks(seed: int, count: int) -> None:
    """Steps, takes and reconnects in any order; a take may be lost on the way."""
    chance = random.Random(seed)
    feed = OutputFeed()
    feed.open(submit())
    reader = feed.attach({KEY: 0})
    received: list[int] = []
    recorded = 0
    ended = False
    while not ended:
        what = chance.choice(["step", "take", "lose", "reconnect"])
        if what == "step" and recorded < count:
            feed.record(output(recorded, recorded, last=recorded + 1 == count))
            recorded += 1
        elif what == "reconnect":
            reader = feed.attach({KEY: len(received)})
        elif what in ("take", "lose"):
            outputs = await feed.take(reader, 0.0)
            if what == "lose":
                reader = feed.attach({KEY: len(received)})
                continue
            for new in outputs:
                assert new.offset == len(received)
                received += new.token_ids
                ended = new.finish_reason is not None
    assert received == list(range(count))


async def test_log_probabilities_stay_with_their_tokens() -> None:
    """Those of the prompt come once, with the first token."""
    feed = OutputFeed()
    feed.open(submit())
    reader = feed.attach({KEY: 0})
    told = [TokenLogprobs(-float(n), (n,), (-float(n),)) for n in range(4)]
    feed.record(Output("r", 0, 0, (10,), logprobs=(told[0],), prompt_logprobs=(told[3],)))
    feed.record(Output("r", 0, 1, (11,), logprobs=(told[1],)))
    first = Output("r", 0, 0, (10, 11), logprobs=(told[0], told[1]), prompt_logprobs=(told[3],))
    assert await feed.take(reader, 1.0) == [first]
    feed.record(Output("r", 0, 2, (12,), logprobs=(told[2],)))
    assert await feed.take(reader, 1.0) == [Output("r", 0, 2, (12,), logprobs=(told[2],))]
    again = feed.attach({KEY: 1})
    rest = Output("r", 0, 1, (11, 12), logprobs=(told[1], told[2]))
    assert await feed.take(again, 1.0) == [rest]


@pytest.mark.parametrize("begun", [False, True])
async def test_what_is_handed_back_is_told_to_its_reader(begun: bool) -> None:
    """First what has no output: it loses nothing. A second time there is nothing left."""
    feed, waiting = OutputFeed(), ("w", 0)
    feed.open(submit())
    feed.open(msgspec.structs.replace(submit(), request_id="w"))
    reader = feed.attach({KEY: 0, waiting: 0})
    feed.record(output(0, 10))
    await feed.take(reader, 1.0)
    moved = [KEY, waiting] if begun else [waiting]
    assert feed.hand_back(begun=begun) == moved
    assert await feed.take(reader, 1.0) == [
        Output(*key, 1 if key == KEY else 0, (), "moved") for key in moved
    ]
    assert feed.hand_back(begun=begun) == []
    assert feed.unfinished == ([] if begun else [KEY])
