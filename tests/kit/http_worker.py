"""A worker's HTTP side whose pages, also faulty ones, the test defines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Pages = dict[str, tuple[int, bytes]]

OPENMETRICS = " in OpenMetrics"
"""Suffix of a path whose page in OpenMetrics differs."""


def serve_pages(pages: Pages) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            other_form = path + OPENMETRICS if "openmetrics" in self.headers.get("Accept", "") else path
            status, body = pages.get(other_form) or pages.get(path, (404, b"not here"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Do not log."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def serve(stack: ExitStack) -> Callable[[Pages], str]:
    """Serve fixed pages by path on a port that the system chooses; return the URL."""

    def start(pages: Pages) -> str:
        server = stack.enter_context(serve_pages(pages))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}"

    return start
