"""What clients write is text: a special token in a message is not the one that ends a turn.

Marks follow the special tokens in all that a chat template is given. In the rendered text the
marked ones are then encoded as any other text, and those without a mark, which the template wrote,
as themselves. A text without marks is encoded as ever. The module knows no roles and no templates.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from tokenizers import Tokenizer


class SpecialTokens:
    """Special tokens of one tokenizer. Others that were added to its vocabulary, such as marks of
    tool calls, are text in any case."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._as_text = Tokenizer.from_str(tokenizer.to_str())
        self._as_text.encode_special_tokens = True
        added = [one for one in tokenizer.get_added_tokens_decoder().values() if one.special]
        self._anchor = next((one.content for one in added if not one.lstrip | one.rstrip), "")
        # The longest of those that begin at one place, as the tokenizer itself takes it.
        names = sorted((re.escape(one.content) for one in added), key=len, reverse=True)
        pattern = "|".join(names) or r"(?!)"
        self._mark = secrets.token_hex(8)
        """A client cannot know it."""
        self._special = re.compile(pattern)
        self._marked = re.compile(f"({pattern}){self._mark}")

    def mark(self, value: Any) -> Any:
        """A copy of what JSON can hold, with a mark behind each special token in its texts."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0] + self._mark, value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item) for item in value]
        return value

    def without_marks(self, text: str) -> str:
        return text.replace(self._mark, "")

    def count_marks(self, text: str) -> int:
        """Each stands for a token at least."""
        return text.count(self._mark)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that may have marks."""
        ids: list[int] = []
        as_text = cache(partial(encoded, self._as_text))
        for index, part in enumerate(self._marked.split(text)):
            if not part:
                continue
            part = self.without_marks(part)
            if index % 2:
                ids += as_text(part)
            elif index == 0 or not self._anchor:
                ids += encoded(self._tokenizer, part)
            else:  # Behind a token: some tokenizers begin a text with a space.
                ids += encoded(self._tokenizer, self._anchor + part)[1:]
        return ids


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text. Other threads run meanwhile: `Tokenizer.encode` has them wait."""
    batch = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = batch[0].ids
    return ids
