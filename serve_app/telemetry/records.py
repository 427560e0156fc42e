"""A record of each HTTP request: a line in the log when it is over, and a count of each refusal.

The middleware opens a record; whoever serves the request in its context notes in it what it
learns. What a client writes is bounded here, and so are the lines of one tenant: a flood must
not push those of all others out of the files. The module knows neither routes nor Ray.
"""

from __future__ import annotations

import logging
import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.rate import Bucket
from serve_app.arrivals import arrived_at
from serve_app.request_ids import is_sane
from serve_app.telemetry.breakdown import Breakdown, Phase, furthest, server_timing

logger = logging.getLogger(__name__)

LINES_PER_MINUTE = 3000
"""Of one tenant, and of all without a key, at one ingress: of what was refused, and again of the
rest. What is left out is counted in the next line."""
MAX_TEXT = 200
MAX_REPLICAS = 8
PROBES = frozenset({"/health", "/ready"})
"""Asked every second, and answered with a 503 until all is up: only a failure is worth a line."""

TIMING_HEADER = b"x-fairstream-timing"
TRACE_HEADERS = (b"traceparent", b"tracestate")
MAX_TRACE_HEADER = 512
"""Bytes; what W3C asks to be passed on. It is kept with each span until that is sent."""


class Error(Protocol):
    """What the client is told instead of an answer."""

    status: int
    message: str
    param: str | None
    code: str | None


class Usage(Protocol):
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int


GAP_BOUNDS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0)
"""Upper bounds of the buckets of `Gaps`."""


@dataclass(slots=True)
class Gaps:
    """Between tokens, counted by length."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(GAP_BOUNDS_S, seconds)] += 1
        self.seconds += seconds


@dataclass(slots=True)
class SequenceRecord:
    """One sequence of a request. Its owner writes it, and says how far it is."""

    request: RequestRecord
    prompt_tokens: int
    replicas: list[str] = field(default_factory=list)
    """One for each attempt."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds that it waited for grants, by why."""
    cached_tokens: int = 0
    output_tokens: int = 0
    told_at: float = 0.0
    """When its last tokens came; 0 before the first ones."""
    phase: Phase | None = Phase.ADMISSION
    """None once it has ended."""

    @property
    def queued_s(self) -> float:
        """Waited for grants."""
        return sum(self.waits.values())

    def add_wait(self, seconds: Mapping[str, float]) -> None:
        """By why."""
        self.waits = added(self.waits, seconds)

    def answer(self, queued_s: float) -> None:
        """Its first tokens have come, or some more. queued_s: its wait in the replica."""
        if self.phase is not Phase.DECODE:
            breakdown = self.request.breakdown
            if breakdown.phase is Phase.PREFILL:  # else another sequence is further
                breakdown.split(queued_s, Phase.REPLICA_QUEUE)
            self.reach(Phase.DECODE)

    def reach(self, phase: Phase | None) -> None:
        """It is that far now; None: it has ended."""
        if phase is not self.phase:
            self.phase = phase
            self.request.advance()

    def tell(self, output_tokens: int, now: float) -> None:
        """It has so many tokens now. Tokens that come together are one behind the other in no
        time, but for the first of them."""
        new, self.output_tokens = output_tokens - self.output_tokens, output_tokens
        if new > 0:
            if self.told_at:
                self.request.gaps.add(now - self.told_at)
            self.told_at = now


