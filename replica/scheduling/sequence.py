"""One request's token sequence, from submission to its single end.

A sequence knows its ids, its limits and how it ended. It does not know where its KV lies or
what is in flight: while it runs, that is the state of its row (`replica.scheduling.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from replica.messages import FinishReason, Sampling, Submit, TokenLogprobs

TokenIds: TypeAlias = npt.NDArray[np.int32]
Bits: TypeAlias = npt.NDArray[np.uint8]
Key: TypeAlias = tuple[str, int]

MAX_STOP_IDS = 32
"""Stop ids of one sequence, the model's own included: they lie in a table of this width."""
NO_TOKEN = -1
"""In an unused place of such a table."""


class ConstraintFailure(Exception):
    """No token can be allowed any more; the sequence ends with an error."""


class Constraint(Protocol):
    """The rule that limits the tokens of one sequence."""

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether it can be followed yet; waits for that at most so long."""
        return True

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        """Write uint8 [V/8], little bit order: what may follow `output_ids`, which is at least
        as long as in the last call. Only once it is ready. Raises ConstraintFailure."""


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    attempt: int
    sampling: Sampling
    cache_salt: str
    band: int
    num_prompt: int
    limit: int
    """Most tokens that it may have: prompt plus max_tokens, or the context length."""
    stop_ids: tuple[int, ...]
    token_ids: TokenIds
    """Known ids, prompt first. Up to date only while the sequence has no row."""
    constraint: Constraint | None = None
    order: int = 0
    """Place among all sequences of the engine, by arrival; kept through a preemption."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second on, as far as they are computed."""
    started: bool = False
    blocks_wanted: int = 0
    """Free blocks that it needed when it was last looked at. With fewer it is not looked at
    again."""
    chain: list[bytes] = field(default_factory=list)
    """Digests of its full blocks, in order (`replica.scheduling.block_manager`)."""
    overtaken: int = 0
    """How many sequences were admitted before it although they came later."""
    gpu_ns: float = 0.0
    """Its share of the device's time, in ns. Up to date only while the sequence has no row."""
    received_ns: int = 0
    """When the engine was asked, by `time.perf_counter_ns`."""
    queued_s: float | None = None
    """From then to the first step that computes for it; None before that."""
    row: int | None = None
    """Its place in the persistent batch while it runs."""
    finish_reason: FinishReason | None = None

    @classmethod
    def from_submit(
        cls, submit: Submit, *, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> Sequence:
        """The sequence of a submit that `replica.validation` has accepted."""
        num_prompt, sampling = len(submit.prompt_ids), submit.sampling
        own = () if sampling.ignore_eos else eos_token_ids
        stop_ids = tuple(dict.fromkeys(own + sampling.stop_token_ids))
        return cls(
            request_id=submit.request_id,
            attempt=submit.attempt,
            sampling=sampling,
            cache_salt=submit.cache_salt,
            band=submit.band,
            num_prompt=num_prompt,
            limit=min(num_prompt + sampling.max_tokens, max_model_len),
            stop_ids=stop_ids,
            token_ids=np.array(submit.prompt_ids + submit.prior_output_ids, dtype=np.int32),
        )

    @property
    def score_end(self) -> int:
        """Prompt positions before this one are to be scored: each scores the token behind it.

        None are where output came before: whoever has that has the scores, too.
        """
        asked = self.sampling.prompt_logprobs is not None
        return self.num_prompt - 1 if asked and len(self.token_ids) == self.num_prompt else 0

    @property
    def key(self) -> Key:
        return self.request_id, self.attempt

    @property
    def priority(self) -> tuple[int, bool, int]:
        """Smaller runs first and is preempted last. What has begun goes on before anything of its
        band begins: a client that reads an answer already would see it stop."""
        return self.band, not self.started, self.order
