"""The seam between HTTP and whatever generates tokens: token ids in, token ids out.

Nothing here knows text, HTTP or Ray. `Backend` is implemented by the ingress deployment, and
by a script in the tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from replica.messages import FinishReason, Sampling, TokenLogprobs
from router.messages import RefusalKind
from router.tenant import Tenant


@dataclass(frozen=True)
class ServedModel:
    """What a client may ask of the model that is up."""

    name: str
    created: int
    """Unix time in seconds."""
    vocab_size: int
    """Rows of the output projection: ids at or above it do not exist."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    grammars: bool = True
    """Its output can be held to a grammar."""


@dataclass(frozen=True)
class Generation:
    """One sequence to generate; n choices or several prompts are several of these."""

    request_id: str
    """Unique for each sequence, chosen by us and never by a client."""
    tenant: Tenant
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    open_ended: bool = False
    """The client named no limit: `sampling.max_tokens` is a default."""
    priority: int = 0
    """Among what waits of the same tenant, the least goes first."""
    group: str = ""
    """The same for all that one request of a client's asks for; empty of one that is alone."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What was generated since the previous delta."""

    token_ids: tuple[int, ...]
    """In order; a token that ended the sequence ("stop") is the last of them."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; 0 where that is not known or told already."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per id, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first delta, where they were asked for: of each prompt token but the first."""


class Unavailable(Exception):
    """No replica can serve now (503)."""

    reason = "The model is not ready to serve. Try again later."
    """Shown to the client."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(self.reason)
        self.retry_after_s = retry_after_s


class ShuttingDown(Unavailable):
    """This process ends before the sequence does; another one can serve it at once."""

    reason = "The server is shutting down. Send the request again."

    def __init__(self) -> None:
        super().__init__(retry_after_s=1.0)


class Refused(Exception):
    """The tenant is over a limit (429), or waits in vain (503, 504); nothing was charged.

    `reason` is shown to the client, so it names limits and never other tenants.
    """

    def __init__(
        self, reason: str, retry_after_s: float, kind: RefusalKind = RefusalKind.RATE
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.retry_after_s = retry_after_s


class Stopped(Exception):
    """An administrator wants the sequence to end (403). Both texts are shown to the client."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


class EngineFailure(Exception):
    """The sequence was lost after it had been accepted. The text is for logs, not clients."""


class Enough(Exception):
    """Thrown into a generation whose consumer needs no more tokens: a stop string matched."""

    def __init__(self, tokens: int | None = None) -> None:
        """tokens: how many of the sequence count; by default, all that were told."""
        super().__init__()
        self.tokens = tokens


class Backend(Protocol):
    """Generates tokens for sequences that were checked already."""

    async def model(self) -> ServedModel:
        """The model that is served. Cheap: it is asked for on every request.

        Raises Unavailable while no replica is ready; where a request starts one, it waits for
        that.
        """

    async def check_ready(self) -> None:
        """Raises Unavailable where requests had better go elsewhere. It wakes nobody."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """The sequence, token by token; the last delta carries the finish reason.

        Tokens that came while the consumer was busy arrive together in one delta, so that a
        slow reader costs less, not more. It ends in exactly one of these ways:

        - exhausted after the finish reason: succeeded;
        - `Enough` thrown in: aborted, and counted as succeeded, with as many tokens as it says.
          `Enough` comes out again;
        - closed or cancelled before the finish reason: aborted, counted as cancelled;
        - raises Unavailable or Refused before the first delta, EngineFailure, ShuttingDown or
          Stopped at any time; the last is counted as cancelled.

        Whatever has to be settled is settled when it has ended or `aclose` has returned.
        """