@dataclass(slots=True)
class RequestRecord:
    scope: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    """X-Request-ID."""
    answer_id: str = ""
    """What the client is told as its answer's id; `/admin/requests` knows it by this."""
    model: str = ""
    error: Error | None = None
    """What the client was told, as its status or inside the stream."""
    sequences: list[SequenceRecord] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    """As those of a sequence, before there were any."""
    status: int = 0
    """0 until the answer begins."""
    complete: bool = False
    """The client was sent all of it."""
    stream: bool = False
    """It asks for events."""
    choices: int = 1
    """Sequences for each of its prompts."""
    told_usage: Usage | None = None
    """Tokens, as the client was told."""
    breakdown: Breakdown = field(default_factory=Breakdown)
    gaps: Gaps = field(default_factory=Gaps)

    @property
    def tenant(self) -> str:
        """Empty without a valid key."""
        tenant = self.scope.get("state", {}).get("tenant")
        return tenant.id if tenant is not None else ""

    @property
    def path(self) -> str:
        """Within the application."""
        scope = self.scope
        return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))

    @property
    def trace_headers(self) -> dict[str, str]:
        """W3C's: of which trace it is a part. What is too long is left out."""
        found: dict[str, str] = {}
        for name, value in self.scope.get("headers", ()):
            if name in TRACE_HEADERS and len(value) <= MAX_TRACE_HEADER:
                found.setdefault(name.decode(), value.decode("latin-1"))
        return found

    @property
    def line(self) -> str:
        """Method and path."""
        return f"{self.scope['method']} {self.scope.get('path', '')}"[:MAX_TEXT]

    @property
    def wants_timing(self) -> bool:
        """The client asks to be told where the time went."""
        headers = self.scope.get("headers", ())
        return any(name == TIMING_HEADER and value != b"0" for name, value in headers)

    @property
    def outcome(self) -> str:
        error = self.error
        if error is not None:
            if self.status == 200 and error.code in ("tenant_paused", "request_stopped"):
                return "cancelled"
            ours = error.code in ("server_error", "engine_failure")
            return "failed" if ours or self.status == 200 else "refused"
        if not self.complete:
            return "cancelled"
        return "refused" if self.status >= 400 else "succeeded"

    @property
    def reason(self) -> str:
        """One of few: the code of the error, or its status."""
        if self.error is None:
            return f"http_{self.status}"
        return self.error.code or f"http_{self.error.status}"

    @contextmanager
    def sequence(self, prompt_tokens: int) -> Iterator[SequenceRecord]:
        """One more, until it ends."""
        sequence = SequenceRecord(self, prompt_tokens)
        self.sequences.append(sequence)
        self.advance()
        try:
            yield sequence
        finally:
            sequence.reach(None)

    @contextmanager
    def waiting(self, why: str) -> Iterator[None]:
        """It waits while it is prepared."""
        began, before = time.monotonic(), self.waits
        self.breakdown.enter(Phase.ADMISSION)
        try:
            yield
        finally:
            self.breakdown.enter(Phase.PREPARE)
            self.waits = added(before, {why: time.monotonic() - began})

    def held_back(self) -> dict[str, float]:
        """Why it waited: the seconds of its phase ADMISSION, by the shares of the reasons for which
        its sequences did."""
        waits = self.waits
        for sequence in self.sequences:
            waits = added(waits, sequence.waits)
        whole, seconds = sum(waits.values()), self.breakdown.seconds[Phase.ADMISSION]
        return {why: seconds * s / whole for why, s in waits.items()} if whole else {}

    def advance(self) -> None:
        """To where its sequences are now."""
        phase = furthest(each.phase for each in self.sequences if each.phase is not None)
        if phase is not None:
            self.breakdown.enter(phase)

    def tokens(self) -> dict[str, int]:
        """Of its prompts, of its answers, and of the longest of these."""
        outputs = [each.output_tokens for each in self.sequences]
        prompt = sum(each.prompt_tokens for each in self.sequences)
        return {"prompt": prompt, "output": sum(outputs), "longest": max(outputs, default=0)}

    def usage(self) -> dict[str, int]:
        """Tokens, each prompt once: as the client was told, or else until now."""
        cached = sum(each.cached_tokens for each in self.sequences)
        told, tokens = self.told_usage, self.tokens()
        if told is not None:
            prompt, output = told.prompt_tokens, told.completion_tokens
        else:
            prompt, output = tokens["prompt"] // self.choices, tokens["output"]
        return {"input": prompt, "output": output, "cache_read.input": min(cached, prompt)}

    def fields(self) -> dict[str, object]:
        """What its line has beside the fields of its context, once it is over; values for JSON."""
        told: dict[str, object] = {"status": self.status, "outcome": self.outcome}
        if self.error is not None:
            told |= {"reason": self.reason, "error": self.error.message[:MAX_TEXT]}
            if self.error.param:
                told["param"] = self.error.param[:MAX_TEXT]
        told |= {name: value for name in ("model", "answer_id") if (value := getattr(self, name))}
        seconds = self.breakdown.seconds
        told["seconds"] = round(sum(seconds.values()), 6)
        if self.sequences:
            told |= _sums(self.sequences)
            told["phases"] = {phase.value: round(s, 6) for phase, s in seconds.items()}
            told["held_back"] = {why: round(s, 6) for why, s in self.held_back().items()}
        return told


