"""A real OTLP endpoint: it takes protobuf over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans


class _Handler(BaseHTTPRequestHandler):
    found: list[ResourceSpans]

    def do_POST(self) -> None:
        body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        right = (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        type(self).found.extend(body.resource_spans)
        self.send_response(200 if right else 400)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def open_collector() -> Iterator[tuple[str, list[ResourceSpans]]]:
    """Listen on loopback; yield the URL for traces, and what it received."""
    found: list[ResourceSpans] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("OneCollector", (_Handler,), {"found": found})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", found
        finally:
            server.shutdown()
            thread.join()
