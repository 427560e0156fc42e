"""What must hold of every answer, whatever was asked and whoever shared the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from replica.messages import FinishReason, Output, Submit, TokenLogprobs

MAX_FAILURES = 100
"""More are counted, but not kept."""
ROUNDING = 1e-3
"""A log probability may be so far above 0."""


@dataclass
class Record:
    """What a whole run found, over all engines that it started."""

    seed: int
    phase: str = ""
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    """The longest one between a stream's tokens, for each long prompt beside it."""
    costs: list[tuple[float, float]] = field(default_factory=list)
    """(predicted, real) milliseconds of steps with one prompt chunk."""
    compiled: list[str] = field(default_factory=list)
    """Kernels compiled after an engine's start."""

    def cost_errors(self, noise_ms: float = 0.0) -> list[float]:
        """|predicted - real| / real of `costs`. A miss within the noise is none."""
        misses = [(abs(predicted - real), real) for predicted, real in self.costs]
        return [miss / real if miss > noise_ms else 0.0 for miss, real in misses]

    @property
    def full(self) -> bool:
        return self.num_failures >= MAX_FAILURES

    def fail(self, what: str) -> None:
        if not self.full:
            self.failures.append(f"{self.phase}, seed {self.seed}: {what}")
        self.num_failures += 1


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and what came of it so far."""

    submit: Submit
    refused: bool = False
    """It must end with an error, and bring nothing."""
    aborted: bool = False
    """It may end at any time."""
    ids: list[int] = field(default_factory=list)
    """Without those of an earlier attempt."""
    reason: FinishReason | None = None

    @property
    def prior(self) -> tuple[int, ...]:
        return self.submit.prior_output_ids


class Checks:
    """Knows what was asked, and compares every output with it."""

    def __init__(
        self, record: Record, vocab_size: int, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.alive: dict[str, Asked] = {}
        self._record = record
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids

    def expect(self, submit: Submit, *, refused: bool = False) -> Asked:
        asked = self.alive[submit.request_id] = Asked(submit, refused)
        self._record.requests += 1
        return asked

    def see(self, output: Output) -> None:
        asked = self.alive.get(output.request_id)
        if asked is None:
            self._record.fail(f"nobody waits for {output}")
            return
        for complaint in self._complaints(asked, output):
            self._record.fail(f"{complaint}: {_brief(output)} of {_brief(asked.submit)}")
        asked.ids += output.token_ids
        self._record.tokens += len(output.token_ids)
        if output.finish_reason is not None:
            asked.reason = output.finish_reason
            del self.alive[output.request_id]

    def _complaints(self, asked: Asked, output: Output) -> Iterator[str]:
        yield from self._of_tokens(asked, output)
        yield from self._of_logprobs(asked, output)
        if output.finish_reason is not None:
            yield from self._of_end(asked, output)
        if not 0 <= output.cached_tokens <= max(0, len(asked.submit.prompt_ids + asked.prior) - 1):
            yield "more cached tokens than it has"
        if not (math.isfinite(output.gpu_s) and output.gpu_s >= 0):
            yield "no time of a device"

    def _of_tokens(self, asked: Asked, output: Output) -> Iterator[str]:
        sampling, stops = asked.submit.sampling, self._stops(asked)
        if not asked.refused and output.offset != len(asked.prior) + len(asked.ids):
            yield "a gap or a repeat"
        seen = [*asked.prior, *asked.ids]
        for token in output.token_ids:
            if not 0 <= token < self._vocab_size:
                yield f"no token of the vocabulary, {token}"
            if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
                yield f"a token that is not allowed, {token}"
            if len(seen) > len(asked.prior) and seen[-1] in stops:
                yield "tokens behind a stop token"
            if token in stops and len(seen) < sampling.min_tokens:
                yield "a stop token before min_tokens"
            seen.append(token)
            if any(tuple(seen[-len(bad) :]) == bad for bad in sampling.bad_token_ids):
                yield "a bad sequence of tokens"

    def _of_logprobs(self, asked: Asked, output: Output) -> Iterator[str]:
        sampling = asked.submit.sampling
        wanted = 0 if sampling.logprobs is None else len(output.token_ids)
        if len(output.logprobs) != wanted:
            yield f"{len(output.logprobs)} log probabilities in place of {wanted}"
        first = bool(output.token_ids) and not asked.ids and not asked.prior
        scored = first and sampling.prompt_logprobs is not None
        wanted = len(asked.submit.prompt_ids) - 1 if scored else 0
        if len(output.prompt_logprobs) != wanted:
            yield f"{len(output.prompt_logprobs)} of the prompt in place of {wanted}"
        told = [(entry, sampling.logprobs) for entry in output.logprobs]
        told += [(entry, sampling.prompt_logprobs) for entry in output.prompt_logprobs]
        if not all(self._sound(entry, alternatives or 0) for entry, alternatives in told):
            yield "an unsound log probability"

    def _sound(self, entry: TokenLogprobs, alternatives: int) -> bool:
        values = (entry.logprob, *entry.top_logprobs)
        return (
            len(entry.top_ids) == len(entry.top_logprobs) == alternatives
            and all(math.isfinite(value) and value <= ROUNDING for value in values)
            and list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
            and all(0 <= token < self._vocab_size for token in entry.top_ids)
        )

    def _of_end(self, asked: Asked, output: Output) -> Iterator[str]:
        ids, reason = [*asked.ids, *output.token_ids], output.finish_reason
        stopped = bool(ids) and ids[-1] in self._stops(asked)
        right = {
            "error": asked.refused and not ids,
            "abort": asked.aborted,
            "stop": stopped,
            "length": not stopped and len(ids) == self._limit(asked),
        }
        if asked.refused and reason != "error":
            yield "answered, where it is to be refused"
        elif not right.get(str(reason), False):
            yield f"ended by {reason} after {len(ids)} of {self._limit(asked)} tokens"

    def _stops(self, asked: Asked) -> tuple[int, ...]:
        sampling = asked.submit.sampling
        return sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)

    def _limit(self, asked: Asked) -> int:
        """Tokens of this attempt that end it."""
        prompt = len(asked.submit.prompt_ids)
        whole = min(asked.submit.sampling.max_tokens, self._max_model_len - prompt)
        return max(0, whole - len(asked.prior))


def _brief(message: object) -> str:
    """A prompt may have any length."""
    text = repr(message)
    return text if len(text) <= 600 else f"{text[:200]} ... {text[-400:]}"
