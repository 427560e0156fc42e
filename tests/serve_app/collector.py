"""A collector of OpenTelemetry spans: takes what is posted, as its protocol has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    url: str = ""
    delay_s: float = 0.0
    """So long each post waits for its answer."""
    posts: int = 0
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        """In the order in which they began."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def take(self, body: bytes) -> bytes:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(each.resource)
            for scope in each.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse().SerializeToString()


def attributes(told: Any) -> dict[str, Any]:
    """Of a span or a resource, as values of Python."""
    return {each.key: _value(each.value) for each in told.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@contextmanager
def collector(delay_s: float = 0.0) -> Iterator[Collector]:
    taken = Collector(delay_s=delay_s)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # its name for it
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.posts += 1
            time.sleep(taken.delay_s)
            taken.headers.append(dict(self.headers))
            reply = taken.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    taken.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
