"""Short names for the beginnings of a prompt, for a router that never sees prompts.

A tenant's cache domain is part of each name: prompts of two tenants that share nothing have
nothing in common. The module knows neither router nor replica.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from router.prefixes import FIRST

MOST = 12
"""Prefixes named; the longest has 128k tokens."""
BYTES = 7
"""Of a name: it must fit into a signed 64-bit number."""


def prefix_hashes(prompt_ids: Sequence[int], cache_salt: str) -> tuple[int, ...]:
    """Of the first 64, 128, 256, ... ids. The last id of a prompt is never found in a cache."""
    names: list[int] = []
    hasher = hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=BYTES)
    hashed, length = 0, FIRST
    while length < len(prompt_ids) and len(names) < MOST:
        hasher.update(array("q", prompt_ids[hashed:length]).tobytes())
        names.append(int.from_bytes(hasher.copy().digest(), "big"))
        hashed, length = length, 2 * length
    return tuple(names)
