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
from tokenizers import Tokenizer

from replica.sampling.vocabulary import without_spellable
from replica.scheduling.sequence import Bits, Constraint, ConstraintFailure, TokenIds

LIMITS = LLParserLimits(step_max_items=5000)
"""Most parser items for one mask: enough for schemas with hundreds of fields. With the library's
own limit, ten times as many, an ambiguous grammar can delay a step of everybody by 0.5 s."""


class Grammars:
    """Compiles grammars for one vocabulary, in a thread of its own: the step loop goes on, and
    the prompt is computed meanwhile, all but its last token."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer_json: as the tokenizers library serialises it; it may have tokens that the
        model has not, which are never allowed. vocab_size: of the model. Raises ValueError for a
        tokenizer that cannot be followed."""
        eos = [token for token in eos_token_ids if token < vocab_size] or None
        # The library has the tokenizer spell what a grammar leaves no choice about: with tokens
        # that the model has not, and with special ones where text has their letters.
        tokenizer_json = without_spellable(tokenizer_json, vocab_size)
        known = max(Tokenizer.from_str(tokenizer_json).get_vocab().values()) + 1
        followed = max(vocab_size, known)
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=followed, eos_token=eos)
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._words = allocate_token_bitmask(1, followed)
        self._vocab_size = vocab_size

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A sequence's own; what is wrong with a grammar shows when it is first used."""
        matcher = self._compiler.submit(
            LLMatcher, self._tokenizer, grammar, log_level=0, limits=LIMITS
        )
        return GrammarConstraint(matcher, self._words, self._vocab_size)


class GrammarConstraint(Constraint):
    """Follows one sequence. Where the grammar is complete, only its end is allowed."""

    def __init__(self, matcher: Future[LLMatcher], words: np.ndarray, vocab_size: int) -> None:
        """words: int32 [1, W/32], scratch, where W is at least the vocabulary."""
        self._matcher = matcher
        self._beyond = -vocab_size % 8
        """Bits at the end of a mask that stand for no token."""
        self._words = words
        self._read = 0

    def ready(self, timeout_s: float = 0.0) -> bool:
        """See `Constraint`."""
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
        bits[-1] &= 0xFF >> self._beyond
        if not bits.any():
            raise ConstraintFailure("the model has no token that may follow")
