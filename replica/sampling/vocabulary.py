"""Handles tokenizers that have more tokens than their model.

The module knows a tokenizer as the JSON that the tokenizers library makes of it.
"""

from __future__ import annotations

import json


def without_absent(tokenizer_json: str, vocab_size: int) -> str:
    """The tokenizer without the added tokens that a model of `vocab_size` has not: what they stand
    for is spelled by others."""
    state = json.loads(tokenizer_json)
    state["added_tokens"] = [one for one in state["added_tokens"] if one["id"] < vocab_size]
    return json.dumps(state)
