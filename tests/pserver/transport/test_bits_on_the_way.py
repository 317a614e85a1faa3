"""A bit that changes on its way between two hosts: an error or another try, never other values."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.control.control_client import ControlClient
from pserver.errors import CorruptFrame, PServerError, Unreachable
from pserver.service.server import Server
from pserver.transport import checksums
from pserver.transport.grpc_stream import SERVICE
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import Stream
from pserver.wire_pb2 import VALUE, Frame, Part
from tests.faults.network_path import Flips, NetworkPath
from tests.support.cluster_keys import SecuredTransport
from tests.support.one_parameter import Trainer
from tests.support.streams import SECONDS, CheckedTransport, echo, listening

SILENT_SECONDS = 0.4  # in which nothing comes, as a changed length announces more than was sent
BODY = random.Random(0).randbytes(3000)
BETWEEN_HOSTS = {
    "tcp": CheckedTransport(TRANSPORTS["tcp"], "on"),
    "grpc": TRANSPORTS["grpc"],  # on by itself
    "tcp with keys": SecuredTransport(TRANSPORTS["tcp"]),
    "grpc with keys": SecuredTransport(TRANSPORTS["grpc"]),
}


class OneFlip(Flips):
    """Changes one bit of all that passes, at a place of its own."""

    def __init__(self, port: int, place: int, bit: int) -> None:
        super().__init__(port, 1)
        self._left, self._bit, self._guard = place, bit, threading.Lock()

    def changed(self, data: bytes) -> bytes:
        with self._guard:
            place, self._left = self._left, self._left - len(data)
        if not 0 <= place < len(data):
            return data
        self.count += 1
        return data[:place] + bytes((data[place] ^ 1 << self._bit,)) + data[place + 1 :]


def exchanged(stream: Stream) -> None:
    """Frames go to and fro; what comes is what was sent."""
    for step in range(1, 5):
        header = Frame(kind=VALUE, step=step, parts=[Part(name="w", dtype="uint8", size=3000)])
        stream.send(header, [BODY])
        got = stream.receive()
        if got is None:
            raise Unreachable("the stream has ended")
        assert got[0] == header and bytes(got[1]) == BODY, "other values"


@contextmanager
def ended_in_time(stream: Stream) -> Iterator[None]:
    """What brings nothing is broken, as a channel does."""
    late = threading.Timer(SILENT_SECONDS, stream.cancel)
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        stream.cancel()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_a_bit_anywhere_in_a_stream_changes_no_value(name: str) -> None:
    """In what is said before the first frame, in headers and in payloads, both ways, over each
    transport between hosts.
    """
    transport: Transport = BETWEEN_HOSTS[name]
    with listening(transport, echo) as listener:
        path = NetworkPath("127.0.0.2", [listener.port])
        flips = 0
        with path:
            for number in range(30):
                choice = random.Random(number)
                # densely where all is agreed on, then anywhere
                place = choice.randrange(600) if number % 2 else choice.randrange(20_000)
                path.flips = OneFlip(listener.port, place, choice.randrange(8))
                try:
                    stream = transport.connect(
                        "127.0.0.2", listener.port, timeout_seconds=SILENT_SECONDS
                    )
                    with ended_in_time(stream):
                        exchanged(stream)
                except (PServerError, OSError):
                    pass
                flips += path.flips.count
        assert flips >= 15


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_job_over_a_path_that_changes_bits_has_its_result(transport: str) -> None:
    """Tensors and control calls: what is damaged comes again."""
    config = ServerConfig(transport=transport, checksum="on", heartbeat_timeout_seconds=4.0)
    with Server(config) as server:
        control = int(server.endpoint.rpartition(":")[2])
        port = server.job.transports[transport]
        with NetworkPath("127.0.0.2", {control, port}) as path:
            trainer = Trainer(f"127.0.0.2:{control}", transports=(transport,))
            path.flips = Flips(port, every=40_000, seed=1)
            path.reset()  # so that the next connections have them
            for step in range(1, 41):
                trainer.step(step, gradient=1.0)
            trainer.client.leave()
            assert path.flips.count >= 3
    assert torch.equal(trainer.value, torch.full((1000,), 1.0 - 40 * 0.5))


@pytest.mark.parametrize("checksum", ["auto", "on", "off"])
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_the_setting_acts_on_each_transport(transport: str, checksum: str) -> None:
    """Over gRPC "auto" is on; over TCP it is on for other hosts."""
    with Server(ServerConfig(checksum=checksum)) as server:
        stream = TRANSPORTS[transport].connect(
            "127.0.0.1", server.job.transports[transport], timeout_seconds=SECONDS
        )
        checked = stream.checked if transport == "grpc" else stream._sockets[0]._checked  # type: ignore[attr-defined]
        stream.cancel()
        assert checked == (checksum == "on" or (checksum == "auto" and transport == "grpc"))
        # shared memory has none: where all are asked for, it is not offered
        assert ("shm" in server.job.transports) == (checksum != "on")


def test_shared_memory_alone_takes_no_setting() -> None:
    """It would have no effect."""
    with pytest.raises(ValueError, match="checksum: on has no effect with transport 'shm'"):
        ServerConfig(transport="shm", checksum="on")
    ServerConfig(transport="grpc", checksum="off")


def test_a_client_that_asks_for_none_is_refused_where_they_are_to_be() -> None:
    """One in another language, for one: the server says what it expects."""
    with Server(ServerConfig(checksum="on")) as server:
        with grpc.insecure_channel(server.endpoint) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Exchange")(iter(()), timeout=SECONDS)
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "--checksum on" in caught.value.details()


# ---- control calls ----


def test_a_control_call_that_was_changed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request, or the reply: neither end acts on what was changed."""
    with Server(ServerConfig()) as server:
        client = ControlClient(server.endpoint, SECONDS)
        real, wrong = checksums.of_message, iter([True, False, True, False, False])

        def of_message(message: bytes) -> tuple[str, str]:
            key, value = real(message)
            return key, "ffffffff" if next(wrong, False) else value

        monkeypatch.setattr("pserver.control.control_client.of_message", of_message)
        monkeypatch.setattr("pserver.transport.grpc_port.of_message", of_message)
        assert client.status(wire.StatusRequest()).state == "empty"
        assert next(wrong, None) is None
        client.close()


@given(st.binary(max_size=200), st.data())
def test_what_is_checked_is_told_from_what_is_not(body: bytes, data: st.DataObject) -> None:
    """A message without its checksum, or with another's: with up to 32 bits changed in a row, or
    cut anywhere.
    """
    whole = checksums.sealed([body[:50], memoryview(body)[50:]])
    assert bytes(checksums.opened(whole)) == body
    at = data.draw(st.integers(0, len(whole) - 4))
    burst = data.draw(st.binary(min_size=4, max_size=4).filter(any))
    changed = bytes(a ^ b for a, b in zip(whole[at:], burst, strict=False))
    cut = data.draw(st.integers(1, min(len(whole), 4)))
    for damaged in (whole[:at] + changed + whole[at + 4 :], whole[:-cut], whole[cut:], b""):
        # where a message is cut its checksum fits once in 2**32
        with pytest.raises(CorruptFrame):
            checksums.opened(damaged)


def test_the_checksum_of_a_call_is_beside_its_message() -> None:
    """A message with none is unchecked."""
    assert not checksums.check_message("a reply", b"abcd", None)
    assert checksums.check_message("a reply", b"abcd", [checksums.of_message(b"abcd")])
    with pytest.raises(CorruptFrame, match="a reply"):
        checksums.check_message("a reply", b"abce", [checksums.of_message(b"abcd")])
