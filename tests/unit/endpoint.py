"""An HTTP server on loopback that answers as it is told, for what asks a served model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec


@contextmanager
def endpoint(*answers: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Its URL and what it was asked. It gives these answers, status and JSON, in turn, the last of them for ever."""
    asked: list[Any] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"]))))
            status, answer = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(msgspec.json.encode(answer))

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
