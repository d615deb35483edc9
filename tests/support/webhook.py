"""A server that webhooks are posted to, which answers as a test says: also badly, slowly or not at all."""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

PATH = "/services/T0/kept-secret"
"""What no output, error and file may have."""


class Webhook:
    """`answers` are for the requests in their order, then it is 200: a code, `(503, seconds)` with
    Retry-After, or what it does instead: `hang`, `close`, `garbage`. As a context it serves. `certificate`
    and `key`: PEM files, for HTTPS.
    """

    def __init__(self, *answers: Any, certificate: str | None = None, key: str | None = None) -> None:
        self.posted: list[dict[str, Any]] = []
        self._answers = list(answers)
        self._over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == (PATH, "application/json")
                outer.posted.append(json.loads(body))
                outer._answer(self, outer._answers.pop(0) if outer._answers else 200)

            def handle(self) -> None:
                with suppress(ssl.SSLError):  # a client that does not trust the certificate
                    super().handle()

            def log_message(self, format: str, *args: object) -> None:
                """The test prints what matters."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate, key)
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{'http' if certificate is None else 'https'}://{self.host}{PATH}"

    def _answer(self, handler: BaseHTTPRequestHandler, how: Any) -> None:
        if how == "hang":
            self._over.wait()
        elif how == "garbage":
            handler.wfile.write(b"\x00\xff not HTTP\r\n\r\n")
        elif how != "close":
            code, after = how if isinstance(how, tuple) else (how, None)
            handler.send_response(code)
            if after is not None:
                handler.send_header("Retry-After", str(after))
            if code == 302:
                handler.send_header("Location", "/elsewhere")
            handler.end_headers()

    @property
    def events(self) -> list[str]:
        return [each["event"] for each in self.posted]

    def __enter__(self) -> Webhook:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
