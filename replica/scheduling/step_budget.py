"""How much of a step prompt chunks may take, in tokens and in time.

Time, because 256 tokens behind a 32k context cost as much attention as thousands at the
beginning. A budget counted in tokens alone would let a long prompt stall everybody else's decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CostModel:
    """ms of a step with prompt chunks = fixed_ms + token_ms * tokens + key_ms * keys
    + pair_ms * pairs, and floor_ms at least.

    tokens: that the step computes. keys: of all rows, after the step. pairs: (query, key) pairs
    of all rows. Each has a bound of its own in the hardware: reading the weights, products,
    reading the KV pool, attention's arithmetic. The floor is the host's time to launch all of
    it, which passes beside the device's. Zero costs nothing in time.
    """

    fixed_ms: float = 0.0
    token_ms: float = 0.0
    key_ms: float = 0.0
    pair_ms: float = 0.0
    floor_ms: float = 0.0
    score_ms: float = 0.0
    """Added for each prompt token whose log probabilities are returned: its logits over the whole
    vocabulary, and the search for the best."""

    @property
    def with_scores(self) -> CostModel:
        """The same, where every token is scored."""
        return replace(self, token_ms=self.token_ms + self.score_ms)

    def ms(self, start: int, count: int) -> float:
        """What a chunk of `count` tokens whose first has position `start` adds to a step."""
        pairs = count * (start + count / 2)
        return self.token_ms * count + self.key_ms * (start + count) + self.pair_ms * pairs

    def base_ms(self, rows: int, keys: int) -> float:
        """Milliseconds of a step of `rows` decode rows that together attend to `keys` keys."""
        return self.fixed_ms + self.token_ms * rows + (self.key_ms + self.pair_ms) * keys

    def tokens_within(self, start: int, ms: float) -> int:
        """The longest chunk from position `start` that adds at most `ms`; may be 0."""
        left = ms - self.key_ms * start
        if left <= 0:
            return 0
        linear = self.token_ms + self.key_ms + self.pair_ms * start
        if ms == math.inf or linear + self.pair_ms == 0:
            return 2**31
        # The positive root of pair/2 * n^2 + linear * n - left, in the form that does not cancel.
        return int(2 * left / (linear + math.sqrt(linear * linear + 2 * self.pair_ms * left)))


@dataclass(slots=True)
class StepBudget:
    """The room that one step has left for prompt chunks, in tokens and in time."""

    tokens: int
    ms: float
    cost: CostModel

    def take(self, start: int, wanted: int, *, scored: bool = False) -> int:
        """Tokens granted to a chunk at `start`, at most `wanted`; one at least while any time
        is left, so that a prompt goes on however much its context costs."""
        if self.ms <= 0:
            return 0
        cost = self.cost.with_scores if scored else self.cost
        count = min(wanted, self.tokens, max(1, cost.tokens_within(start, self.ms)))
        if count:
            self.tokens -= count
            self.ms -= cost.ms(start, count)
        return count

    def split_off(self, share: float) -> StepBudget:
        """Move `share` of it into a budget of its own."""
        part = StepBudget(int(self.tokens * share), self.ms * share, self.cost)
        self.tokens -= part.tokens
        self.ms -= 0.0 if part.ms == math.inf else part.ms
        return part

    def add(self, rest: StepBudget) -> None:
        """Take back what is left of a part."""
        self.tokens += rest.tokens
        self.ms += 0.0 if rest.ms == math.inf else max(0.0, rest.ms)
