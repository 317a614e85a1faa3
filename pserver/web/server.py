"""HTTP: the page, its data, logs and acts."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pserver.half_open import HalfOpen
from pserver.telemetry.logs import LimitedLog
from pserver.web.acts import Acts
from pserver.web.log_files import LogFiles
from pserver.web.visitors import TOKEN, Visitors

log = logging.getLogger(__name__)

SECONDS = 10.0  # for a stranger to show the token, and between two parts of a later request
MOST_OPEN = 64  # connections of strangers, and as many of who has the token
MOST_BODY = 1024  # bytes that a request may have behind its headers
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Page = Callable[[int], dict[str, Any]]


class PageServer:
    """Serves the page, in threads of its own.  Who has the token of :attr:`url` may read.

    Args:
        host, port: where it listens; port 0 is any free one.
        page: what is new since a tick: see :meth:`pserver.web.watched.Watched.page`.
        logs: that the page may show.
        acts: made with this server's visitors; that it offers.
        context: for TLS; None: plain HTTP.

    Attributes:
        visitors: who may do what.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        page: Page,
        logs: LogFiles,
        acts: Acts,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        try:
            self._server = _Server(host, port, context)
        except OSError as error:
            raise OSError(f"web at {host}:{port}: {error.strerror or error}") from error
        bound = self._server.server_address[1]
        self.visitors = Visitors(host, bound, context is not None)
        self._server.answers = _Answers(self.visitors, page, logs, acts)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="web", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """What the user opens."""
        return self.visitors.url

    def close(self) -> None:
        """Ends it; harmless when called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of the answer.
        text: one sentence.
    """

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Answers:
    """What is answered to whom; no HTTP."""

    def __init__(self, visitors: Visitors, page: Page, logs: LogFiles, acts: Acts) -> None:
        self.visitors, self._page, self._logs, self._acts = visitors, page, logs, acts

    def get(self, path: str, asked: Mapping[str, str]) -> tuple[str, bytes]:
        """The type and the bytes of an answer to somebody who may read.

        Raises:
            _Refused: there is nothing of this name.
        """
        if path in FILES:
            name, kind = FILES[path]
            return kind, (resources.files("pserver.web") / "static" / name).read_bytes()
        if path == "/data":
            since = _number(asked.get("since", "0"))
            return _json(
                {
                    **self._page(since),
                    "acts": self._acts.state(),
                    "csrf": self.visitors.csrf,
                    "logs": self._logs.names(),
                }
            )
        if path == "/log":
            try:
                lines = self._logs.tail(asked.get("name", ""), _number(asked.get("lines", "100")))
            except KeyError:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is no such log") from None
            return _json({"lines": lines})
        raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def post(self, path: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        """Begins an act, for somebody who may read.

        Raises:
            _Refused: the request comes from elsewhere, or the act is not offered now.
        """
        if not self.visitors.may_act(headers):
            raise _Refused(HTTPStatus.FORBIDDEN, "this request does not come from the page")
        try:
            begun = self._acts.begin(path.removeprefix("/act/"))
        except KeyError:
            text = "this page does not offer that"
            raise _Refused(HTTPStatus.FORBIDDEN, text) from None
        if not begun:
            raise _Refused(HTTPStatus.CONFLICT, "another act is not over yet")
        return _json({"begun": True})


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few.

    Who has not shown the token is a stranger: there are so many of them, each for a time, and an
    older one makes room for one that comes.  So strangers do not lock out who has the token.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_OPEN
    answers: _Answers

    def __init__(self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context, self.log = context, LimitedLog(log)
        self._strangers = HalfOpen(MOST_OPEN, SECONDS)
        self._lock = threading.Lock()  # guards the two below
        self._begun: dict[Any, tuple[int, socket.socket]] = {}  # by address and port
        self._known: set[Any] = set()  # those of them that have shown the token
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a connection's thread."""
        handle = request.dup()  # TLS puts another socket in the place of this one
        number = self._strangers.begin(str(client_address[0]), partial(_end, handle))
        with self._lock:
            self._begun[client_address] = number, handle
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # the system has no more threads
            self.log.say("thread", f"no thread for a connection: {error}")
            self._forget(client_address)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Ends strangers that take too long; called a few times a second."""
        self._strangers.end_late()

    def admit(self, client_address: Any) -> bool:
        """A stranger has shown the token: whether there is room for its connection."""
        with self._lock:
            if len(self._known) >= MOST_OPEN and client_address not in self._known:
                return False
            self._known.add(client_address)
            number, _ = self._begun[client_address]
        self._strangers.over(number)
        return True

    def _forget(self, client_address: Any) -> None:
        with self._lock:
            self._known.discard(client_address)
            number, handle = self._begun.pop(client_address)
        self._strangers.over(number)
        handle.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection, in its thread."""
        try:
            request.settimeout(SECONDS)
            if self._context is not None:
                request = self._context().wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError as error:
            self.log.say("broken", f"{client_address[0]}: {error}", logging.INFO)
            self.shutdown_request(request)
        finally:
            self._forget(client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is no error of ours."""
        self.log.say("broken", f"the connection of {client_address[0]} broke", logging.INFO)


class _Handler(BaseHTTPRequestHandler):
    """One request after another of a connection."""

    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    server: _Server

    def do_GET(self) -> None:
        """The page, its files, its data."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """An act."""
        self._answer(self._post)

    def _answer(self, answer: Callable[[], tuple[str, bytes, Mapping[str, str]]]) -> None:
        more: Mapping[str, str] = {}
        try:
            if not self.server.answers.visitors.knows_host(self.headers.get("Host")):
                raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "this page has another name")
            kind, body, more = answer()
            status = HTTPStatus.OK
        except _Refused as refused:
            status, kind = refused.status, "text/plain; charset=utf-8"
            body = f"{refused}\n".encode()
            self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _get(self) -> tuple[str, bytes, Mapping[str, str]]:
        answers, url = self.server.answers, urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
        more: Mapping[str, str] = {}
        if url.path == "/" and answers.visitors.is_token(asked.get(TOKEN, "")):
            more = {"Set-Cookie": answers.visitors.cookie()}
            self._admit()
        else:
            self._check_reader()
        return *answers.get(url.path, asked), more

    def _post(self) -> tuple[str, bytes, Mapping[str, str]]:
        self._check_reader()
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MOST_BODY:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "expected a request without body")
        self.rfile.read(int(length))
        headers = {name.lower(): value for name, value in self.headers.items()}
        found = self.server.answers.post(urlsplit(self.path).path, headers)
        return *found, {}

    def _check_reader(self) -> None:
        if not self.server.answers.visitors.may_read(self.headers.get("Cookie")):
            text = "open the address that `pserver web` has printed: it has a token"
            raise _Refused(HTTPStatus.FORBIDDEN, text)
        self._admit()

    def _admit(self) -> None:
        if not self.server.admit(self.client_address):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"expected up to {MOST_OPEN} pages")

    def version_string(self) -> str:
        """What it says of itself."""
        return "pserver"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their first one has the token."""


def _end(handle: socket.socket) -> None:
    """Ends a connection under its thread."""
    with suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise _Refused(HTTPStatus.BAD_REQUEST, "expected a number")
    return int(text)


def _json(found: dict[str, Any]) -> tuple[str, bytes]:
    return "application/json", json.dumps(found, allow_nan=False).encode()
