"""Who may read the page, and who may act: see [Note: one page, one token]."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

TOKEN = "token"  # in the address that is printed
CSRF = "x-pserver-csrf"


class Visitors:
    """Checks requests.

    Args:
        host: where the page is served, as the user has named it.
        port: of the page.
        secure: it is served over TLS.

    Attributes:
        token: whoever has it may read.
        csrf: what the page sends with each act.
    """

    def __init__(self, host: str, port: int, secure: bool) -> None:
        self.token, self.csrf = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._host, self._port, self._secure = host, port, secure
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    @property
    def url(self) -> str:
        """What the user opens."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        host = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{host}:{self._port}/?{TOKEN}={self.token}"

    @property
    def _scheme(self) -> str:
        return "https" if self._secure else "http"

    @property
    def _cookie(self) -> str:
        """Its name: a host's ports share their cookies."""
        return f"pserver-{self._port}"

    def cookie(self) -> str:
        """The header that gives a browser the token: no script reads it, no other site sends it."""
        secure = "; Secure" if self._secure else ""
        return f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def knows_host(self, header: str | None) -> bool:
        """Whether a request names this page's host: an address, or a name that is known here; any
        other name may be one that somebody else's DNS server has pointed here.
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
