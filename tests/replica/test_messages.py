"""Outputs that come in any portions, some of them twice, are put together again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.messages import Output, OutputBuffer, TokenLogprobs


def tokens(first: int, last: int) -> Output:
    """The tokens from `first` to `last` of one sequence of ten; each tells its log probability,
    and the first brings those of the prompt."""
    told = tuple(TokenLogprobs(-float(n), (n,), (-float(n),)) for n in range(first, last))
    prompt = (TokenLogprobs(-0.5, (), ()),) if first <= PRIOR < last else ()
    return Output(
        "r", 1, first, tuple(range(100 + first, 100 + last)), "length" if last == 10 else None,
        cached_tokens=4, logprobs=told, prompt_logprobs=prompt, gpu_s=last / 10,
        queued_s=0.5,
    )  # fmt: skip


PRIOR = 2
"""Output of an earlier attempt."""
PORTIONS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)))
"""How far each begins before what is known already, and how many tokens more it brings."""


@given(portions=PORTIONS, data=st.data())
def test_the_whole_does_not_depend_on_the_portions(portions, data):
    buffer = OutputBuffer("r", 1, PRIOR)
    for overlap, more in portions:
        before = buffer.end
        portion = tokens(max(PRIOR, before - overlap), min(10, before + more))
        news = buffer.add(portion)
        assert buffer.end == portion.offset + len(portion.token_ids)
        assert news == (buffer.end > before or buffer.end == 10)
        assert buffer.finish_reason == ("length" if buffer.end == 10 else None)
        if buffer.end > PRIOR:
            offset = data.draw(st.integers(PRIOR, buffer.end))
            assert buffer.since(offset) == tokens(offset, buffer.end)


@given(missing=st.integers(1, 5))
def test_a_gap_is_an_error_and_changes_nothing(missing):
    buffer = OutputBuffer("r", 1, PRIOR)
    buffer.add(tokens(PRIOR, 4))
    with pytest.raises(ValueError, match=f"{missing} tokens of request r are missing"):
        buffer.add(tokens(4 + missing, 10))
    assert buffer.since(PRIOR) == tokens(PRIOR, 4)
