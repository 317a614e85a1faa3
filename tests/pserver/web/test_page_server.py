"""The page of ``pserver web`` over real HTTP: who reads, who acts, which files it shows."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pserver.config import ServerConfig
from pserver.launcher.cluster import free_port
from pserver.security.access import Access
from pserver.security.tokens import Role, Secret
from pserver.service.server import Server
from pserver.web import server
from pserver.web.log_files import LogFiles
from pserver.web.server import MOST_OPEN, Actions, PageServer
from tests.support.cluster_keys import key_folder, keys_of
from tests.support.visitor import Visitor
from tests.support.waiting import eventually

Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Told:
    """What acts have come to."""
    return []


@pytest.fixture
def gate() -> threading.Event:
    """Lets an act end."""
    return threading.Event()


@pytest.fixture
def page(tmp_path: Path, told: Told, gate: threading.Event) -> Iterator[PageServer]:
    """A page with a log and two acts."""

    def save() -> str:
        assert gate.wait(10.0)
        return "saved step 7"

    def drain() -> str:
        raise OSError("the disk\nis full")

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "secret.log").write_text("secret")
    acts = Actions({"save": save, "drain": drain}, "", lambda *said: told.append(said))
    logs = LogFiles(tmp_path / "logs")
    page = PageServer("127.0.0.1", 0, lambda since: {"tick": since}, logs, acts)
    yield page
    gate.set()
    page.close()


@pytest.fixture
def visitor(page: PageServer) -> Visitor:
    """Who has opened the printed address."""
    visitor = Visitor(page.url)
    assert visitor.open().status == 200
    return visitor


def test_the_token_is_needed(page: PageServer) -> None:
    """Without it nothing is shown but the way to it; with it a cookie that no script reads."""
    stranger = Visitor(page.url)
    for path in ("/", "/data", "/page.js", "/log?name=trainer-0.log", "/?token=", "/?token=x"):
        refused = stranger.get(path)
        assert refused.status == 403 and b"token" in refused.body
        assert page.sessions.token.encode() not in refused.body
    stranger.cookie = f"pserver-{stranger.port}=x"
    assert stranger.get("/data").status == 403

    opened = stranger.open()
    assert opened.status == 200 and b"<h1>pserver" in opened.body
    assert opened.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert stranger.get("/data").data["tick"] == 0
    assert stranger.get("/data?since=12").data["tick"] == 12


def test_nothing_is_loaded_from_elsewhere(visitor: Visitor) -> None:
    """The policy forbids it, scripts within the page too, and frames; the files keep to it."""
    for path in ("/", "/page.js", "/page.css", "/icon.svg", "/data"):
        found = visitor.get(path)
        assert found.status == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["cache-control"] == "no-store"
        assert found.headers["referrer-policy"] == "no-referrer"
        text = found.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text
        assert "style=" not in text and "innerHTML" not in text and "onclick" not in text


@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "[::1"])
def test_another_name_is_refused(visitor: Visitor, host: str) -> None:
    """A name that somebody else's DNS server has pointed here, with the right cookie."""
    named = Visitor("http://127.0.0.1:1")
    named.port, named.cookie = visitor.port, visitor.cookie
    named.host = host.format(port=visitor.port)

    assert named.get("/data").status in (400, 421)
    for good in (f"localhost:{visitor.port}", f"[::1]:{visitor.port}", f"10.1.2.3:{visitor.port}"):
        named.host = good
        assert named.get("/data").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.log",
        "/static/page.js",
        "/page.js/",
        "/log",
        "/log?name=../secret.log",
        "/log?name=..%2Fsecret.log",
        "/log?name=link.log",
        "/log?name=folder.log",
        "/log?name=trainer-0",
        "/log?name=/etc/passwd",
        "/log?name=trainer-0.log%00",
    ],
)
def test_only_logs_of_the_folder_are_shown(visitor: Visitor, path: str, tmp_path: Path) -> None:
    """No other folder, no link, nothing that is no regular file."""
    os.symlink(tmp_path / "secret.log", tmp_path / "logs" / "link.log")
    (tmp_path / "logs" / "folder.log").mkdir()
    os.mkfifo(tmp_path / "logs" / "pipe.log")
    found = visitor.get(path)

    assert found.status == 404 and b"secret" not in found.body
    assert visitor.get("/data").data["logs"] == ["trainer-0.log"]


def test_the_last_lines_of_a_log(visitor: Visitor, tmp_path: Path) -> None:
    """As many as are asked for, of a long one too; a number that is none is refused."""
    assert visitor.get("/log?name=trainer-0.log&lines=2").data["lines"] == ["two", "three"]
    assert visitor.get("/log?name=trainer-0.log&lines=0").data["lines"] == []
    long = "".join(f"line {number} {chr(228) * 50}\n" for number in range(10_000))
    (tmp_path / "logs" / "trainer-0.log").write_text(long)
    lines = visitor.get("/log?name=trainer-0.log&lines=100000").data["lines"]
    assert len(lines) == 500 and lines[-1].startswith("line 9999 ")
    for number in ("-1", "x", "9" * 30, "1e3"):
        assert visitor.get(f"/log?name=trainer-0.log&lines={number}").status == 400


