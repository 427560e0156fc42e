"""How much prompt work fits into one step.

The cost of a prompt chunk grows with its tokens and with the context that they attend to: 256
tokens behind 32k of context cost as much attention as thousands at the beginning. A budget
counted in tokens alone would let a long prompt stall everybody else's decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """ms = token_ms * tokens + pair_ms * (query, key) pairs. Zero costs nothing in time."""

    token_ms: float = 0.0
    pair_ms: float = 0.0

    def ms(self, start: int, count: int) -> float:
        """Time of a chunk of `count` tokens whose first has position `start`."""
        return self.token_ms * count + self.pair_ms * count * (start + count / 2)

    def tokens_within(self, start: int, ms: float) -> int:
        """The longest chunk from position `start` that takes at most `ms`; may be 0."""
        linear = self.token_ms + self.pair_ms * start
        if ms == math.inf or linear + self.pair_ms == 0:
            return 2**31
        if self.pair_ms == 0:
            return int(ms / linear)
        # The positive root of pair/2 * n^2 + linear * n - ms, in the form that does not cancel.
        return int(2 * ms / (linear + math.sqrt(linear * linear + 2 * self.pair_ms * ms)))


@dataclass(slots=True)
class Budget:
    """What is left of one step for prompt chunks, in tokens and in time."""

    tokens: int
    ms: float
    cost: CostModel

    def take(self, start: int, wanted: int) -> int:
        """Tokens granted to a chunk at `start`, at most `wanted`; one at least while any time
        is left, so that a prompt goes on however much its context costs."""
        if self.ms <= 0:
            return 0
        count = min(wanted, self.tokens, max(1, self.cost.tokens_within(start, self.ms)))
        self.tokens -= count
        self.ms -= self.cost.ms(start, count)
        return count

    def split_off(self, share: float) -> Budget:
        """Move `share` of it into a budget of its own."""
        part = Budget(int(self.tokens * share), self.ms * share, self.cost)
        self.tokens -= part.tokens
        self.ms -= 0.0 if part.ms == math.inf else part.ms
        return part

    def add(self, rest: Budget) -> None:
        """Take back what is left of a part."""
        self.tokens += rest.tokens
        self.ms += 0.0 if rest.ms == math.inf else max(0.0, rest.ms)
