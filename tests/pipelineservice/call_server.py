"""A server on this machine that steps of pipelines call."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class CallServer:
    """Counts what steps post to it, by idempotency key."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[bytes] = []
        calls, bodies = self.calls, self.bodies

        class _Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                calls.append(self.headers["Idempotency-Key"])
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
