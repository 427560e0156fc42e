from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from serve_app.text.detokenizer import ByteDetokenizer, Detokenizer, NewDetokenizer, detokenizers
from tests.serve_app.text_backend import byte_tokenizer
from tests.serve_app.tokenizers_made import (
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

ALPHABET = (
    "a",
    "Z",
    " ",
    "\n",
    "é",
    "日",
    "本",
    "한",
    "국",
    "👩\u200d👩\u200d👧",
    "e\u0301",
    "🏳️\u200d🌈",
    "\ufffd",
)


def byte_level() -> Tokenizer:
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens(["<é>", "<a b>", "日本"])
    tokenizer.add_tokens(["Ġx", "two words", "ñ", AddedToken("<n>", normalized=False)])
    return tokenizer


BYTE_LEVEL = byte_level()
METASPACE = metaspace_tokenizer()
WORDPIECE = wordpiece_tokenizer()
SIZE = BYTE_LEVEL.get_vocab_size()


def streamed(new: NewDetokenizer, groups: Sequence[Sequence[int]], skip: bool = True) -> list[str]:
    """The text of each delta; the last one is what `finish` gave."""
    detokenizer = new(skip)
    return [detokenizer.push(group) for group in groups] + [detokenizer.finish()]


def grouped(ids: Sequence[int], draw: random.Random) -> list[Sequence[int]]:
    groups, start = [], 0
    while start < len(ids):
        end = start + draw.randint(1, 5)
        groups.append(ids[start:end])
        start = end
    return groups


@given(st.lists(st.integers(0, SIZE + 2), max_size=40), st.booleans(), st.randoms())
def test_byte_level_deltas_join_to_the_one_shot_text_for_any_ids(
    ids: list[int], skip: bool, draw: random.Random
) -> None:
    """C13. Invalid bytes, added tokens and ids that do not exist included."""
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(detokenizers(BYTE_LEVEL), grouped(ids, draw), skip)) == expected


def test_real_text_is_never_broken() -> None:
    """C13, R08: 10,000 random texts, one byte a token, in random groups."""
    draw = random.Random(0)
    new = detokenizers(BYTE_LEVEL)
    for _ in range(10_000):
        text = "".join(draw.choices(ALPHABET, k=draw.randint(1, 12)))
        deltas = streamed(new, grouped(list(text.encode()), draw))
        assert "".join(deltas) == text
        assert deltas[-1] == ""


@given(st.lists(st.sampled_from([*ALPHABET, "Hello", "world", " jury"])), st.randoms())
def test_metaspace_with_byte_fallback_joins_to_the_one_shot_text(
    parts: list[str], draw: random.Random
) -> None:
    """C13, R08, R10."""
    ids = METASPACE.encode("".join(parts), add_special_tokens=False).ids
    deltas = streamed(detokenizers(METASPACE), grouped(ids, draw))
    assert "".join(deltas) == METASPACE.decode(ids)
    assert deltas[-1] == ""


@given(st.lists(st.sampled_from([1, 2, *range(259, 259 + 16)])), st.booleans(), st.randoms())
def test_metaspace_joins_for_any_order_of_text_tokens(
    ids: list[int], skip: bool, draw: random.Random
) -> None:
    """R10. Specials in the middle, and lone spaces at the beginning, included."""
    expected = METASPACE.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(detokenizers(METASPACE), grouped(ids, draw), skip)) == expected


def test_metaspace_keeps_spaces_token_by_token() -> None:
    """R10. Token by token decoding gives 'Helloworld'."""
    ids = METASPACE.encode("Hello world").ids
    assert "".join(METASPACE.decode([token]) for token in ids) == "Helloworld"
    assert streamed(detokenizers(METASPACE), [[token] for token in ids]) == ["Hello", " world", ""]


@given(st.lists(st.integers(0, 7)), st.randoms())
def test_wordpiece_joins_to_the_one_shot_text(ids: list[int], draw: random.Random) -> None:
    expected = WORDPIECE.decode(ids)
    assert "".join(streamed(detokenizers(WORDPIECE), grouped(ids, draw))) == expected


