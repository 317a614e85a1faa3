"""The process of ``pserver web``: asks the servers, serves the page, ends with a signal."""

from __future__ import annotations

import signal
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pserver.security.access import Access, always_open
from pserver.security.keys import Keys
from pserver.web.acts import Act, Acts
from pserver.web.collector import EACH_SECONDS, Collector
from pserver.web.log_files import LogFiles
from pserver.web.page_server import PageServer

READ_ONLY = "this page only shows (--read-only)"
NO_KEY = "acting needs an operator's key at the process that serves this page"


@dataclass(frozen=True, slots=True)
class Settings:
    """How the page is served.

    Attributes:
        endpoints: of the servers that are watched.
        host, port: of the page; port 0 is any free one.
        log_dir: whose logs are shown; None: none are.
        keys: the folder with this host's certificate, for a page beyond this host; None: HTTP.
        access_of: by endpoint, what is proved to the server.
        acts: by name, what an operator may do; they are offered where all servers take this
            process for one.
        read_only: they are never.
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
    """A page that is served, and what it needs; a context manager.

    Args:
        settings: how.

    Attributes:
        url: what the user opens.

    Raises:
        OSError: it cannot listen there.
        ValueError: the folder of keys has no certificate for a page.
    """

    def __init__(self, settings: Settings) -> None:
        context = None if settings.keys is None else tls_context(settings.keys)
        self._collector = Collector(settings.endpoints, settings.access_of, settings.seconds)
        self._server = PageServer(
            settings.host,
            settings.port,
            self._collector.page,
            LogFiles(settings.log_dir),
            Acts(*offered(settings), self._collector.add),
            context,
        )
        self.url = self._server.url

    def __enter__(self) -> Web:
        self._collector.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._collector.__exit__()


def serve(settings: Settings) -> int:
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


def offered(settings: Settings) -> tuple[Mapping[str, Act], str]:
    """The acts that the page offers; and why there are none, where that is so."""
    if settings.read_only:
        return {}, READ_ONLY
    if not all(is_operator(settings.access_of(each)) for each in settings.endpoints):
        return {}, NO_KEY
    return settings.acts or {}, ""


def is_operator(access: Access) -> bool:
    """Whether servers take the holder for an operator because of a key that it has: of what the
    secret and the certificate give the lesser counts.
    """
    if access.is_open:
        return False
    certified = access.keys is None or access.keys.bearer.role == "operator"
    return certified and access.role.word == "operator"


def tls_context(folder: str) -> Callable[[], ssl.SSLContext]:
    """What makes the context of each connection: TLS 1.3 with the host's certificate, as the
    folder has it then.  Browsers show no certificate: the page's token is the key.

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
