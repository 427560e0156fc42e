"""Token ids to text, one delta at a time, so that the pieces join to the text of the whole.

Text leaves as soon as it is certain: only the bytes of an unfinished character wait, three at
most. The cost of a token does not depend on how many came before. The module does not know
where ids come from, nor what a stop string is.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import Protocol

from tokenizers import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """The text of one sequence."""

    @abstractmethod
    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; ids that do not exist have none."""

    @abstractmethod
    def finish(self) -> str:
        """What an unfinished character leaves at the end: U+FFFD, or nothing."""


class NewDetokenizer(Protocol):
    """Makes a detokenizer."""

    def __call__(self, skip: bool, /, *, marks: bool = False) -> Detokenizer:
        """skip: special tokens have no text. marks: but those that calls of tools are written
        with."""


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies, where each token is a string of bytes.

    Equal to the tokenizer's own decoding for any ids: both replace what is not UTF-8 by one
    U+FFFD per maximal invalid part, as Unicode recommends.
    """

    def __init__(self, bytes_of: dict[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = _Utf8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        bytes_of = self._bytes_of
        return self._utf8.decode(b"".join([bytes_of.get(token, b"") for token in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ContextDetokenizer(Detokenizer):
    """For vocabularies of text (Metaspace, WordPiece), with or without byte fallback.

    How a token reads depends on the one before it (a space, a joint), so that one is decoded
    again as context. Byte tokens go through an incremental UTF-8 decoder. Equal to the
    tokenizer's own decoding of all that is valid UTF-8; an invalid run of byte tokens reads
    as U+FFFD per invalid part here, and per byte of the whole run there, which could not be
    known before the run has ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, byte_of: dict[int, bytes], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_of
        self._skipped = skipped
        self._context: list[int] = []
        self._context_length = 0
        """Characters of the context's own text."""
        self._utf8 = _Utf8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        shown = [token for token in token_ids if token not in self._skipped]
        pieces = []
        for is_bytes, group in groupby(shown, self._byte_of.__contains__):
            run = list(group)
            if is_bytes:
                pieces.append(self._utf8.decode(b"".join([self._byte_of[token] for token in run])))
            else:
                pieces.append(self.finish() + self._decode_behind_context(run))
            self._set_context(run[-1])
        return "".join(pieces)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _decode_behind_context(self, run: list[int]) -> str:
        return self._decode(self._context + run)[self._context_length :]

    def _set_context(self, token: int) -> None:
        self._context = [token]
        self._context_length = len(self._decode(self._context))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def detokenizers(tokenizer: Tokenizer, marks: Collection[int] = ()) -> NewDetokenizer:
    """The kind that fits the tokenizer's decoder; tables are built once, here.

    marks: special tokens that calls of tools are written with. Raises ValueError for a decoder
    that neither kind can follow.
    """
    kinds = _decoder_kinds(tokenizer)
    special = frozenset(
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    )
    skipped = {
        (True, False): special,
        (True, True): special.difference(marks),
        (False, False): frozenset[int](),
        (False, True): frozenset[int](),
    }
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        every = _bytes_of_tokens(tokenizer)
        tables = {
            without: {token: data for token, data in every.items() if token not in without}
            for without in set(skipped.values())
        }
        return lambda skip, /, *, marks=False: ByteDetokenizer(tables[skipped[skip, marks]])
    if "ByteLevel" in kinds:
        raise ValueError(f"a decoder of {sorted(kinds)} cannot be followed token by token")
    byte_of = _byte_tokens(tokenizer) if "ByteFallback" in kinds else {}
    return lambda skip, /, *, marks=False: ContextDetokenizer(
        tokenizer, byte_of, skipped[skip, marks]
    )


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """What a single token stands for behind another one; nothing for an id without a token."""
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        table = _bytes_of_tokens(tokenizer)
        return lambda token: table.get(token, b"")
    byte_of = _byte_tokens(tokenizer) if "ByteFallback" in kinds else {}
    special = tokenizer.get_added_tokens_decoder()

    def bytes_of(token: int) -> bytes:
        if token in byte_of:
            return byte_of[token]
        if token in special:
            return special[token].content.encode()
        alone = tokenizer.decode([token], skip_special_tokens=False)
        return tokenizer.decode([token, token], skip_special_tokens=False)[len(alone) :].encode()

    return bytes_of


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Type names of the decoder, or of its parts if it is a sequence."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet of printable characters, one for each byte.

    Printable bytes stand for themselves; the others take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _bytes_of_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of each token id; a token outside the alphabet stands for its own UTF-8."""
    alphabet = _byte_of_character()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            return token.encode()

    return {index: to_bytes(token) for token, index in tokenizer.get_vocab().items()}


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Ids of the tokens <0x00> to <0xFF>, as far as the vocabulary has them."""
    ids = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), bytes([byte])) for byte in range(256))
    return {index: data for index, data in ids if index is not None}