def test_acting_needs_the_page_itself(
    page: PageServer, visitor: Visitor, told: Told, gate: threading.Event
) -> None:
    """Its second token, and its origin; one act at a time, and what comes of it is told."""
    csrf = visitor.get("/data").data["csrf"]
    for wrong in (
        visitor.post("/act/save", ""),
        visitor.post("/act/save", "x"),
        visitor.post("/act/save", csrf, Origin="http://evil.example"),
        visitor.post("/act/save", csrf, Origin=""),
        visitor.post("/act/save", csrf, Cookie="a=b"),
        visitor.post("/act/reset", csrf),
        visitor.get("/act/save"),
    ):
        assert wrong.status in (403, 404)
    assert visitor.post("/act/save", csrf, Content_Length="5000").status == 413

    assert visitor.post("/act/save", csrf).status == 200
    assert visitor.post("/act/drain", csrf).status == 409
    assert visitor.get("/data").data["acts"]["busy"] is True
    gate.set()
    eventually(lambda: told == [("saved", "saved step 7")])
    eventually(lambda: visitor.post("/act/drain", csrf).status == 200)
    eventually(lambda: told[1:] == [("refused", "drain: the disk is full")])
    assert visitor.get("/data").data["acts"]["last"] == "drain: the disk is full"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "HEAD"])
def test_other_methods_are_unknown(visitor: Visitor, method: str) -> None:
    """There are two."""
    assert visitor.get("/data", method).status == 501


def test_a_page_over_tls(tmp_path: Path) -> None:
    """With the host's certificate, and a cookie that never travels in the clear."""
    folder = key_folder() / "a"
    page = PageServer(
        "127.0.0.1",
        0,
        lambda since: {},
        LogFiles(None),
        Actions({}, "", lambda *_: None),
        server.tls_context(str(folder)),
    )
    context = ssl.create_default_context(cadata=(folder / "authority.pem").read_text())
    context.check_hostname = False  # it names host "a"
    try:
        assert page.url.startswith("https://")
        with urllib.request.urlopen(page.url, context=context, timeout=10) as answer:
            assert answer.headers["Set-Cookie"].endswith("; Secure")
    finally:
        page.close()
    with pytest.raises(ValueError, match=r"keys: expected a folder with the file server\.key"):
        server.tls_context(str(tmp_path))


def test_a_port_that_is_taken(page: PageServer, visitor: Visitor) -> None:
    """One sentence."""
    port = visitor.port or 0
    with pytest.raises(OSError, match=f"^web at 127.0.0.1:{port}: Address already in use$"):
        PageServer(
            "127.0.0.1", port, lambda since: {}, LogFiles(None), Actions({}, "", lambda *_: None)
        )


def test_only_an_operator_is_offered_acts() -> None:
    """By its key: a trainer's key, or none, shows and does not act; nor does --read-only.  Of a
    secret and a certificate the lesser counts.
    """
    operator, trainer = Secret.make(), keys_of("trainer")
    acts = {"save": lambda: "saved"}
    for access, read_only, expected in (
        (Access(operator), False, (acts, "")),
        (Access(None, keys_of("operator")), False, (acts, "")),
        (Access(operator), True, ({}, server.READ_ONLY)),
        (Access(operator, trainer), False, ({}, server.NO_KEY)),
        (Access(None, trainer), False, ({}, server.NO_KEY)),
        (Access(operator.of(Role.TRAINER)), False, ({}, server.NO_KEY)),
        (Access(), False, ({}, server.NO_KEY)),
    ):

        def access_of(endpoint: str, access: Access = access) -> Access:
            return access

        settings = server.PageSettings(["a:1"], access_of=access_of, acts=acts, read_only=read_only)
        assert server.offered(settings) == expected


def test_a_server_that_goes_and_comes_again() -> None:
    """The page says so, and goes on."""
    endpoint = f"127.0.0.1:{free_port()}"
    with server.Web(server.PageSettings([endpoint], seconds=0.05)) as served:
        visitor = Visitor(served.url)
        visitor.open()

        def states() -> list[str]:
            now = visitor.get("/data").data["now"]
            return [each["state"] for each in now.get("servers", [])]

        with Server(ServerConfig(endpoint=endpoint)):
            eventually(lambda: states() == ["empty"])
        eventually(lambda: states() == ["unreachable"])
        with Server(ServerConfig(endpoint=endpoint)):
            eventually(lambda: states() == ["empty"])
            kinds = [event["kind"] for event in visitor.get("/data").data["events"]]
            kinds = [kind for kind in kinds if kind not in ("draining", "back")]
            assert kinds[-2:] == ["unreachable", "restarted"]


def strangers(page: PageServer, count: int) -> list[socket.socket]:
    """Connections that begin a request and do not end it."""
    made = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", Visitor(page.url).port), 10.0)
        connection.sendall(b"GET / HTTP/1.1\r\n")
        made.append(connection)
    return made


def test_strangers_do_not_lock_out_who_has_the_token(page: PageServer, visitor: Visitor) -> None:
    """More of them than there is room for: the oldest make room, for one another and for us."""
    slow = strangers(page, MOST_OPEN + 16)

    assert [visitor.get("/data").status for _ in range(8)] == [200] * 8
    assert Visitor(page.url).open().status == 200
    for each in slow:
        each.close()


def test_a_stranger_s_time_is_that_of_all_that_it_sends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A byte now and then does not prolong it."""
    monkeypatch.setattr("pserver.web.server.SECONDS", 0.5)
    acts = Actions({}, "", lambda *said: None)
    page = PageServer("127.0.0.1", 0, lambda since: {}, LogFiles(tmp_path), acts)
    try:
        [slow] = strangers(page, 1)
        ended = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not ended.wait(0.05):
                    slow.sendall(b"X")

        thread = threading.Thread(target=drip)
        thread.start()
        slow.settimeout(10.0)
        with suppress(ConnectionError):
            assert slow.recv(1) == b""
        ended.set()
        thread.join()
        slow.close()
    finally:
        page.close()
