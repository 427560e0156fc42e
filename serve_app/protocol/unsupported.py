"""Parameters that exist elsewhere and not here, with the values that ask for nothing.

A request that sets one of them to a neutral value is served. Any other value would change the
answer, so it is refused by name instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Table: TypeAlias = Mapping[str, tuple[object, ...]]
"""Name to neutral values; null is neutral for all."""

OTHERS: Table = {
    "continue_final_message": (False,),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "regex": (),
    "structural_tag": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""What other servers know beside OpenAI's."""

CHAT: Table = {
    **OTHERS,
    "add_generation_prompt": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}

COMPLETION: Table = {**OTHERS, "suffix": ("",)}

MESSAGE: Table = {"function_call": (), "audio": ()}

IGNORED = frozenset(CHAT.keys() | COMPLETION.keys()) | {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "verbosity",
}
"""Fields that need no word in the log: neutral above, or without effect on the answer."""


def first_unsupported(fields: Mapping[str, object], table: Table) -> str | None:
    """The first field whose value is not neutral."""
    for name, value in fields.items():
        if name in table and value is not None and not _is_neutral(value, table[name]):
            return name
    return None


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Equality as JSON has it: false is not 0."""
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )
