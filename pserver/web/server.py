"""``pserver web``: the process, the watched job, the rights to read and to act, and HTTP."""

from __future__ import annotations

import ipaddress
import json
import logging
import secrets
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pserver.control.collector import EACH_SECONDS, Collector
from pserver.errors import PServerError
from pserver.half_open import HalfOpen
from pserver.security.access import Access, always_open
from pserver.security.keys import Keys
from pserver.telemetry.job_view import JobView, Sample
from pserver.telemetry.logs import LimitedLog
from pserver.web.log_files import LogFiles

# ---- acts ----
#
# What an operator does from the page: saves the job, drains its servers; one at a time.


log = logging.getLogger(__name__)

Act = Callable[[], str]  # carries it out, and returns a sentence about the outcome


class Actions:
    """The acts that a page offers.  Any thread may call it.

    Args:
        acts: by name: "save", "drain"; none where the page is read-only.
        refusal: why there are none.
        told: called with the name and the result of each.
    """

    def __init__(
        self, acts: Mapping[str, Act], refusal: str, told: Callable[[str, str], None]
    ) -> None:
        self._acts, self._refusal, self._told = dict(acts), refusal, told
        self._lock = threading.Lock()  # held while one is done; guards the next
        self._last = ""

    def names(self) -> list[str]:
        """The names of the acts that the page offers."""
        return sorted(self._acts)

    def state(self) -> dict[str, Any]:
        """The state for the page, JSON-able."""
        return {
            "names": self.names(),
            "refusal": self._refusal,
            "busy": self._lock.locked(),
            "last": self._last,
        }

    def begin(self, name: str) -> bool:
        """Begins an act, in a thread of its own.

        Returns:
            False: another one is not over.

        Raises:
            KeyError: the page does not offer it.
        """
        act = self._acts[name]
        if not self._lock.acquire(blocking=False):
            return False
        threading.Thread(target=self._do, args=(name, act), name=f"act {name}").start()
        return True

    def _do(self, name: str, act: Act) -> None:
        try:
            kind, said = ("saved" if name == "save" else name), act()
        except (PServerError, OSError, ValueError) as error:
            kind, said = "refused", f"{name}: {' '.join(str(error).split())}"
        finally:
            self._lock.release()
        self._last = said
        log.info("%s: %s", name, said)
        self._told(kind, said)


# ---- sessions ----
#
# The rights to read the page, and to act: see [Note: one page, one token].


TOKEN = "token"  # in the address that is printed
CSRF = "x-pserver-csrf"


class Sessions:
    """Checks requests.

    Args:
        host: where the page is served, as the user has named it.
        port: of the page.
        secure: it is served over TLS.

    Attributes:
        token: its holder may read.
        csrf: the token that the page sends with each act.
    """

    def __init__(self, host: str, port: int, secure: bool) -> None:
        self.token, self.csrf = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._host, self._port, self._secure = host, port, secure
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    @property
    def url(self) -> str:
        """The address that the user opens."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        host = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{host}:{self._port}/?{TOKEN}={self.token}"

    @property
    def _scheme(self) -> str:
        return "https" if self._secure else "http"

    @property
    def _cookie(self) -> str:
        """The cookie's name: a host's ports share their cookies."""
        return f"pserver-{self._port}"

    def cookie(self) -> str:
        """The header that gives a browser the token: no script reads it, no other site sends it."""
        secure = "; Secure" if self._secure else ""
        return f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def knows_host(self, header: str | None) -> bool:
        """Whether a request names this page's host: an address, or a name that is known here; any
        other name may be one that a foreign DNS server has pointed here.
        """
        name, port = _divided(header or "")
        if port != str(self._port):
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_token(self, text: str) -> bool:
        """Whether a text is the token."""
        return secrets.compare_digest(text.encode(), self.token.encode())

    def may_read(self, cookie: str | None) -> bool:
        """Whether a request's cookies hold the token."""
        try:
            found = SimpleCookie(cookie or "").get(self._cookie)
        except CookieError:
            return False
        return found is not None and self.is_token(found.value)

    def may_act(self, headers: Mapping[str, str]) -> bool:
        """Whether a request that may read comes from the page itself.

        Args:
            headers: of the request, with names in lower case.
        """
        origin = headers.get("origin")
        host = headers.get("host", "")
        sent = headers.get(CSRF) or ""
        known = origin is not None and origin.lower() == f"{self._scheme}://{host}".lower()
        return known and secrets.compare_digest(sent.encode(), self.csrf.encode())


