"""The proxy of the control port: bytes pass, strangers are bounded, who is admitted stays."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pserver.control.control_server import ControlServer
from pserver.limits import Limits
from pserver.transport import strangers
from pserver.transport.strangers import PrivateSocket, ProxiedConnection, TcpProxy
from tests.support.waiting import eventually

SECONDS = 10.0


class Behind:
    """What listens behind a proxy: it keeps what it accepts."""

    def __init__(self, private: PrivateSocket) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(private.path)
        self._listening.listen(4096)
        private.bound()
        self.accepted: list[socket.socket] = []
        self.names: list[str] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, name = self._listening.accept()
                connection.settimeout(SECONDS)
                self.names.append(f"unix-abstract:{name[1:].decode()}")
                self.accepted.append(connection)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for each in self.accepted:
            each.close()


@contextmanager
def proxied(**limits: float) -> Iterator[tuple[TcpProxy, Behind, Callable[[], socket.socket]]]:
    """A proxy, what is behind it, and what opens a connection."""
    with ExitStack() as stack:
        private = PrivateSocket()
        stack.callback(private.close)
        behind = Behind(private)
        stack.callback(behind.close)
        proxy = TcpProxy("127.0.0.1", 0, private, Limits(**limits))  # type: ignore[arg-type]
        stack.callback(proxy.close, 0.0)
        proxy.start()

        def opened() -> socket.socket:
            address = ("127.0.0.1", proxy.port)
            return stack.enter_context(socket.create_connection(address, SECONDS))

        yield proxy, behind, opened


def ends(connection: socket.socket) -> bool:
    """Whether the other end closes it, and says nothing before."""
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def admit(proxy: TcpProxy, client: socket.socket, name: str) -> None:
    """The proxy knows a name soon after what is behind it has accepted the connection."""
    eventually(lambda: proxy.peer(name) == f"127.0.0.1:{client.getsockname()[1]}")
    proxy.admit(name)


def test_bytes_pass_both_ways_however_slowly_they_are_read() -> None:
    """16 MB each way at once, and then what a server says before its end."""
    data = bytes(range(256)) * 2**16
    with proxied() as (proxy, behind, opened):
        client = opened()
        client.sendall(b"!")
        eventually(lambda: bool(behind.accepted))
        server = behind.accepted[0]
        admit(proxy, client, behind.names[0])
        received: dict[str, bytearray] = {"client": bytearray(), "server": bytearray()}

        def read(name: str, source: socket.socket, size: int) -> None:
            while len(received[name]) < size:
                received[name] += source.recv(100_000)

        threads = [
            threading.Thread(target=read, args=("client", client, len(data))),
            threading.Thread(target=read, args=("server", server, len(data) + 1)),
            threading.Thread(target=client.sendall, args=(data,)),
            threading.Thread(target=server.sendall, args=(data,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert received == {"client": data, "server": b"!" + data}

        server.sendall(data[:2000] + b"last")
        server.close()
        said = bytearray()
        while part := client.recv(2**16):
            said += part
        assert said == data[:2000] + b"last"


def test_a_flood_displaces_itself_and_nobody_who_is_admitted() -> None:
    """Of 200 connections of strangers the latest eight stay; a trainer's does, however old."""
    with proxied(connections=16) as (proxy, behind, opened):
        trainer = opened()
        trainer.sendall(b"t")
        eventually(lambda: bool(behind.names))
        admit(proxy, trainer, behind.names[0])
        flood = []
        for _ in range(200):
            flood.append(opened())
            flood[-1].sendall(b"x")
        assert all(ends(each) for each in flood[:-8])

        late = opened()
        late.sendall(b"l")
        eventually(lambda: len(behind.names) > 1)
        trainer.sendall(b"more")
        assert behind.accepted[0].recv(10) in (b"t", b"tmore", b"more")
        behind.accepted[0].sendall(b"yes")
        assert trainer.recv(10) == b"yes"


def test_those_who_are_admitted_have_a_bound_too(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, with the setting."""
    with proxied(connections=4) as (proxy, behind, opened):
        clients = []
        for index in range(4):
            clients.append(opened())
            clients[-1].sendall(b"x")
            eventually(lambda index=index: len(behind.names) > index)
            admit(proxy, clients[-1], behind.names[-1])
        assert ends(opened())
    assert caplog.text.count("--max-connections") == 1


def test_who_says_nothing_ends_and_the_server_never_sees_him() -> None:
    """Neither one who waits nor one who leaves."""
    with proxied(hello_seconds=0.3) as (_, behind, opened):
        opened().close()
        silent = opened()
        assert ends(silent)
        assert not behind.accepted


def test_strangers_together_send_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who has sent most ends; another one's few bytes arrive."""
    monkeypatch.setattr(strangers, "STRANGERS_BYTES", 2**20)
    with proxied() as (_, behind, opened):
        small, large = opened(), opened()
        small.sendall(b"few")
        eventually(lambda: len(behind.accepted) == 1)
        large.sendall(b"x")
        eventually(lambda: len(behind.accepted) == 2)
        for each in behind.accepted:  # somebody reads
            threading.Thread(target=_drain, args=(each,), daemon=True).start()
        with suppress(ConnectionError):
            large.sendall(bytes(2**23))
        assert ends(large)
        behind.accepted[0].sendall(b"yes")
        assert small.recv(10) == b"yes"


def _drain(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(2**16):
            pass


def test_a_proxy_that_refuses_goes_on_with_what_is_open() -> None:
    """A new connection is refused by the system."""
    with proxied() as (proxy, behind, opened):
        client = opened()
        client.sendall(b"x")
        eventually(lambda: bool(behind.accepted))
        proxy.refuse()

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", proxy.port), SECONDS).close()
            except (ConnectionRefusedError, ConnectionResetError):
                return True
            return False

        eventually(refused)
        behind.accepted[0].sendall(b"yes")
        assert client.recv(10) == b"yes"


def test_the_socket_behind_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where its process is killed: the folder goes as soon as somebody listens."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with proxied() as (_, behind, opened):
        assert not list(tmp_path.iterdir())
        opened().sendall(b"x")
        eventually(lambda: bool(behind.accepted))
    private = PrivateSocket()
    private.close()
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing of the attempt stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
            ControlServer("127.0.0.1", port)
    assert not list(tmp_path.iterdir())


def test_a_mistake_of_ours_ends_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on: without the proxy's thread nobody would reach the server."""
    with proxied() as (_, behind, opened):
        monkeypatch.setattr(ProxiedConnection, "move", lambda self, room: 1 // 0)
        broken = opened()
        broken.sendall(b"x")
        assert ends(broken)
        monkeypatch.undo()
        client = opened()
        client.sendall(b"yes")
        eventually(lambda: len(behind.accepted) == 2)
        assert behind.accepted[1].recv(10) == b"yes"
    assert "ZeroDivisionError" in caplog.text
