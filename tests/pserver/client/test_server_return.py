"""Whether a trainer awaits a server that does not answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from pserver.client.channel import Channel
from pserver.client.client import Client, Identity, ServerReturn
from pserver.client.stream import _final
from pserver.errors import (
    GarbledStream,
    PServerError,
    Refused,
    TimedOut,
    TrainerLost,
    UnknownSession,
    Unreachable,
)
from pserver.launcher.processes import _DROPPED
from pserver.running_clock import RunningClock
from pserver.security.bearer import Bearer
from pserver.timeouts import Timeouts
from pserver.transport.stream import Buffer, Stream
from pserver.wire_pb2 import (
    Failure,
    Frame,
    InstallReply,
    InstallRequest,
    JoinReply,
    JoinRequest,
    Kind,
    LeaveReply,
    LeaveRequest,
)
from tests.support.job_frames import DEADLINE
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.program import Program


@pytest.mark.parametrize(
    ("error", "silence", "awaited"),
    [
        (Unreachable("refused"), 1.0, True),
        (TimedOut("no answer"), 319.0, True),
        (Unreachable("refused"), 321.0, False),
        (TrainerLost("it was fenced"), 1.0, False),
        (Refused("no"), 1.0, False),
    ],
)
def test_a_silent_server_is_awaited_for_so_long(
    error: PServerError, silence: float, awaited: bool
) -> None:
    """Beyond the heartbeat timeout; not one that says no."""
    server = ServerReturn("server 1")
    assert not server.awaits(error, silence, Timeouts(20.0))  # until it is known to come back
    server.seconds = 300.0

    assert server.awaits(error, silence, Timeouts(20.0)) == awaited


def test_the_wait_is_said_once_and_again_after_a_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A heartbeat that is late is no reason to say anything."""
    server = ServerReturn("server 1")
    server.seconds = 300.0
    with caplog.at_level(logging.WARNING):
        for silence in (0.5, 3.0, 4.0):
            server.awaits(Unreachable("refused"), silence, Timeouts(20.0))
        server.joined()
        server.awaits(Unreachable("refused"), 3.0, Timeouts(20.0))

    waits = "waits for server 1, which does not answer, for up to 320 s: refused"
    back = "server 1 has come back: joined it again, resending what it has not answered"
    assert [each.getMessage() for each in caplog.records] == [waits, back, waits]
    assert server.count == 1


def test_an_unknown_session_ends_the_stream_of_a_server_that_is_awaited() -> None:
    """And the channel of any other; bytes that were no frame end a stream alone."""
    failure = Failure(error="UnknownSession", message="join first")

    with pytest.raises(Unreachable, match="server 1: join first"):
        _final(failure, "server 1", awaited=True)
    assert isinstance(_final(failure, "server 1", awaited=False), UnknownSession)
    with pytest.raises(GarbledStream):
        _final(Failure(error="GarbledStream"), "server 1", awaited=False)