def _divided(header: str) -> tuple[str, str]:
    """Host and port of a Host header."""
    name, _, port = header.strip().lower().rpartition(":")
    return name.strip("[]"), port


# ---- page server ----
#
# HTTP: the page, its data, logs and acts.


SECONDS = 10.0  # for a stranger to show the token, and between two parts of a later request
MOST_OPEN = 64  # connections of strangers, and as many of holders of the token
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
    """Serves the page, in threads of its own.  Holders of the token of :attr:`url` may read.

    Args:
        host, port: where it listens; port 0 is any free one.
        page: gives the changes after a tick: see :meth:`pserver.telemetry.job_view.JobView.page`.
        logs: that the page may show.
        acts: that the page offers.
        context: for TLS; None: plain HTTP.

    Attributes:
        sessions: checks rights.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        page: Page,
        logs: LogFiles,
        acts: Actions,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        try:
            self._server = _Server(host, port, context)
        except OSError as error:
            raise OSError(f"web at {host}:{port}: {error.strerror or error}") from error
        bound = self._server.server_address[1]
        self.sessions = Sessions(host, bound, context is not None)
        self._server.answers = _Answers(self.sessions, page, logs, acts)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="web", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address that the user opens."""
        return self.sessions.url

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
    """The answers to requests; no HTTP."""

    def __init__(self, sessions: Sessions, page: Page, logs: LogFiles, acts: Actions) -> None:
        self.sessions, self._page, self._logs, self._acts = sessions, page, logs, acts

    def get(self, path: str, asked: Mapping[str, str]) -> tuple[str, bytes]:
        """The type and the bytes of an answer to a visitor who may read.

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
                    "csrf": self.sessions.csrf,
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
        """Begins an act, for a visitor who may read.

        Raises:
            _Refused: the request comes from elsewhere, or the act is not offered now.
        """
        if not self.sessions.may_act(headers):
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

    Visitors without the token are strangers: their number and time are bounded, and a new one
    displaces an older one.  So strangers do not lock out holders of the token.
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
            self.log.log("thread", f"no thread for a connection: {error}")
            self._forget(client_address)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Ends strangers that take too long; called a few times a second."""
        self._strangers.end_late()

    def admit(self, client_address: Any) -> bool:
        """Admits a stranger that has shown the token; returns whether there is room for its
        connection.
        """
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
            self.log.log("broken", f"{client_address[0]}: {error}", logging.INFO)
            self.shutdown_request(request)
        finally:
            self._forget(client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is no error of ours."""
        self.log.log("broken", f"the connection of {client_address[0]} broke", logging.INFO)


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
            if not self.server.answers.sessions.knows_host(self.headers.get("Host")):
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
        if url.path == "/" and answers.sessions.is_token(asked.get(TOKEN, "")):
            more = {"Set-Cookie": answers.sessions.cookie()}
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
        if not self.server.answers.sessions.may_read(self.headers.get("Cookie")):
            text = "open the address that `pserver web` has printed: it has a token"
            raise _Refused(HTTPStatus.FORBIDDEN, text)
        self._admit()

    def _admit(self) -> None:
        if not self.server.admit(self.client_address):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"expected up to {MOST_OPEN} pages")

    def version_string(self) -> str:
        """The value of the header Server."""
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


# ---- web ----
#
# The process of ``pserver web``: asks the servers, serves the page, ends with a signal.


READ_ONLY = "this page only shows (--read-only)"
NO_KEY = "acting needs an operator's key at the process that serves this page"


@dataclass(frozen=True, slots=True)
class PageSettings:
    """The settings of a served page.

    Attributes:
        endpoints: of the servers that are watched.
        host, port: of the page; port 0 is any free one.
        log_dir: the folder of the shown logs; None: none are shown.
        keys: the folder with this host's certificate, for a page beyond this host; None: HTTP.
        access_of: by endpoint, what is proved to the server.
        acts: by name, an operator's actions; they are offered where all servers accept this process
            as an operator.
        read_only: acts are never offered.
        seconds: between two questions to a server.
    """

    endpoints: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 0
    log_dir: Path | None = None
    keys: str | None = None
    access_of: Callable[[str], Access] = always_open
    acts: Mapping[str, Act] | None = None
    read_only: bool = False
    seconds: float = EACH_SECONDS


class Web:
    """A page that is served, with the job that it shows; a context manager.

    Args:
        settings: of the page.

    Attributes:
        url: the address for the user.

    Raises:
        OSError: it cannot listen there.
        ValueError: the folder of keys has no certificate for a page.
    """

    def __init__(self, settings: PageSettings) -> None:
        context = None if settings.keys is None else tls_context(settings.keys)
        self._view = JobView(settings.endpoints)
        self._lock = threading.Lock()  # guards it
        self._collector = Collector(
            settings.endpoints, self._take, settings.access_of, settings.seconds
        )
        self._server = PageServer(
            settings.host,
            settings.port,
            self.page,
            LogFiles(settings.log_dir),
            Actions(*offered(settings), self.add),
            context,
        )
        self.url = self._server.url

    def __enter__(self) -> Web:
        self._collector.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._collector.__exit__()

    def page(self, since: int) -> dict[str, Any]:
        """The changes after a tick: see :meth:`JobView.page`."""
        with self._lock:
            return self._view.page(since)

    def add(self, kind: str, text: str) -> None:
        """Adds an event of this process to the time axis."""
        with self._lock:
            tick = self._view.curves.tick + 1  # pages know the present one already
            self._view.events.add(tick, time.time(), kind, text)

    def _take(self, sample: Sample) -> None:
        with self._lock:
            self._view.add(sample)


def serve(settings: PageSettings) -> int:
    """Serves the page until SIGINT or SIGTERM; prints its address.

    Returns:
        The exit status: 0.

    Raises:
        OSError, ValueError: as :class:`Web`.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Web(settings) as web:
        print(f"pserver web at {web.url}", flush=True)
        while not ended.wait(1.0):  # a wait without an end would keep signals away
            pass
    return 0


def offered(settings: PageSettings) -> tuple[Mapping[str, Act], str]:
    """The acts that the page offers; and the reason, where there are none."""
    if settings.read_only:
        return {}, READ_ONLY
    if not all(is_operator(settings.access_of(each)) for each in settings.endpoints):
        return {}, NO_KEY
    return settings.acts or {}, ""


def is_operator(access: Access) -> bool:
    """Whether servers accept the holder as an operator because of a key that it has: the lesser of
    the roles of its secret and its certificate counts.
    """
    if access.is_open:
        return False
    certified = access.keys is None or access.keys.bearer.role == "operator"
    return certified and access.role.word == "operator"


def tls_context(folder: str) -> Callable[[], ssl.SSLContext]:
    """A function that makes the context of each connection: TLS 1.3 with the host's certificate, as
    the folder has it then.  Browsers show no certificate: the page's token is the key.

    Raises:
        ValueError: the folder has no certificate of a server; one sentence.
    """
    try:
        keys = Keys(folder, ("server",))
    except ValueError as error:
        raise ValueError(f"keys: {error}") from error

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.load_cert_chain(keys.directory / "server.pem", keys.directory / "server.key")
        return made

    context()
    return context
