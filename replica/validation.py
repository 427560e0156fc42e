"""Checks every command that reaches an engine, whoever sent it.

Types are the wire's business (`replica.messages`); here is what their values may be, as far as
tables, arithmetic and other sequences depend on them. One message can then refuse itself only.
"""

from __future__ import annotations

from collections.abc import Collection

from replica.messages import MAX_BIASES, MAX_LOGPROBS, Sampling, Submit
from replica.scheduling.sequence import MAX_STOP_IDS

MAX_GRAMMAR_CHARS = 4 * 1024 * 1024
"""Longest grammar, in characters. A front end allows far less."""
MAX_BAD_SEQUENCES = 256
MAX_BAD_TOKENS = 16 * 1024
"""Most tokens in all bad sequences together: each is compared in every step."""
MAX_COUNT = 2**30
"""Largest number of tokens: the sum of two still fits into int32."""
MAX_CHANGE = 1e6
"""Largest change of a logit, and highest temperature: far below the range of float32."""


def check_submit(submit: Submit, vocab_size: int, max_model_len: int) -> None:
    """Raises ValueError, with a sentence for the client, if it can never run."""
    _check_range("band", submit.band, 0, 255)
    num_prompt, sampling = len(submit.prompt_ids), submit.sampling
    if num_prompt == 0:
        raise ValueError("the prompt is empty")
    if num_prompt >= max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt} tokens; the context holds {max_model_len}, "
            "one of them for the answer"
        )
    _check_numbers(sampling)
    if len(submit.prior_output_ids) > sampling.max_tokens:
        raise ValueError("more output came before than max_tokens allows")
    _check_widths(sampling, vocab_size)
    biased = [token for token, _ in sampling.logit_bias]
    _check_ids(
        vocab_size,
        submit.prompt_ids,
        submit.prior_output_ids,
        sampling.stop_token_ids,
        sampling.allowed_token_ids or (),
        biased,
        *sampling.bad_token_ids,
    )
    if len(set(biased)) < len(biased):
        raise ValueError("a token is biased twice")


def check_stops(sampling: Sampling, stop_ids: Collection[int]) -> None:
    """stop_ids: all that end the sequence, the model's own included. Raises ValueError."""
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"at most {MAX_STOP_IDS} stop tokens, not {len(stop_ids)}")
    allowed = sampling.allowed_token_ids
    held_back = stop_ids if sampling.min_tokens else ()
    if allowed is not None and not set(allowed).difference(held_back):
        raise ValueError("allowed_token_ids leaves no token to sample")


def _check_numbers(sampling: Sampling) -> None:
    _check_range("max_tokens", sampling.max_tokens, 1, MAX_COUNT)
    _check_range("min_tokens", sampling.min_tokens, 0, MAX_COUNT)
    _check_range("top_k", sampling.top_k, 0, MAX_COUNT)
    _check_range("seed", sampling.seed, 0, 2**64 - 1)
    _check_range("choice", sampling.choice, 0, MAX_COUNT)
    _check_range("temperature", sampling.temperature, 0.0, MAX_CHANGE)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 1 / MAX_CHANGE, MAX_CHANGE)
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        *(("a bias", bias) for _, bias in sampling.logit_bias),
    ):
        _check_range(name, value, -MAX_CHANGE, MAX_CHANGE)


def _check_widths(sampling: Sampling, vocab_size: int) -> None:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} biased tokens, not {len(sampling.logit_bias)}")
    for asked in (sampling.logprobs, sampling.prompt_logprobs):
        if not 0 <= (asked or 0) <= MAX_LOGPROBS:
            raise ValueError(f"at most {MAX_LOGPROBS} alternatives of a token")
    if len(sampling.allowed_token_ids or ()) > vocab_size:
        raise ValueError("allowed_token_ids are more than there are tokens")
    bad = sampling.bad_token_ids
    if not all(bad):
        raise ValueError("a bad sequence of tokens is empty")
    if len(bad) > MAX_BAD_SEQUENCES or sum(map(len, bad)) > MAX_BAD_TOKENS:
        raise ValueError(
            f"at most {MAX_BAD_SEQUENCES} bad sequences, of {MAX_BAD_TOKENS} tokens together"
        )
    if sampling.grammar and sampling.min_tokens:
        raise ValueError("min_tokens cannot be combined with a grammar, which ends the answer")
    if len(sampling.grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar is larger than {MAX_GRAMMAR_CHARS} characters")


def _check_ids(vocab_size: int, *named: Collection[int]) -> None:
    if any(ids and not (min(ids) >= 0 and max(ids) < vocab_size) for ids in named):
        raise ValueError(f"token ids must lie in [0, {vocab_size})")


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # which is how NaN is, too
        raise ValueError(f"{name} must lie between {least} and {most}, not {value}")
