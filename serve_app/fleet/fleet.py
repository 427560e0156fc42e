"""All replicas as one `Backend`: waits for a grant, runs there, and reports what was used.

A request whose replica is lost goes on elsewhere, behind the tokens that it has. The module
knows neither Ray nor HTTP nor text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import anyio
from msgspec import structs

from replica.messages import FinishReason, Output, Sampling, Submit
from router.messages import Grant, HeldBack, Outcome, RequestInfo
from serve_app.fleet.admission_client import AdmissionClient
from serve_app.fleet.mailbox import ReplicaLost
from serve_app.fleet.prefix_hashes import prefix_hashes
from serve_app.fleet.step_streams import StepStreams
from serve_app.protocol.backend import (
    Delta,
    EngineFailure,
    Enough,
    Generation,
    ServedModel,
    Stopped,
    Unavailable,
)
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import SequenceRecord

MAX_LOST_REPLICAS = 2
"""A request that was running on this many replicas when they died may be the cause: no more."""
FRESH_S = 10.0
"""Admission answers several times a second. Its restart takes seconds, for all ingresses at once:
requests wait for it, and none of the ingresses is to be taken out of service."""
RETRY_AFTER_S = 2.0
JOIN_S = 5.0
"""Serve calls an ingress before that has heard of the replicas: so long requests wait for it."""
WAKE_S = 300.0
"""Longest wait for a first replica."""
LOOK_S = 0.1


class Fleet:
    """Implements `Backend`. Used from one event loop."""

    def __init__(
        self,
        model_name: str,
        admission: AdmissionClient,
        streams: StepStreams,
        *,
        sleeps: bool = False,
    ) -> None:
        """sleeps: there may be no replica at all, until a request comes."""
        self._model_name = model_name
        self._created = int(time.time())
        self._admission, self._streams, self._sleeps = admission, streams, sleeps
        self._known: ServedModel | None = None

    @property
    def ready(self) -> bool:
        """A replica is up and Admission is there."""
        return bool(self._streams.ready) and self._admission.silence_s < FRESH_S

    async def model(self) -> ServedModel:
        """See `Backend`."""
        if self._sleeps and not self._streams.ready:
            return self._known or await self._wake()
        if self._known is None:
            await self._join()
        await self.check_ready()
        ready = next(iter(self._streams.ready.values()))
        self._known = ServedModel(
            name=self._model_name,
            created=self._created,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_model_len=ready.max_model_len,
            grammars=ready.grammars,
        )
        return self._known

    async def check_ready(self) -> None:
        """See `Backend`."""
        asleep = self._sleeps and self._admission.silence_s < FRESH_S
        if not (self.ready or asleep):
            raise Unavailable(RETRY_AFTER_S)

    async def _join(self) -> None:
        if self.ready:
            return
        with records.current().waiting(HeldBack.NO_REPLICA.value), anyio.move_on_after(JOIN_S):
            while not self.ready:  # noqa: ASYNC110  # no event tells
                await anyio.sleep(LOOK_S)

    async def _wake(self) -> ServedModel:
        """What is served is known only once a replica has run."""
        waiting = records.current().waiting(HeldBack.NO_REPLICA.value)
        with waiting, self._admission.sleeping(self._model_name) as sleeper:
            with anyio.move_on_after(WAKE_S):
                while not self._streams.ready:
                    if sleeper.error is not None:
                        raise sleeper.error
                    await anyio.sleep(LOOK_S)
                return await self.model()
            raise Unavailable(RETRY_AFTER_S)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """See `Backend`."""
        outcome = Outcome.CANCELLED  # Being closed or cancelled passes no handler below.
        try:
            async with aclosing(self._attempts(generation)) as deltas:
                async for delta in deltas:
                    yield delta
            outcome = Outcome.SUCCEEDED
        except Enough as enough:
            outcome = Outcome.SUCCEEDED
            if enough.tokens is not None:
                self._admission.trim(generation.request_id, enough.tokens)
            raise
        except Stopped:
            raise
        except Exception:
            outcome = Outcome.FAILED
            raise
        finally:
            self._admission.end(generation.request_id, outcome)

    async def _attempts(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Run to the end, on another replica from where the last one was lost: every sequence
        has a seed, so its next token does not depend on who computes it."""
        request = RequestInfo(
            request_id=generation.request_id,
            tenant=generation.tenant.id,
            prompt_tokens=len(generation.prompt_ids),
            max_tokens=generation.sampling.max_tokens,
            open_ended=generation.open_ended,
            model=self._model_name,
            prefixes=prefix_hashes(generation.prompt_ids, generation.tenant.cache_salt),
            priority=generation.priority,
            group=generation.group,
        )
        output_ids: list[int] = []
        losses = 0
        with records.current().sequence(request.prompt_tokens) as record:
            while True:
                try:
                    attempt = self._attempt(generation, request, output_ids, record)
                    async with aclosing(attempt) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except ReplicaLost as lost:
                    losses += lost.suspect
                    if losses >= MAX_LOST_REPLICAS:
                        raise EngineFailure(str(lost)) from lost
                request = replace(request, attempt=request.attempt + 1)

    async def _attempt(
        self,
        generation: Generation,
        request: RequestInfo,
        output_ids: list[int],
        record: SequenceRecord,
    ) -> AsyncGenerator[Delta, None]:
        """Goes on behind `output_ids`, and appends to them."""
        grant = await self._granted(request, record)
        submit = Submit(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_ids=generation.prompt_ids,
            prior_output_ids=tuple(output_ids),
            sampling=_paid_for(generation.sampling, grant.max_tokens),
            cache_salt=generation.tenant.cache_salt,
            band=generation.tenant.band,
        )
        async with aclosing(self._streams.run(grant.replica, submit)) as outputs:
            async for output in outputs:
                output_ids += output.token_ids
                record.answer(output.queued_s)
                told = bool(submit.prior_output_ids)  # by the attempt that made them
                cached = 0 if told else min(output.cached_tokens, len(generation.prompt_ids))
                record.cached_tokens = max(record.cached_tokens, cached)
                produced = len(output_ids)
                record.tell(produced, time.monotonic())
                self._admission.progress(request.request_id, produced, cached, output.gpu_s)
                is_lost = output.finish_reason in ("abort", "error")
                if output.token_ids or not is_lost:  # the text may have ended before
                    yield _delta(output, cached, None if is_lost else output.finish_reason)
                if is_lost:
                    raise EngineFailure(output.error or "the engine aborted the sequence")

    async def _granted(self, request: RequestInfo, record: SequenceRecord) -> Grant:
        record.reach(Phase.ADMISSION)
        with self._admission.waits.waiting(request.model, request.tenant) as waited:
            try:
                grant = await self._admission.acquire(request)
            finally:
                record.add_wait(waited())
        record.replicas.append(grant.replica)
        record.reach(Phase.PREFILL)
        return grant


def _paid_for(sampling: Sampling, max_tokens: int) -> Sampling:
    """The same, of at most so many tokens."""
    least = min(sampling.min_tokens, max_tokens)
    return structs.replace(sampling, max_tokens=max_tokens, min_tokens=least)


def _delta(output: Output, cached_tokens: int, ending: FinishReason | None) -> Delta:
    return Delta(output.token_ids, ending, cached_tokens, output.logprobs, output.prompt_logprobs)
