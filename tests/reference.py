"""REFERENCE: one sequence at a time through transformers' model and logits processors.

Only the uniform number of each draw is ours. Everything is recomputed for every token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replica.messages import Sampling, Submit
from replica.sampling.grammars import Grammars
from replica.sampling.rng import uniform


class Reference:
    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: tuple[int, ...],
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._grammars = grammars

    def run(self, submit: Submit) -> list[int]:
        """The output of a request."""
        sampling, ids = submit.sampling, list(submit.prompt_ids)
        prompt = len(ids)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)}
        while len(ids) - prompt < sampling.max_tokens:
            held = stops if len(ids) - prompt < sampling.min_tokens else set()
            ids.append(self._next(sampling, ids, prompt, held))
            if ids[-1] in stops:
                break
        return ids[prompt:]

    def logprobs(self, ids: tuple[int, ...]) -> Tensor:
        """float32 [len(ids), V]: of the token behind each position."""
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)

    def _next(self, sampling: Sampling, ids: list[int], prompt: int, held: set[int]) -> int:
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -1:].float()
        scores = self._shape(sampling, logits, ids, prompt)
        scores[:, sorted(held)] = -torch.inf
        if sampling.allowed_token_ids is not None:
            others = torch.ones(scores.shape[1], dtype=torch.bool)
            others[list(sampling.allowed_token_ids)] = False
            scores[:, others] = -torch.inf
        if sampling.grammar:
            scores[:, ~self._allowed(sampling.grammar, ids[prompt:])] = -torch.inf
        if sampling.temperature == 0:
            return int(scores.argmax())
        probabilities = warpers(sampling)(torch.tensor([ids]), scores).softmax(-1).double()
        cumulative = probabilities[0].cumsum(0)
        signed = (sampling.seed + 2**63) % 2**64 - 2**63
        seed, choice, position = torch.tensor([signed, sampling.choice, len(ids)])
        number = uniform(seed, choice, position) * cumulative[-1]
        return int(torch.searchsorted(cumulative, number, right=True))

    def _allowed(self, grammar: str, output: list[int]) -> Tensor:
        assert self._grammars is not None
        vocab_size = self._model.config.vocab_size
        bits = np.zeros(-(-vocab_size // 8), np.uint8)
        self._grammars.constraint(grammar).fill(np.array(output, np.int32), bits)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little"))[:vocab_size].bool()

    @staticmethod
    def _shape(sampling: Sampling, logits: Tensor, ids: list[int], prompt: int) -> Tensor:
        context = torch.tensor([ids])
        if sampling.repetition_penalty != 1:
            penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits = penalty(context, logits)
        for token in set(ids[prompt:]):
            times = ids[prompt:].count(token)
            logits[0, token] -= sampling.frequency_penalty * times + sampling.presence_penalty
        if sampling.logit_bias:
            bias = {(token,): value for token, value in sampling.logit_bias}
            logits = SequenceBiasLogitsProcessor(bias)(context, logits)
        return logits


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """In the order in which transformers applies them."""
    made = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        made.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(made)
