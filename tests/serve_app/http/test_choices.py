from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from replica.messages import Sampling
from router.tenant import Tenant
from serve_app.http.choices import Choice, Piece, follow_all
from serve_app.protocol.backend import EngineFailure, Generation, Refused
from serve_app.text.detokenizer import detokenizers
from serve_app.text.sequence_text import SequenceText
from tests.serve_app.text_backend import TextBackend, byte_tokenizer

NEW = detokenizers(byte_tokenizer().backend_tokenizer)


def choices(*texts: str, stops: tuple[str, ...] = (), max_tokens: int = 100) -> list[Choice]:
    return [
        Choice(
            index,
            Generation(
                f"r-{index}",
                Tenant(id="acme"),
                tuple(text.encode()),
                Sampling(max_tokens=max_tokens),
            ),
            SequenceText(NEW(True), stops),
        )
        for index, text in enumerate(texts)
    ]


async def read_all(followed: list[Choice], backend: TextBackend) -> list[Piece]:
    return [piece async for batch in follow_all(followed, backend) for piece in batch]


@pytest.mark.parametrize("texts", [("hello",), ("hello", "日本", "x")])
@pytest.mark.parametrize("per_delta", [1, 3, 50])
async def test_pieces_join_to_the_texts(texts: tuple[str, ...], per_delta: int) -> None:
    followed = choices(*texts)
    pieces = await read_all(followed, TextBackend(per_delta=per_delta))
    for index, text in enumerate(texts):
        own = [piece for piece in pieces if piece.choice == index]
        assert "".join(piece.text for piece in own) == text
        assert [piece.ending for piece in own] == [None] * (len(own) - 1) + ["stop"]
    assert [c.completion_tokens for c in followed] == [len(t.encode()) + 1 for t in texts]


async def test_choices_come_as_they_are_generated() -> None:
    pieces = await read_all(choices("aaa", "bbb"), TextBackend(delay_s=0.002))
    assert {piece.choice for piece in pieces[:2]} == {0, 1}


async def test_what_waits_comes_together() -> None:
    """A reader that is slower than the engine gets fewer, larger batches."""
    backend, batches = TextBackend(), []
    async with aclosing(follow_all(choices("a" * 50, "b" * 50), backend)) as source:
        async for batch in source:
            batches.append(len(batch))
            await asyncio.sleep(0.01)
    assert len(batches) < 20
    assert sum(batches) == 2 * 51


async def test_a_stop_string_ends_the_sequence_as_a_success() -> None:
    backend = TextBackend()
    pieces = await read_all(choices("one END two", stops=("END",)), backend)
    assert "".join(piece.text for piece in pieces) == "one "
    assert backend.outcomes == {"enough": 1}
    assert backend.deltas_sent == 7


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("per_delta", [1, 4, 50])
async def test_what_comes_behind_a_stop_string_counts_for_nothing(
    per_delta: int, count: int
) -> None:
    """Even where the sequence has ended meanwhile."""
    backend = TextBackend(per_delta=per_delta)
    followed = choices(*["one END two"] * count, stops=("END",))
    pieces = await read_all(followed, backend)
    for index in range(count):
        assert "".join(piece.text for piece in pieces if piece.choice == index) == "one "
    assert [choice.completion_tokens for choice in followed] == [7] * count
    assert backend.outcomes == {"enough": count}
    assert backend.needed == [7] * count


@pytest.mark.parametrize("count", [1, 3])
async def test_the_ending_is_told_after_the_accounting(count: int) -> None:
    """C20."""
    backend = TextBackend(settle_s=0.01)
    async for batch in follow_all(choices(*["abc"] * count), backend):
        ended = sum(piece.ending is not None for piece in batch)
        assert backend.outcomes["succeeded"] >= ended
    assert backend.outcomes == {"succeeded": count}


@pytest.mark.parametrize("count", [1, 4])
async def test_closing_ends_every_sequence_before_it_returns(count: int) -> None:
    """C34."""
    backend = TextBackend(delay_s=0.001)
    async with aclosing(follow_all(choices(*["abcdef"] * count), backend)) as source:
        await anext(source)
        assert backend.running == count
    assert backend.running == 0
    assert backend.outcomes == {"cancelled": count}


async def test_closing_when_some_are_done_ends_the_others() -> None:
    """C34."""
    backend = TextBackend(delay_s=0.002)
    source = follow_all(choices("a", "a", "a" * 90, "a" * 90), backend)
    done = 0
    while done < 2:
        done += sum(piece.ending is not None for piece in await anext(source))
    await source.aclose()
    assert backend.outcomes == {"succeeded": 2, "cancelled": 2}


async def test_a_failure_of_one_ends_all() -> None:
    backend = TextBackend(fail_after=2, delay_s=0.001)
    with pytest.raises(EngineFailure):
        await read_all(choices("abc", "abc"), backend)
    assert backend.running == 0
    assert backend.outcomes["failed"] >= 1


async def test_a_refusal_comes_through() -> None:
    backend = TextBackend(refusal=Refused("too many", 3))
    with pytest.raises(Refused):
        await read_all(choices("abc", "abc"), backend)


async def test_a_sequence_without_an_ending_is_a_failure() -> None:
    """R13."""
    with pytest.raises(EngineFailure):
        await read_all(choices("abc"), TextBackend(end_silently_after=2))


async def test_the_first_piece_comes_with_the_first_token() -> None:
    """Even if it has no text yet: the client learns that the answer has begun."""
    pieces = await read_all(choices("日a"), TextBackend())
    assert pieces == [
        Piece(0, "", None),
        Piece(0, "日", None),
        Piece(0, "a", None),
        Piece(0, "", "stop"),
    ]
