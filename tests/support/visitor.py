"""Somebody who asks for a page of ``pserver web``, header by header."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

SECONDS = 10.0


class Got(NamedTuple):
    """An answer: its status, its headers by name in lower case, its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Visitor:
    """One browser, without one.

    Args:
        url: that was printed.

    Attributes:
        cookie: what it has been given; "" before that.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.port, self.query = parts.port, f"/?{parts.query}"
        self.host = f"{parts.hostname}:{parts.port}"
        self.cookie = ""

    def open(self) -> Got:
        """Opens the printed address, and keeps its cookie."""
        found = self.get(self.query)
        self.cookie = found.headers.get("set-cookie", "").partition(";")[0]
        return found

    def get(self, path: str, method: str = "GET", **headers: str) -> Got:
        """Asks for a path as it stands; a header whose value is empty is left out."""
        known = {"Host": self.host, "Cookie": self.cookie, **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in known.items():
                if value:
                    connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Got(answer.status, found, answer.read())
        finally:
            connection.close()

    def post(self, path: str, csrf: str, **headers: str) -> Got:
        """Acts as the page does."""
        known = {"Origin": f"http://{self.host}", "x_pserver_csrf": csrf, "Content_Length": "0"}
        return self.get(path, "POST", **{**known, **headers})