def added(seconds: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """By why."""
    return {why: seconds.get(why, 0.0) + more.get(why, 0.0) for why in {**seconds, **more}}


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current() -> RequestRecord:
    """That of the request that is served; elsewhere one that nobody reads."""
    return _current.get() or RequestRecord()


def context() -> dict[str, object]:
    """Fields of each line that is logged while a request is served."""
    record = _current.get()
    return {} if record is None else {"request_id": record.request_id, "tenant": record.tenant}


class Records:
    """ASGI middleware around all that answers."""

    def __init__(
        self,
        app: ASGIApp,
        refusals: Counter[tuple[str, str]],
        request_id: Callable[[], str] = lambda: "",
        observe: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """refusals: by tenant and reason, counted up here. request_id: what a proxy has called
        the request that is served, where no header says it. observe: is told of each request at
        its end, but for probes."""
        self._app, self._refusals, self._given_id = app, refusals, request_id
        self._observe = observe
        self._lines = _Lines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        breakdown = Breakdown(since=arrived_at(scope))
        record = RequestRecord(scope, _request_id(scope, self._given_id()), breakdown=breakdown)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and record.wants_timing:
                timing = server_timing(record.breakdown.so_far())
                MutableHeaders(scope=message)["Server-Timing"] = timing
            with record.breakdown.during(Phase.SEND):
                await send(message)
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message["type"] == "http.response.body":
                record.complete = not message.get("more_body", False)
                if record.complete:  # what is left to do, nobody waits for
                    record.breakdown.stop()

        token = _current.set(record)
        try:
            await self._app(scope, receive, noting)
        finally:
            self._close(record)
            _current.reset(token)

    def _close(self, record: RequestRecord) -> None:
        outcome, scope = record.outcome, record.scope
        record.breakdown.count()
        if record.path in PROBES and outcome != "failed":
            return
        if outcome in ("refused", "failed"):
            self._refusals[record.tenant, record.reason] += 1
        self._observe(record)
        left_out = self._lines.take(record.tenant, outcome == "refused")
        if left_out is None:
            return
        fields = record.fields()
        if not record.tenant and scope.get("client"):
            fields["client"] = str(scope["client"][0])
        if left_out:
            fields["left_out"] = left_out
        level = logging.WARNING if outcome == "failed" else logging.INFO
        logger.log(level, "%s", record.line, extra={"fields": fields})


class _Lines:
    """How many log lines each tenant may have."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, bool], Bucket] = {}
        self._left_out: Counter[tuple[str, bool]] = Counter()

    def take(self, tenant: str, refused: bool) -> int | None:
        """How many were left out before this one; None leaves this one out, too."""
        key, now = (tenant, refused), time.monotonic()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(LINES_PER_MINUTE, now)
        if bucket.level(now) < 1:
            self._left_out[key] += 1
            return None
        bucket.take(1)
        return self._left_out.pop(key, 0)


def _request_id(scope: Scope, given: str) -> str:
    """The client's, if it is short and plain."""
    found = Headers(scope=scope).get("x-request-id", given)
    return found if is_sane(found.encode("utf-8", "replace")) else uuid.uuid4().hex


def _sums(sequences: list[SequenceRecord]) -> dict[str, object]:
    replicas = dict.fromkeys(name for each in sequences for name in each.replicas)
    return {
        "sequences": len(sequences),
        "replicas": list(replicas)[:MAX_REPLICAS],
        "queued_s": round(max(each.queued_s for each in sequences), 4),
        "prompt_tokens": sum(each.prompt_tokens for each in sequences),
        "cached_tokens": sum(each.cached_tokens for each in sequences),
        "output_tokens": sum(each.output_tokens for each in sequences),
    }
