"""Requests as OpenTelemetry spans: one for each, and one for each phase in which it waits or
generates, made once it is over.

A thread of OpenTelemetry's own sends them, in batches, out of a queue of bounded length: where no
collector answers, spans are lost and nothing waits. The module imports OpenTelemetry only where
spans are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import MAX_REPLICAS, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

NAME = "fairstream"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""What the conventions for generative AI call these."""
SHOWN = (Phase.ADMISSION, Phase.REPLICA_QUEUE, Phase.PREFILL, Phase.DECODE)
"""Phases that are spans; how long the others took are attributes."""
LEAVE_S = 2.0
"""So long the end of a process waits for its last spans to be sent."""

Attributes = Mapping[str, Any]


class Spans:
    """Used from one event loop."""

    def __init__(self, url: str, process: str) -> None:
        """url: where spans are posted, as protobuf. process: whose they are. Headers, limits and
        the sampler are those of OpenTelemetry's variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Its own end at the end of the interpreter would wait for a collector that is away.
        self._provider = TracerProvider(resource=_resource(process), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(NAME)
        self._parent = TraceContextTextMapPropagator().extract
        self._within, self._kind = set_span_in_context, SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)

    def note(self, record: RequestRecord) -> None:
        """A request is over. Those without a valid key, and of other paths, leave no span."""
        operation = OPERATIONS.get(record.path)
        if operation is None or not record.tenant:
            return
        turns, at = record.breakdown.turns, _nanoseconds()
        model = f" {record.model}" if record.model else ""
        span = self._tracer.start_span(
            operation + model,
            context=self._parent(record.trace_headers),
            kind=self._kind,
            attributes={"gen_ai.operation.name": operation} | dict(_of_request(record)),
            start_time=at(turns[0][1]),
        )
        if span.is_recording():
            within = self._within(span)
            for phase, begin, end in record.breakdown.intervals():
                if phase in SHOWN:
                    attributes = _of_phase(record, phase)
                    child = self._tracer.start_span(
                        phase.value, within, attributes=attributes, start_time=at(begin)
                    )
                    child.end(at(end))
            if record.outcome == "failed":
                span.set_status(self._error)
        span.end(at(record.breakdown.counted_until))

    def close(self) -> None:
        """Send what is left; returns after `LEAVE_S` in any case."""
        import threading

        leaving = threading.Thread(target=self._provider.shutdown, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)


def _nanoseconds() -> Callable[[float], int]:
    """From seconds of the monotonic clock to Unix time in nanoseconds."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda seconds: int(seconds * 1e9) + offset


def _resource(process: str) -> Resource:
    """What the variables say of the service, and our name where they say none."""
    from opentelemetry.sdk.resources import Resource

    told = Resource.create({"service.instance.id": process})
    named = str(told.attributes["service.name"])
    return told.merge(Resource({"service.name": NAME})) if named.startswith("unknown") else told


def _of_request(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    """Attributes, by the conventions for generative AI and HTTP, then our own. Neither what was
    asked nor what was answered."""
    yield "gen_ai.provider.name", NAME
    if record.model:
        yield "gen_ai.request.model", record.model
    if record.answer_id:
        yield "gen_ai.response.id", record.answer_id
        yield "gen_ai.response.model", record.model
    if record.stream:
        yield "gen_ai.request.stream", True
    if record.choices != 1:
        yield "gen_ai.request.choice.count", record.choices
    for kind, tokens in record.usage().items():
        yield f"gen_ai.usage.{kind}_tokens", tokens
    yield "http.request.method", record.scope["method"]
    yield "http.route", record.path
    yield "url.path", record.path
    if record.status:
        yield "http.response.status_code", record.status
    if record.outcome != "succeeded":
        yield "error.type", record.reason if record.error else record.outcome
    yield "fairstream.tenant", record.tenant
    yield "fairstream.outcome", record.outcome
    yield "fairstream.request_id", record.request_id
    for phase, seconds in record.breakdown.seconds.items():
        yield f"fairstream.phase.{phase.value}", seconds


def _of_phase(record: RequestRecord, phase: Phase) -> Attributes:
    if phase is Phase.ADMISSION:
        return {f"fairstream.held_back.{why}": s for why, s in record.held_back().items()}
    if phase is Phase.PREFILL:
        replicas = dict.fromkeys(name for each in record.sequences for name in each.replicas)
        return {"fairstream.replicas": list(replicas)[:MAX_REPLICAS]}
    return {}
