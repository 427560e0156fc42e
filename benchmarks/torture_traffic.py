"""Random requests: every sampling parameter, in any combination."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeAlias

from replica.messages import MAX_BIASES, MAX_LOGPROBS, Sampling, Submit
from replica.scheduling.sequence import MAX_STOP_IDS

Options: TypeAlias = dict[str, Any]
LONGEST_OUTPUT = 200


class Traffic:
    """Requests of up to `longest` prompt tokens, with the next of `names`."""

    def __init__(
        self,
        random: Random,
        names: Iterator[str],
        vocab_size: int,
        max_model_len: int,
        longest: int,
    ) -> None:
        self._random = random
        self._names = names
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._longest = longest
        self._shared = [self.ids(longest // 4), self.ids(longest // 40 + 1)]

    def ids(self, number: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._vocab_size), k=number))

    def request(self) -> Submit:
        """One that is to be answered."""
        random = self._random
        sampling = self._sampling()
        resumed = random.random() < 0.05
        prior = self.ids(min(random.choice((1, 5, 60)), sampling.max_tokens)) if resumed else ()
        return self._submit(self._prompt(), sampling, prior_output_ids=prior)

    def refusal(self) -> Submit:
        """One that is to be refused, and to hurt nobody."""
        beyond, one = self._vocab_size, self.ids(1)
        kinds: list[tuple[tuple[int, ...], Options]] = [
            ((), {}),
            ((beyond,), {}),
            (self.ids(self._max_model_len), {}),
            (one, {"max_tokens": 0}),
            (one, {"seed": 2**64}),
            (one, {"top_k": 2**63}),
            (one, {"min_tokens": 2**31, "max_tokens": 2**31}),
            (one, {"temperature": float("nan")}),
            (one, {"min_p": float("inf")}),
            (one, {"logit_bias": ((5, float("-inf")),)}),
            (one, {"stop_token_ids": (beyond,)}),
            (one, {"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))}),
            (one, {"logit_bias": tuple((i, 1.0) for i in range(MAX_BIASES + 1))}),
            (one, {"logprobs": MAX_LOGPROBS + 1}),
            (one, {"bad_token_ids": ((),)}),
            (one, {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1}),
        ]
        prompt, options = self._random.choice(kinds)
        return self._submit(prompt, Sampling(**{"max_tokens": 3, **options}))

    def _submit(self, prompt: tuple[int, ...], sampling: Sampling, **options: Any) -> Submit:
        return Submit(
            request_id=next(self._names),
            prompt_ids=prompt,
            sampling=sampling,
            cache_salt=self._random.choice(("", "a", "b")),
            band=self._random.choice((0, 0, 0, 1, 2)),
            **options,
        )

    def _prompt(self) -> tuple[int, ...]:
        random, longest = self._random, self._longest
        prefix = random.choice(self._shared) if random.random() < 0.4 else ()
        share = random.choice((0, 0.01, 0.05, 0.1, 0.3, 1 if random.random() < 0.2 else 0.1))
        length = random.choice((1, 2, 63, 64, 65)) + int(share * longest)
        return (prefix + self.ids(length))[:longest]

    def _sampling(self) -> Sampling:
        random = self._random
        options: Options = {
            "max_tokens": random.choice((1, 2, 7, 50, LONGEST_OUTPUT)),
            "temperature": random.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
            "seed": random.getrandbits(64),
            "ignore_eos": random.random() < 0.3,
            "stop_token_ids": self.ids(random.choice((0, 0, 1, 9))),
        }
        for make, chance in FEATURES:
            if random.random() < chance:
                options |= make(random, self.ids(40))
        return Sampling(**options)


def _filters(random: Random, ids: tuple[int, ...]) -> Options:
    return {
        "top_k": random.choice((0, 1, 5, 50, 500)),
        "top_p": random.choice((0.1, 0.5, 0.95, 1.0)),
        "min_p": random.choice((0.0, 0.05, 0.5)),
    }


def _penalties(random: Random, ids: tuple[int, ...]) -> Options:
    return {
        "repetition_penalty": random.choice((0.8, 1.0, 1.3)),
        "presence_penalty": random.choice((-2.0, 0.0, 0.5)),
        "frequency_penalty": random.choice((-0.3, 0.0, 2.0)),
    }


def _biases(random: Random, ids: tuple[int, ...]) -> Options:
    biased = dict.fromkeys(ids[: random.choice((1, 40))])
    return {"logit_bias": tuple((token, random.uniform(-100, 10)) for token in biased)}


def _stops(random: Random, ids: tuple[int, ...]) -> Options:
    """Likely enough to end it."""
    return {"logit_bias": tuple((token, 5.0) for token in set(ids)), "stop_token_ids": ids[:8]}


def _allowed(random: Random, ids: tuple[int, ...]) -> Options:
    """Among them some that end it."""
    return {"allowed_token_ids": ids, "stop_token_ids": ids[: random.choice((0, 2))]}


def _bad(random: Random, ids: tuple[int, ...]) -> Options:
    """Some of them would come up else."""
    return {
        "bad_token_ids": (ids[:1], ids[1:3], ids[3:6]),
        "logit_bias": tuple((token, 4.0) for token in set(ids)),
    }


FEATURES: list[tuple[Callable[[Random, tuple[int, ...]], Options], float]] = [
    (_filters, 0.3),
    (_penalties, 0.15),
    (_biases, 0.1),
    (_stops, 0.1),
    (_allowed, 0.1),
    (_bad, 0.1),
    (lambda random, _: {"min_tokens": random.choice((1, 5, 60))}, 0.1),
    (lambda random, _: {"logprobs": random.choice((0, 5, MAX_LOGPROBS))}, 0.1),
    (lambda random, _: {"prompt_logprobs": random.choice((0, 2))}, 0.04),
]
"""(what it adds, how often). A later one replaces what an earlier one has set."""
