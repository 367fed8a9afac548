"""Serves a page on this machine alone, and what changes of it; nothing can be asked for but that.

Two paths are known, and no request names a file. Only requests that were addressed to this server
by name are answered: a page of another site that has its name point here is not.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

from typing_extensions import override

from l2l.page.document import Document, content_of, page_of
from l2l.page.markup import as_json

ADDRESS = "127.0.0.1"
LIVE = "/content.json"
LEAST_SECONDS = 1.0  # between two looks at the run
SHARE = 5  # so many times as long as a look took is waited before the next
MOST_AT_ONCE = 8  # requests
SECONDS = 20.0  # that a request may take to arrive


@final
class _Latest:
    """A page as it was when it was last looked at: however many ask, seldom is looked."""

    def __init__(self, look: Callable[[], Document]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._next = 0.0
        self._document: Document | None = None
        self._body, self._version = b"", ""
        self._problem = ""

    def document(self) -> Document:
        """The page.

        Raises:
            ValueError: there is none to see now.
        """
        with self._lock:
            self._refresh()
            if self._document is None or self._problem:
                raise ValueError(self._problem)
            return self._document

    def content(self) -> tuple[bytes, str]:
        """What changes, and its version.

        Raises:
            ValueError: there is none to see now.
        """
        with self._lock:
            self._refresh()
            if self._problem:
                raise ValueError(self._problem)
            return self._body, self._version

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        try:
            self._document, self._problem = self._look(), ""
            self._body = as_json(content_of(self._document)).encode()
            self._version = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        except (ValueError, OSError) as error:  # perhaps it is being written
            self._problem = str(error)
        ended = time.monotonic()
        self._next = ended + max(LEAST_SECONDS, SHARE * (ended - began))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, look: Callable[[], Document]) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.latest = _Latest(look)
        self.names = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(timeout=SECONDS):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone away: that is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    server_version, sys_version = "l2l", ""

    def do_GET(self) -> None:
        """Answer one request."""
        if self.headers.get("Host") not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, b"this is not the name of this server")
            return
        try:
            if self.path == "/":
                page = page_of(self.server.latest.document(), live=LIVE)
                self._answer(HTTPStatus.OK, page.encode(), kind="text/html; charset=utf-8")
            elif self.path == LIVE:
                self._live()
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"there is / and nothing else")
        except ValueError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())

    def _live(self) -> None:
        body, version = self.server.latest.content()
        if self.headers.get("If-None-Match") == version:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", version=version)
        else:
            self._answer(HTTPStatus.OK, body, kind="application/json", version=version)

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        *,
        kind: str = "text/plain; charset=utf-8",
        version: str = "",
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            **({"ETag": version} if version else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's business."""


def serve(look: Callable[[], Document], *, port: int, then: Callable[[str], None]) -> None:
    """Serve a page until it is interrupted.

    Args:
        look: what there is to see now; a ValueError of it is shown instead.
        port: 0: any that is free.
        then: is told the address.

    Raises:
        ValueError: the port cannot be had.
    """
    try:
        made = _Server(port, look)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port {port} of {ADDRESS} cannot be had: {error}. Name another with --port, or 0 for "
            "any that is free."
        ) from error
    with made as server:
        then(f"http://{ADDRESS}:{server.server_port}/")
        server.serve_forever(poll_interval=0.2)
