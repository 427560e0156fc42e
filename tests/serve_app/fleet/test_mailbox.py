from __future__ import annotations

import asyncio

import pytest

from replica.messages import Output, Sampling, Submit, TokenLogprobs
from serve_app.fleet.mailbox import Mailbox, ReplicaLost


def mailbox(prior: tuple[int, ...] = ()) -> Mailbox:
    sampling = Sampling(max_tokens=100)
    return Mailbox(
        Submit(request_id="r", prompt_ids=(1,), prior_output_ids=prior, sampling=sampling)
    )


def output(offset: int, *token_ids: int, last: bool = False) -> Output:
    return Output("r", 0, offset, token_ids, "stop" if last else None)


async def test_what_came_meanwhile_is_read_as_one_output() -> None:
    box = mailbox()
    box.put(output(0, 10))
    box.put(output(1, 11, 12, last=True))
    assert await box.get() == output(0, 10, 11, 12, last=True)


async def test_what_comes_twice_is_dropped() -> None:
    box = mailbox()
    box.put(output(0, 10, 11))
    box.put(output(0, 10, 11, 12))
    box.put(output(1, 11))
    assert await box.get() == output(0, 10, 11, 12)


async def test_a_repeated_output_alone_is_no_news() -> None:
    box = mailbox()
    box.put(output(0, 10))
    await box.get()
    box.put(output(0, 10))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(box.get(), 0.01)


def test_a_gap_is_an_error() -> None:
    box = mailbox()
    box.put(output(0, 10))
    with pytest.raises(ValueError, match="2 tokens of request r are missing"):
        box.put(output(3, 13))


async def test_offsets_go_on_behind_the_output_of_earlier_attempts() -> None:
    box = mailbox(prior=(7, 8))
    box.put(output(2, 10))
    assert await box.get() == output(2, 10)


async def test_an_end_without_tokens_is_told() -> None:
    box = mailbox()
    box.put(output(0, last=True))
    assert (await box.get()).finish_reason == "stop"


async def test_what_came_before_the_loss_is_read_first() -> None:
    box = mailbox()
    box.put(output(0, 10))
    box.fail(ReplicaLost("it burns", suspect=True))
    assert await box.get() == output(0, 10)
    for _ in range(2):
        with pytest.raises(ReplicaLost, match="it burns"):
            await box.get()


async def test_log_probabilities_stay_with_their_tokens() -> None:
    """Also where outputs overlap; those of the prompt are read once."""
    box = mailbox()
    told = [TokenLogprobs(-float(n), (n,), (-float(n),)) for n in range(4)]
    box.put(Output("r", 0, 0, (10,), logprobs=(told[0],), prompt_logprobs=(told[3],)))
    box.put(Output("r", 0, 0, (10, 11), logprobs=(told[0], told[1]), prompt_logprobs=(told[3],)))
    first = Output("r", 0, 0, (10, 11), logprobs=(told[0], told[1]), prompt_logprobs=(told[3],))
    assert await box.get() == first
    box.put(Output("r", 0, 0, (10, 11, 12), logprobs=tuple(told[:3]), prompt_logprobs=(told[3],)))
    assert await box.get() == Output("r", 0, 2, (12,), logprobs=(told[2],))


async def test_a_sequence_that_is_handed_back_is_lost_through_no_fault_of_its_own() -> None:
    """Behind its last tokens, which are no ending."""
    box = mailbox()
    box.put(Output("r", 0, 0, (10, 11), "moved"))
    assert await box.get() == output(0, 10, 11)
    with pytest.raises(ReplicaLost) as caught:
        await box.get()
    assert not caught.value.suspect
