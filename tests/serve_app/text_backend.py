"""TEXT: a backend that emits what its prompt says, so reply texts and token borders are known.

The vocabulary is the 256 bytes and a few special tokens, so a text is its own UTF-8 bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replica.messages import FinishReason, TokenLogprobs
from serve_app.protocol.backend import (
    Delta,
    EngineFailure,
    Enough,
    Generation,
    Refused,
    ServedModel,
    Unavailable,
)

EOS = "</s>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('I refuse: secret') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)
"""Roles and openings leave no trace, so the reply is the conversation's own text."""
MODEL = ServedModel("text", 1_700_000_000, vocab_size=300, eos_token_ids=(256,), max_model_len=200)
"""The model has more logits than the tokenizer has tokens."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Id b is the byte b; 256 is </s>, 257 is <pad>."""
    alphabet = _gpt2_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token="<pad>", chat_template=TEMPLATE
    )


def _gpt2_alphabet() -> dict[str, int]:
    """Found by asking the library which character it writes for each byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = {}
    for start in range(0, 0x800, 16):  # every byte occurs in the UTF-8 of these, or is invalid
        text = "".join(chr(point) for point in range(start, start + 16))
        mapped = "".join(piece for piece, _ in level.pre_tokenize_str(text))
        characters.update(zip(mapped, text.encode(), strict=True))
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(characters))
    return characters | dict(
        zip(unused, sorted(set(range(256)) - set(characters.values())), strict=True)
    )


def logprob(token_id: int) -> float:
    return -(token_id % 50) / 10 - 0.1


def told(token_ids: Sequence[int], alternatives: int | None) -> tuple[TokenLogprobs, ...]:
    """Of each token something else, so that no two can be mixed up."""
    if alternatives is None:
        return ()
    numbers = range(alternatives)
    return tuple(
        TokenLogprobs(
            logprob(token),
            tuple((token + number) % 256 for number in numbers),
            tuple(logprob(token) - number for number in numbers),
        )
        for token in token_ids
    )


@dataclass
class TextBackend:
    """Emits the prompt's own ids, `per_delta` at a time, and EOS after them.

    What goes wrong is set by the fields; each sequence that ended is counted in `outcomes`.
    """

    model_: ServedModel = MODEL
    per_delta: int = 1
    delay_s: float = 0.0
    """Time before each delta."""
    settle_s: float = 0.0
    """Time of the accounting behind the last delta."""
    fail_after: int | None = None
    """Deltas before the engine fails."""
    end_silently_after: int | None = None
    """Deltas before the sequence ends with no reason at all."""
    refusal: Refused | None = None
    unavailable: Unavailable | None = None
    crash_after: int | None = None
    """Deltas before the backend raises what nobody has planned."""
    cached_tokens: int = 0
    skip_until: str = ""
    """Where in its prompt the answer begins."""

    generations: list[Generation] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    needed: list[int | None] = field(default_factory=list)
    """Tokens of the sequences that were stopped, as their consumers said."""
    running: int = 0
    deltas_sent: int = 0

    def reset(self) -> None:
        """As new, in place: an application holds on to it."""
        vars(self).update(vars(TextBackend()))

    async def check_ready(self) -> None:
        await self.model()

    async def model(self) -> ServedModel:
        if self.unavailable is not None:
            raise self.unavailable
        return self.model_

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        self.generations.append(generation)
        self.running += 1
        outcome = "cancelled"
        try:
            for number, delta in enumerate(self._deltas(generation)):
                await asyncio.sleep(self.delay_s)
                self._maybe_fail(number)
                if number == self.end_silently_after:
                    outcome = "failed"
                    return
                self.deltas_sent += 1
                yield delta
            await asyncio.sleep(self.settle_s)
            outcome = "succeeded"
        except Enough as enough:
            outcome = "enough"
            self.needed.append(enough.tokens)
            raise
        except (Refused, EngineFailure, RuntimeError):
            outcome = "failed"
            raise
        finally:
            self.running -= 1
            self.outcomes[outcome] += 1

    def _maybe_fail(self, number: int) -> None:
        if self.refusal is not None and number == 0:
            raise self.refusal
        if number == self.crash_after:
            raise RuntimeError("secret internals")
        if number == self.fail_after:
            raise EngineFailure("a CUDA error with internals")

    def _deltas(self, generation: Generation) -> list[Delta]:
        ids, reason = self._until_stop(generation)
        borders = range(0, len(ids), self.per_delta)
        sampling = generation.sampling
        of_prompt = told(generation.prompt_ids[1:], sampling.prompt_logprobs)
        return [
            Delta(
                token_ids=ids[start : start + self.per_delta],
                finish_reason=reason if start == borders[-1] else None,
                cached_tokens=self.cached_tokens,
                logprobs=told(ids[start : start + self.per_delta], sampling.logprobs),
                prompt_logprobs=() if start else of_prompt,
            )
            for start in borders
        ]

    def _until_stop(self, generation: Generation) -> tuple[tuple[int, ...], FinishReason]:
        sampling = generation.sampling
        eos = self.model_.eos_token_ids
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        ids = (*self._said(generation.prompt_ids), eos[0])
        while len(ids) < sampling.max_tokens:
            ids += ids
        ids = ids[: sampling.max_tokens]
        for count, token in enumerate(ids, start=1):
            if token in stops and count > sampling.min_tokens:
                return ids[:count], "stop"
        return ids, "length"

    def _said(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not self.skip_until:
            return prompt_ids
        return prompt_ids[bytes(prompt_ids).index(self.skip_until.encode()) :]
