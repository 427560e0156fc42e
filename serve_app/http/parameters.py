"""From a checked request to the sampling of one sequence: what depends on model and prompt.

`ServedModel.vocab_size` is here the smaller of the model's and the tokenizer's, so that each
id below it has both a logit and a text. The module knows neither HTTP nor text.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from replica.messages import Sampling
from serve_app.protocol.backend import ServedModel
from serve_app.protocol.errors import invalid, too_long
from serve_app.protocol.limits import Limits
from serve_app.protocol.requests import GenerationRequest

MAX_PROMPT_LOGPROBS = 500_000
"""In one answer: 30 MB, which take a second or two to write."""


def check_prompt(prompt_ids: Sequence[int], model: ServedModel, param: str) -> tuple[int, ...]:
    """The prompt as it is, if it can be run. Raises ApiError."""
    if not prompt_ids:
        raise invalid("The prompt is empty.", param)
    if len(prompt_ids) >= model.max_model_len:
        raise too_long(len(prompt_ids), model.max_model_len, param)
    check_ids(prompt_ids, model, param)
    return tuple(prompt_ids)


def check_prompt_logprobs(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ApiError where the answer would tell too many log probabilities of prompts."""
    alternatives = request.prompt_alternatives
    if alternatives is None:
        return
    tokens = sum(map(len, prompts)) * request.choices_per_prompt
    if tokens * (1 + alternatives) > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"At most {MAX_PROMPT_LOGPROBS} log probabilities of prompts are told in an answer: "
            f"prompt tokens, {tokens} in all choices, times one more than {name}"
        )
        raise invalid(message, name)


def sampling(
    request: GenerationRequest,
    prompt_tokens: int,
    model: ServedModel,
    limits: Limits,
    bad_token_ids: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> Sampling:
    """How choice 0 of a prompt is sampled; a seed is drawn if the request has none.

    `max_tokens` that the context has no room for is clipped to the room. bad_token_ids: what the
    request's `bad_words` are in tokens. grammar: what its structure is to the engine. Raises
    ApiError.
    """
    limit = 1
    if not request.no_output:
        limit = _output_limit(*request.asked_limit, request.default_limit(limits))
    min_tokens = request.min_tokens or 0
    if min_tokens > limit:
        raise invalid(f"min_tokens is greater than the output limit of {limit}", "min_tokens")
    stops = _ids(request.stop_token_ids, model, "stop_token_ids") or ()
    allowed = _ids(request.allowed_token_ids, model, "allowed_token_ids")
    if allowed and min_tokens:
        own = () if request.ignore_eos else model.eos_token_ids
        if not set(allowed).difference(own, stops):
            message = "allowed_token_ids holds but tokens that end the answer before min_tokens"
            raise invalid(message, "allowed_token_ids")
    room = model.max_model_len - prompt_tokens
    top_k, top_p = _truncation(request, model)
    return Sampling(
        max_tokens=min(limit, room),
        min_tokens=min(min_tokens, room),
        temperature=_given(request.temperature, limits.default_temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_biases(request, model),
        logprobs=_logprobs(request),
        prompt_logprobs=request.prompt_alternatives,
        seed=_seed(request.seed),
        stop_token_ids=stops,
        ignore_eos=bool(request.ignore_eos),
        allowed_token_ids=allowed,
        # What a token beyond the model spells cannot come.
        bad_token_ids=tuple(ids for ids in bad_token_ids if max(ids) < model.vocab_size),
        grammar=grammar,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logprobs(request: GenerationRequest) -> int | None:
    """What the engine is asked for. Without log probabilities there is no best choice."""
    if request.choices_per_prompt > request.shown_per_prompt:
        return request.alternatives or 0
    return request.alternatives


def _biases(request: GenerationRequest, model: ServedModel) -> tuple[tuple[int, float], ...]:
    check_ids([token for token, _ in request.logit_bias], model, "logit_bias")
    return request.logit_bias


def _output_limit(name: str, asked: Any, default: int) -> int:
    if asked is None:
        return default
    if type(asked) is not int:
        raise invalid(f"{name} must be an integer or null", name)
    if asked < 1:
        raise invalid(f"{name} must be at least 1", name)
    return asked


def _truncation(request: GenerationRequest, model: ServedModel) -> tuple[int, float]:
    """(top_k, top_p) as the sampler has them: 0 keeps all, and top_p is above 0."""
    if request.top_p == 0:
        return 1, 1.0  # the smallest set there is
    top_k = max(0, request.top_k or 0)
    return min(top_k, model.vocab_size), _given(request.top_p, 1.0)


def _seed(seed: int | None) -> int:
    """A signed seed is read as the unsigned one of the same 64 bits."""
    return secrets.randbits(64) if seed is None else seed % 2**64


def _ids(ids: list[int] | None, model: ServedModel, param: str) -> tuple[int, ...] | None:
    """In order and without duplicates. Raises ApiError for an id that does not exist."""
    if ids is None:
        return None
    check_ids(ids, model, param)
    return tuple(sorted(set(ids)))


def check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises ApiError for an id that does not exist."""
    if min(ids, default=0) < 0 or max(ids, default=0) >= model.vocab_size:
        message = f"{param} must be token ids of this model, from 0 to {model.vocab_size - 1}"
        raise invalid(message, param)
