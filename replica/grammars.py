"""Tokens that a grammar allows: JSON schemas, regular expressions, choices, context-free grammars.

The matching is llguidance's, whose form of a grammar is what `Sampling.grammar` holds. The
module knows token ids, and no text but what the vocabulary spells.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from replica.sequence import Bits, Constraint, ConstraintFailure, TokenIds

LIMITS = LLParserLimits(step_max_items=5000)
"""Items of the parser for one mask: enough for schemas with hundreds of fields. The library's own
limit, ten times that, lets an ambiguous grammar hold every step of everybody up by 0.5 s."""


class Grammars:
    """Compiles grammars for one vocabulary, in a thread of its own: the step loop goes on, and
    the prompt is computed meanwhile, all but its last token."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer_json: as the tokenizers library serialises it. Raises ValueError for a
        tokenizer that cannot be followed."""
        eos = list(eos_token_ids) or None
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._words = allocate_token_bitmask(1, vocab_size)

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A sequence's own; what is wrong with a grammar shows when it is first used."""
        matcher = self._compiler.submit(
            LLMatcher, self._tokenizer, grammar, log_level=0, limits=LIMITS
        )
        return GrammarConstraint(matcher, self._words)


class GrammarConstraint(Constraint):
    """Follows one sequence. Where the grammar is complete, only its end is allowed."""

    def __init__(self, matcher: Future[LLMatcher], words: np.ndarray) -> None:
        """words: int32 [1, V/32], scratch."""
        self._matcher = matcher
        self._words = words
        self._read = 0

    def ready(self, timeout_s: float = 0.0) -> bool:
        """As of every constraint."""
        if timeout_s:
            wait([self._matcher], timeout_s)
        return self._matcher.done()

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        """As of every constraint. Each token is read once, so a preemption costs nothing."""
        matcher = self._matcher.result()
        matcher.consume_tokens(output_ids[self._read :].tolist())
        self._read = len(output_ids)
        if matcher.is_error():
            raise ConstraintFailure(matcher.get_error())
        fill_next_token_bitmask(matcher, self._words)
        if matcher.is_error():
            raise ConstraintFailure(matcher.get_error())
        bits[:] = self._words.view(np.uint8)[0, : len(bits)]
