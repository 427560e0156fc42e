from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from replica.messages import FinishReason, TokenLogprobs
from serve_app.protocol.backend import EngineFailure
from serve_app.text.detokenizer import detokenizers
from serve_app.text.logprobs import ShownToken
from serve_app.text.sequence_text import Ending, SequenceText
from tests.serve_app.text_backend import byte_tokenizer
from tests.serve_app.tokenizers_made import metaspace_tokenizer, wordpiece_tokenizer

NEW = detokenizers(byte_tokenizer().backend_tokenizer)
EOS = 256


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("per_delta", [1, 8])
def test_a_special_stop_token_never_cuts_the_text_before_it(
    skip: bool, include: bool, per_delta: int
) -> None:
    """C16. It is shown only if it is asked for twice."""
    tokens = (*ids("injury."), EOS)
    text = SequenceText(NEW(skip), include_stop=include)
    out, ending = "", None
    for start in range(0, len(tokens), per_delta):
        delta = tokens[start : start + per_delta]
        piece, ending = text.read(delta, "stop" if delta[-1] == EOS else None)
        out += piece
    assert out == ("injury.</s>" if include and not skip else "injury.")
    assert ending == "stop"


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abc")])
def test_an_ordinary_stop_token_is_shown_if_asked_for(include: bool, expected: str) -> None:
    text = SequenceText(NEW(True), include_stop=include)
    assert text.read(ids("abc"), "stop") == (expected, "stop")


def test_a_length_ending_keeps_its_last_token_and_flushes() -> None:
    """C14: what waits for the rest of a character or of a stop string comes out at the end."""
    text = SequenceText(NEW(True), stops=("cd",))
    assert text.read(ids("abc")) == ("ab", None)
    assert text.read(ids("日")[:2], "length") == ("c\ufffd", "length")


def test_a_stop_string_ends_it_over_the_border_of_deltas() -> None:
    text = SequenceText(NEW(True), stops=("END",))
    assert text.read(ids("all E")) == ("all ", None)
    assert text.read(ids("ND and more")) == ("", "stop")


def test_a_stop_string_in_the_last_delta_outranks_length() -> None:
    assert SequenceText(NEW(True), stops=("b",)).read(ids("abc"), "length") == ("a", "stop")


@pytest.mark.parametrize("reason", sorted(set(get_args(FinishReason)) - {"stop", "length"}))
def test_a_reason_that_is_no_ending_is_a_failure(reason: FinishReason) -> None:
    with pytest.raises(EngineFailure):
        SequenceText(NEW(True)).read((), reason)


def test_stop_strings_may_lie_in_multibyte_text() -> None:
    draw = random.Random(3)
    for _ in range(200):
        text, out, data = SequenceText(NEW(True), stops=("日本",)), "", ids("ab日x日本語")
        start, ending = 0, None
        while ending is None:
            end = start + draw.randint(1, 5)
            piece, ending = text.read(data[start:end], "length" if end >= len(data) else None)
            out, start = out + piece, end
        assert (out, ending) == ("ab日x", "stop")


@pytest.mark.parametrize("per_delta", [1, 2, 3, 20])
@pytest.mark.parametrize(("minimum", "expected"), [(0, "a"), (1, "a"), (2, "aEND"), (4, "aEND")])
def test_a_stop_string_lies_behind_the_minimum(minimum: int, expected: str, per_delta: int) -> None:
    """C07, for strings: what the first tokens say is never taken."""
    text = SequenceText(NEW(True), stops=("END",), min_tokens=minimum)
    out, data, ending, start = "", ids("aENDENDx"), None, 0
    while ending is None:
        end = start + per_delta
        piece, ending = text.read(data[start:end], "length" if end >= len(data) else None)
        out, start = out + piece, end
    assert (out, ending) == (expected, "stop")


BYTES = byte_tokenizer().backend_tokenizer
METASPACE, WORDPIECE = metaspace_tokenizer(), wordpiece_tokenizer()
CASES = [
    # tokenizer, how many of its ids are drawn from, stop strings
    (BYTES, 260, ("\ufffd\ufffd", "ab", "</s>")),
    (BYTES, 3, ("\x01\x02", "\x02\x02\x01")),
    (METASPACE, 270, (" Hello", "lo w", "\ufffd")),
    (WORDPIECE, 8, ("s hel", "do", ", ", "gs")),
]


@given(st.sampled_from(CASES), st.integers(0, 3), st.booleans(), st.data())
def test_where_it_ends_does_not_depend_on_what_comes_together(
    case: tuple[Tokenizer, int, tuple[str, ...]], minimum: int, include: bool, data: st.DataObject
) -> None:
    """Neither its text, nor its tokens and what is told of them."""
    tokenizer, size, stops = case
    drawn = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    borders = data.draw(st.sets(st.integers(1, len(drawn))))
    told = tuple(TokenLogprobs(-float(place), (), ()) for place in range(len(drawn)))

    def read(ends: list[int]) -> tuple[str, Ending | None, int, list[ShownToken]]:
        text = SequenceText(detokenizers(tokenizer)(False), stops, include, minimum)
        out, tokens, ending, start = "", [], None, 0
        for end in ends:
            last = reason if end == len(drawn) else None
            piece, ending = text.read(tuple(drawn[start:end]), last, told[start:end])
            out, start = out + piece, end
            tokens += text.take_tokens()
            if ending is not None:
                break
        return out, ending, text.tokens, tokens

    one_by_one = read(list(range(1, len(drawn) + 1)))
    assert read(sorted({*borders, len(drawn)})) == one_by_one
    assert read([len(drawn)]) == one_by_one
    assert one_by_one[2] <= len(drawn)


def test_tokens_count_up_to_the_one_that_completes_the_stop_string() -> None:
    text = SequenceText(NEW(True), stops=("END",))
    assert text.read(ids("a END and more"), "length") == ("a ", "stop")
    assert (text.tokens, text.is_cut) == (5, True)


def test_a_stop_token_counts_though_it_is_not_shown() -> None:
    text = SequenceText(NEW(True), stops=("END",))
    assert text.read((*ids("ab"), EOS), "stop") == ("ab", "stop")
    assert (text.tokens, text.is_cut) == (3, False)