def program_of_a_server() -> Program:
    """Some program that a trainer can bring."""
    named = [("w", (2, 3), "float32", 0)]
    rule = Rule("sgd", {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {})
    plan = plan_parameters(named, [rule], mode="async", trainers=1, servers=1, clip=None)
    return pserver_program(Deployment(plan, ("h:1",), server_index=0))


class Ending:
    """A stream whose server says at once that it knows no such session, or nothing."""

    transport, peer, offer = "inprocess", "here", None
    bearer: Bearer | None = None

    def __init__(self, number: int) -> None:
        self._ended = threading.Event()
        self._says = number == 1

    def receive(self, land: object = None) -> tuple[Frame, memoryview]:
        """The failure, then nothing until the end."""
        if self._says:
            self._says = False
            failure = Failure(error="UnknownSession", message="join first")
            return Frame(kind=Kind.FAILURE, failure=failure), memoryview(b"")
        self._ended.wait(DEADLINE)
        raise Unreachable("it was cancelled")

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """Nobody hears it."""

    def admit(self) -> None:
        """Nobody asks."""

    def cancel(self) -> None:
        """Ends it."""
        self._ended.set()

    close = cancel


@pytest.mark.parametrize("awaits", [True, False])
def test_a_server_may_be_another_process_before_all_streams_are_open(awaits: bool) -> None:
    """The first word on a stream is that it knows nobody: another stream is opened, where the
    server is awaited.
    """
    opened: queue.SimpleQueue[int] = queue.SimpleQueue()

    def open_stream(number: int) -> Stream:
        opened.put(number)
        return Ending(number)

    channel = Channel(open_stream, DEADLINE, "server 1", 5.0 if awaits else 0.0)
    assert opened.get(timeout=DEADLINE) == 1
    if awaits:
        assert opened.get(timeout=DEADLINE) == 2
    else:
        with pytest.raises(UnknownSession, match="join first"):
            channel.begin().result(DEADLINE)
    assert (channel.failure is None) is awaits
    channel.close(abruptly=True)


def test_a_trainer_that_was_dropped_while_it_did_not_run_says_that() -> None:
    """The stream may hear of it before the heartbeat does; it blames no server."""

    def lost(error: PServerError) -> TrainerLost:
        return TrainerLost(f"did not run; {error}")

    channel = Channel(Ending, DEADLINE, "server 1", 0.0, lost)
    with pytest.raises(TrainerLost, match=r"did not run; server 1: join first"):
        channel.begin().result(DEADLINE)
    channel.close(abruptly=True)


@pytest.mark.parametrize(
    ("error", "away", "silence", "lost"),
    [
        (UnknownSession, 21.0, 22.0, True),
        (UnknownSession, 18.0, 21.0, True),  # its last heartbeat came 3 s before the pause
        (UnknownSession, 18.0, 19.0, False),  # it was not silent for long enough
        (UnknownSession, 0.0, 21.0, False),  # it ran: another process has the server's place
        (Unreachable, 21.0, 22.0, True),
        (Unreachable, 18.0, 30.0, False),  # the silence is the server's as well
    ],
)
def test_a_silence_is_the_trainers_own(
    error: type[PServerError],
    away: float,
    silence: float,
    lost: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The silence counts as its own if a pause made it longer than the heartbeat timeout of 20 s;
    launch recognizes the error.
    """
    client = Client("127.0.0.1:1", 0, Identity(0, "a", "f", {}, ["tcp"]), 20.0, 20.0, 0)
    client._answered = time.monotonic() - silence
    monkeypatch.setattr(RunningClock, "away_since", lambda clock, at: away)

    found = client._lost_while_away(error("here"))
    assert (found is not None) is lost
    assert found is None or _DROPPED.search(f"pserver.errors.TrainerLost: {found}")


@pytest.mark.parametrize("refusal", [TrainerLost, Refused])
def test_a_server_that_has_dropped_a_trainer_has_not_restarted(
    refusal: type[PServerError],
) -> None:
    """It does not know the session, and refuses the process: the error says which of the two."""

    class Refusing:
        def join(self, request: JoinRequest) -> JoinReply:
            raise refusal("trainer 0: no")

        def close(self) -> None:
            """Forgets what is open."""

    client = Client("127.0.0.1:1", 0, Identity(0, "a", "f", {}, ["tcp"]), 20.0, 20.0, 0)
    client._control.close()
    client._control, client._return.seconds = Refusing(), 5.0  # type: ignore[assignment]

    assert not client._comes_back(UnknownSession("join first"), 0.0)
    assert isinstance(client.failure, TrainerLost) is (refusal is TrainerLost)
    assert ("has restarted" in str(client.failure)) is (refusal is Refused)


class Returning:
    """The control calls of a server that is away, and has come back when it is asked again."""

    def __init__(self, heard: bool = False) -> None:
        self.sessions: list[str] = []
        self.heard = heard

    def leave(self, request: LeaveRequest) -> LeaveReply:
        """Of the first process, of nobody, and of the second."""
        self.sessions.append(request.session)
        if len(self.sessions) == 1:
            raise Unreachable("nobody is there")
        if request.session == "first":
            raise UnknownSession("join first")
        return LeaveReply()

    def join(self, request: JoinRequest) -> JoinReply:
        """The same trainer joins again, unless the log has that it left."""
        if self.heard:
            raise TrainerLost("it has left")
        return JoinReply(ready=True, session="second")

    def close(self) -> None:
        """Forgets what is open."""


@pytest.mark.parametrize(
    ("preempted_after", "awaited", "heard", "sessions"),
    [
        (3, 5.0, False, ["first", "first", "second"]),
        (3, 5.0, True, ["first", "first"]),
        (None, 5.0, False, ["first"]),
        (3, 0.0, False, ["first"]),
    ],
)
def test_a_preempted_trainer_leaves_a_server_that_is_away(
    preempted_after: int | None, awaited: float, heard: bool, sessions: list[str]
) -> None:
    """When that has come back, so that nobody waits for the heartbeat timeout.  One that finishes
    does not wait, nor where the server does not come back; and where the server's log has that this
    one left, it has.
    """
    identity = Identity(0, "a", "f", {}, ["tcp"])
    client = Client("127.0.0.1:1", 0, identity, 20.0, 20.0, 0)
    control = Returning(heard)
    client._control.close()
    client._control, client._reply = control, JoinReply(session="first")  # type: ignore[assignment]
    client._return.seconds = awaited
    client.leave(preempted_after=preempted_after)

    assert control.sessions == sessions


def test_a_server_that_is_another_process_by_now_asks_for_the_program_again() -> None:
    """What it calls an unknown session is the one that the process before had given."""
    sessions: list[str] = []

    class Again:
        """A server whose second process is there when the program comes."""

        def join(self, request: JoinRequest) -> JoinReply:
            """Asks for the program, until it has come."""
            if sessions == ["asked 0", "asked 1"]:
                return JoinReply(ready=True, session="joined")
            return JoinReply(wants_program=True, session=f"asked {len(sessions)}")

        def install(
            self, request: InstallRequest, seconds: float, check: Callable[[], None]
        ) -> InstallReply:
            """The first one is for the process before."""
            sessions.append(request.session)
            if len(sessions) == 1:
                raise UnknownSession("takes its program from another trainer")
            return InstallReply()

        def close(self) -> None:
            """Forgets what is open."""

    client = Client("127.0.0.1:1", 0, Identity(0, "a", "f", {}, ["tcp"]), 20.0, 20.0, 0)
    client._control.close()
    client._control, client._program = Again(), program_of_a_server()  # type: ignore[assignment]

    assert client._ask_to_join(lambda: None).session == "joined"


@pytest.mark.parametrize("away", [0.0, 21.0])
def test_who_was_lost_itself_awaits_no_server(away: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that did not run for the heartbeat timeout, and whose servers have ended without it
    meanwhile: it says so when they have been silent for that time.
    """
    client = Client("127.0.0.1:1", 0, Identity(0, "a", "f", {}, ["tcp"]), 20.0, 20.0, 0)
    client._return.seconds = 300.0
    monkeypatch.setattr(RunningClock, "away_since", lambda clock, at: away)
    refused = Unreachable("refused")

    assert client._comes_back(refused, 20.5) is not bool(away)
    if away:
        assert not client._is_lost(refused, 19.0) and client.failure is None
        assert client._is_lost(refused, 20.5)
        assert isinstance(client.failure, TrainerLost)
        assert "did not run for 21.0 s" in f"{client.failure}"
