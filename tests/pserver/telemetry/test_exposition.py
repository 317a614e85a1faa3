"""The page of metrics: what it answers, and whom."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver.config import ServerConfig, metrics_place
from pserver.security import keys
from pserver.telemetry import metrics
from pserver.telemetry.metrics import MOST_OPEN, Exposition, Labelled
from tests.support.cluster_keys import foreign_folder, keys_of
from tests.support.scraped import Scraped
from trainer.environment.environment import Connection

HOST = "127.0.0.1"


class One(Collector):
    """One counter."""

    def __init__(self) -> None:
        self.counter = Counter("found", "What was found.", ["where"], registry=None)

    def collect(self) -> Iterator[Metric]:
        yield from self.counter.collect()


@pytest.fixture
def one() -> One:
    """What the page shows."""
    return One()


@pytest.fixture
def page(one: One) -> Iterator[Exposition]:
    """A page, in the clear."""
    labelled = Labelled(lambda: {"job": "clicks"}, lambda: [one])
    page = Exposition(HOST, 0, labelled, None)
    yield page
    page.close()


def test_a_page_is_as_of_now(page: Exposition, one: One) -> None:
    """Counters have their labels and those of the process, and no time of creation."""
    one.counter.labels("here").inc(2)
    assert Scraped.of(page.port).value("found_total", where="here", job="clicks") == 2
    one.counter.labels("here").inc()
    scraped = Scraped.of(page.port)

    assert scraped.value("found_total") == 3
    assert [family.name for family in scraped.families] == ["found"]


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/metrics?x=1", 200), ("/etc", 404)])
def test_there_is_one_page(page: Exposition, path: str, status: int) -> None:
    """Any other is not found."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{page.port}{path}", timeout=10) as answer:
            assert answer.status == status
    except urllib.error.HTTPError as error:
        assert error.code == status


def test_other_methods_are_refused(page: Exposition) -> None:
    """Nothing can be posted."""
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(f"http://{HOST}:{page.port}/metrics", data=b"x", timeout=10)


def test_who_says_nothing_keeps_nobody_out(page: Exposition) -> None:
    """Of more connections than there may be the oldest is closed."""
    idle = [socket.create_connection((HOST, page.port), 10) for _ in range(2 * MOST_OPEN)]
    Scraped.of(page.port)
    assert idle[0].recv(1) == b""
    for each in idle:
        each.close()


def test_who_is_slow_is_closed(page: Exposition, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that does not come in time ends."""
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 0.1)
    monkeypatch.setattr(page._server.RequestHandlerClass, "timeout", 0.1)
    with socket.create_connection((HOST, page.port), 10) as slow:
        slow.sendall(b"GET /metr")
        assert slow.recv(1) == b""


def test_garbage_is_no_error_of_ours(
    page: Exposition, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stranger's bytes bring neither a traceback nor the page down."""
    for garbage in (
        b"\x16\x03\x01\x02",
        b"GET",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200,
    ):
        with socket.create_connection((HOST, page.port), 10) as stranger:
            stranger.sendall(garbage)
    Scraped.of(page.port)
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def test_a_port_that_is_taken_is_named(page: Exposition) -> None:
    """In one sentence."""
    with pytest.raises(OSError, match=rf"metrics at {HOST}:{page.port}: "):
        Exposition(HOST, page.port, Labelled(dict, list), None)


def test_a_page_ends(page: Exposition) -> None:
    """Its port is free again; ending it twice is harmless."""
    page.close()
    page.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, page.port), 10)


@pytest.fixture
def secured(one: One) -> Iterator[Exposition]:
    """A page of a process with keys."""
    page = Exposition(HOST, 0, one, keys_of("server"))
    yield page
    page.close()


def ask(connection: socket.socket) -> bytes:
    """What comes back for a request."""
    connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize("role", ["server", "trainer", "operator"])
def test_with_keys_every_role_reads(secured: Exposition, one: One, role: str) -> None:
    """TLS 1.3, with certificates of both ends."""
    one.counter.labels("here").inc()
    with socket.create_connection((HOST, secured.port), 10) as connection:
        dialled = keys.dial(connection, keys_of(role), HOST)
        answer = ask(dialled)
        dialled.close()

    assert answer.startswith(b"HTTP/1.0 200") and b'found_total{where="here"} 1.0' in answer


def test_with_keys_nobody_else_reads(secured: Exposition) -> None:
    """Neither without a certificate, nor with one of another cluster, nor in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    foreign = keys_of("trainer", foreign_folder()).client_context()
    foreign.check_hostname, foreign.verify_mode = False, ssl.CERT_NONE
    for each in (context, foreign):
        with socket.create_connection((HOST, secured.port), 10) as connection:
            with pytest.raises(OSError):  # noqa: PT011  # TLS's alert, or a reset
                with each.wrap_socket(connection) as dialled:
                    assert not ask(dialled), "an answer"
                    raise OSError("it has ended")
    with socket.create_connection((HOST, secured.port), 10) as connection:
        try:
            assert b"HTTP" not in ask(connection)
        except ConnectionResetError:
            return


@pytest.mark.parametrize("text", ["x", "a:b", "70000", "", "-1", "host:"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    """The message names what was written."""
    with pytest.raises(ValueError, match="metrics: expected PORT or HOST:PORT, with a port"):
        ServerConfig(metrics=text)


def test_beyond_loopback_it_wants_protection() -> None:
    """Keys, or the word that nobody else is there; a port alone is on the process's own host."""
    with pytest.raises(ValueError, match=r"metrics: 0\.0\.0\.0:9400 is beyond this host"):
        ServerConfig(metrics="0.0.0.0:9400")
    with pytest.raises(ValueError, match="PSERVER_METRICS: 10.0.0.1:9400 is beyond this host"):
        Connection(metrics="10.0.0.1:9400")

    assert metrics_place("metrics", "9400", "127.0.0.2", None, False) == ("127.0.0.2", 9400)
    assert metrics_place("metrics", "10.0.0.1:9", HOST, None, True) == ("10.0.0.1", 9)
    Connection(metrics="9400")
    Connection(metrics="10.0.0.1:9400", insecure=True)


def test_a_jobs_name_prints() -> None:
    """It becomes a label."""
    with pytest.raises(ValueError, match="job: expected up to 100 characters that print"):
        ServerConfig(job="a\nb")
    with pytest.raises(ValueError, match="PSERVER_JOB: expected up to 100 characters that print"):
        Connection(job="a" * 101)