def test_smollm2_joins_to_the_one_shot_text(smollm2: PreTrainedTokenizerFast) -> None:
    """C13, R08 on the tokenizer of a real model."""
    new = detokenizers(smollm2.backend_tokenizer)
    draw = random.Random(1)
    texts = [
        "Hello world, naïve café! 你好 世界 안녕하세요 👩\u200d👩\u200d👧",
        "  def f(x):\n\treturn x  \n",
        "",
    ]
    for text in texts:
        ids = smollm2.encode(text, add_special_tokens=False)
        assert "".join(streamed(new, grouped(ids, draw))) == text
    for _ in range(300):
        ids = [draw.randrange(len(smollm2)) for _ in range(30)]
        for skip in (True, False):
            expected = smollm2.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert "".join(streamed(new, grouped(ids, draw), skip)) == expected


FFFD = list("\ufffd".encode())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
@pytest.mark.parametrize("data", [FFFD * 700, [0xFF] * 2000, [0xC3] * 2000])
def test_replacement_characters_do_not_wait(tokenizer: Tokenizer, data: list[int]) -> None:
    """C14. U+FFFD that is in the text, and U+FFFD that stands for what is not UTF-8."""
    base = 0 if tokenizer is BYTE_LEVEL else 3
    ids = [base + byte for byte in data]
    deltas = streamed(detokenizers(tokenizer), [[token] for token in ids])
    assert "".join(deltas) == tokenizer.decode(ids)
    waits = "".join("x" if delta else " " for delta in deltas[:-1]).split("x")
    assert max(map(len, waits)) <= 3


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """C14."""
    base = 0 if tokenizer is BYTE_LEVEL else 3
    detokenizer = detokenizers(tokenizer)(True)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for byte in FFFD:
                detokenizer.push([base + byte])
        return time.perf_counter() - start

    first = min(seconds(100) for _ in range(5))
    seconds(10_000)
    assert min(seconds(100) for _ in range(5)) <= 2 * first


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
def test_an_unfinished_character_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    """C14."""
    base = 0 if tokenizer is BYTE_LEVEL else 3
    ids = [base + byte for byte in "日".encode()[:2]]
    assert streamed(detokenizers(tokenizer), [ids]) == ["", "\ufffd"]


def test_invalid_bytes_do_not_take_their_neighbours_along() -> None:
    """Where the library gives up a whole run of byte tokens, its valid characters stay."""
    run = [3 + byte for byte in "日".encode() + b"\xff"]
    assert METASPACE.decode(run) == "\ufffd" * 4
    assert "".join(streamed(detokenizers(METASPACE), [run])) == "日\ufffd"


def test_an_unfinished_character_is_flushed_before_a_word() -> None:
    """C14."""
    ids = [3 + "日".encode()[0], METASPACE.token_to_id("▁world")]
    assert streamed(detokenizers(METASPACE), [[token] for token in ids]) == ["", "\ufffd world", ""]


def test_a_decoder_that_cannot_be_followed_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("  ", " ")])
    with pytest.raises(ValueError, match="Replace"):
        detokenizers(tokenizer)


def test_a_fused_byte_level_decoder_is_followed_by_bytes() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert isinstance(detokenizers(tokenizer)(True), ByteDetokenizer)


@pytest.mark.parametrize("made", [byte_level, metaspace_tokenizer], ids=["bytes", "metaspace"])
def test_marks_of_calls_are_shown_where_other_special_tokens_are_not(
    made: Callable[[], Tokenizer],
) -> None:
    tokenizer = made()
    tokenizer.add_special_tokens(["[CALLS]"])
    mark, end = tokenizer.token_to_id("[CALLS]"), tokenizer.token_to_id("</s>")
    new = detokenizers(tokenizer, [mark])
    ids = [mark, *tokenizer.encode("a in", add_special_tokens=False).ids, end]

    def text(detokenizer: Detokenizer) -> str:
        return "".join(detokenizer.push([one]) for one in ids) + detokenizer.finish()

    assert text(new(True, marks=True)).replace(" ", "") == "[CALLS]ain"
    assert text(new(True)).replace(" ", "") == "ain"
    for marks in (True, False):
        assert text(new(False, marks=marks)).replace(" ", "") == "[CALLS]ain</s>"
