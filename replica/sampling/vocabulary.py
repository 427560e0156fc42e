"""Handles tokenizers that have more tokens than their model.

The module knows a tokenizer as the JSON that the tokenizers library makes of it.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, TypeAlias

Vocab: TypeAlias = "dict[str, int] | list[list[Any]]"


def without_absent(tokenizer_json: str, vocab_size: int) -> str:
    """The tokenizer without the added tokens that a model of `vocab_size` has not: what they stand
    for is spelled by others."""
    state = json.loads(tokenizer_json)
    _drop_absent(state, vocab_size)
    return json.dumps(state)


def without_spellable(tokenizer_json: str, vocab_size: int) -> str:
    """Likewise, and with special tokens that no text spells: whoever writes `<|im_end|>` means
    these letters. They keep their ids, by which a grammar may still ask for them."""
    state = json.loads(tokenizer_json)
    _drop_absent(state, vocab_size)
    # Text is anything that a client may write, so the new names are nothing that it can know.
    secret = secrets.token_hex(8)
    special = [one for one in state["added_tokens"] if one["special"]]
    names = {one["content"]: f"<{secret}:{one['id']}>" for one in special}
    for one in special:
        one["content"] = names[one["content"]]
    state["model"]["vocab"] = _renamed(state["model"]["vocab"], names)
    return json.dumps(state)


def _drop_absent(state: dict[str, Any], vocab_size: int) -> None:
    state["added_tokens"] = [one for one in state["added_tokens"] if one["id"] < vocab_size]


def _renamed(vocab: Vocab, names: dict[str, str]) -> Vocab:
    """Of a Unigram model it is a list of pieces with scores."""
    if isinstance(vocab, dict):
        return {names.get(text, text): token for text, token in vocab.items()}
    return [[names.get(text, text), score] for text, score in vocab]
