"""Promises of threads that others stand on: one that drains, ticks, listens or says something again
and again goes on whatever the system refuses beside its work.
"""

from __future__ import annotations

import ast
import errno
import io
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver import timeouts
from pserver.client import announcement
from pserver.client import stream as retrying_stream
from pserver.client.client import Client, Report, ServerReturn
from pserver.client.observer import Observer
from pserver.control.collector import Collector
from pserver.job_log.follower import FollowerLink
from pserver.launcher.log_file import LogFile
from pserver.launcher.processes import ChildProcess, Group, Terminal
from pserver.limits import Limits
from pserver.service import streams
from pserver.service.server import Server
from pserver.side_business import SideBusiness
from pserver.telemetry.metrics import Exposition
from pserver.timeouts import Timeouts
from pserver.transport.stream import AcceptLoop
from pserver.wire_pb2 import AnnounceReply, HeartbeatReply, JoinReply
from tests.support.sources import MODULES, nodes, relative
from tests.support.waiting import eventually
from trainer.collective.rendezvous import TrainerHeartbeats
from trainer.communicator import termination

TIMES = 3  # that the system refuses something


class Refusing:
    """Calls that the system refuses a few times; counts them all."""

    def __init__(self, call: Callable[..., Any] = lambda *_: None, times: int = TIMES) -> None:
        self._call, self._times = call, times
        self.count = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        if self.count <= self._times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._call(*args, **named)

    def passed(self, more: int = 2) -> bool:
        """Whether the thread has come to it again since it worked."""
        return self.count >= self._times + more


class Nothing:
    """Has what a test gives it; and collects no metrics."""

    def collect(self) -> list[Any]:
        return []


def running(target: Callable[[], object]) -> threading.Thread:
    """A thread that has begun."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def drains(path: Path) -> tuple[ChildProcess, io.StringIO, Group]:
    """A process that says more than a pipe holds; its log is on a disk that is full."""
    group, out = Group(), io.StringIO()
    group.__enter__()
    script = "for k in range(2000): print(k, 'x' * 100)"
    over = threading.Event()
    process = ChildProcess(
        "trainer 0",
        [sys.executable, "-c", script],
        dict(os.environ),
        path,
        0,
        group,
        Terminal(out, 9),
        line=Refusing(),
        ended=lambda process: over.set(),
    )
    assert over.wait(60.0)
    return process, out, group


@pytest.mark.processes
def test_a_full_disk_below_the_logs_holds_up_no_process() -> None:
    """Its lines go on to the terminal, with one warning, and what is seen in them is seen."""
    process, out, group = drains(Path("/dev/full"))
    group.__exit__(None, None, None)
    lines = out.getvalue().splitlines()

    assert process.status == 0 and sum("xxx" in line for line in lines) == 2000
    warnings = [line for line in lines if "No space left on device" in line]
    assert len(warnings) == 2 and "the log /dev/full: [Errno 28]" in warnings[0]
    assert "what is seen in the lines of trainer 0" in warnings[1]


@pytest.mark.processes
def test_a_terminal_that_cannot_be_written_to_holds_up_no_process(tmp_path: Path) -> None:
    """The log has every line, and one that says so."""
    path, over = tmp_path / "trainer-0.log", threading.Event()
    with Group() as group, open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        command = [sys.executable, "-c", "for k in range(2000): print(k, 'x' * 100)"]
        process = ChildProcess(
            "trainer 0",
            command,
            dict(os.environ),
            path,
            0,
            group,
            Terminal(full, 9),
            ended=lambda process: over.set(),
        )
        assert over.wait(60.0)
        with pytest.raises(OSError):  # what it has kept for the terminal
            full.close()
    text = path.read_text()

    assert process.status == 0 and text.count("xxxx\n") == 2000
    assert text.count("the lines on standard output: [Errno 28]") == 1


def test_a_log_is_written_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many lines are missing; a line of which a part was written ends there."""
    real, said, room = os.write, list[str](), [5, 0]

    def write(descriptor: int, data: Any) -> int:
        if not room:
            return real(descriptor, data)
        if not (most := room.pop(0)):
            room.insert(0, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, bytes(data)[:most])

    log = LogFile(tmp_path / "log", True, said.append)
    monkeypatch.setattr(os, "write", write)
    for line in ("the first line", "the second", "the third"):
        log.add(line)
    room.clear()
    log.add("the last")
    monkeypatch.undo()
    log.close()

    expected = "the f\n... 3 lines could not be written here\nthe last\n"
    assert (tmp_path / "log").read_text() == expected
    assert [line.partition(": ")[2][:11] for line in said] == ["[Errno 28] ", "works again"]


def test_where_a_warning_cannot_be_said_either_all_goes_on() -> None:
    """As where standard error is on the same disk."""
    refusing = Refusing(times=9)
    business = SideBusiness("it", refusing)

    assert business.do(Refusing(lambda: 7, times=1)) is None and refusing.count == 1
    assert business.do(lambda: 7) == 7


# ---- one for each thread that lasts ----


def heartbeats() -> None:
    """What a heartbeat says, its call, and what is made of its answer."""

    class Beating(Client):
        """A connection to a server that answers."""

        every_channel = cast(Any, ())

        def __init__(self) -> None:
            self.index, self.activity, self.endpoint = 0, "", "a:1"
            self._timeouts, self._closing = Timeouts(0.5), threading.Event()
            self._return, self._answered = ServerReturn("server 0"), 0.0
            self._reply, self._failure = JoinReply(session="s"), None
            self.reported = Refusing(Report)
            self.learn = Refusing(times=5)
            self.called = Refusing(lambda *_, **__: HeartbeatReply(), times=2)
            self._control = cast(Any, SimpleNamespace(heartbeat=self.called, close=lambda: None))

        def check(self) -> None:
            """Nothing has ended it."""

        def _ask_to_join(self, meanwhile: Callable[[], None]) -> JoinReply:
            raise AssertionError("it has not gone")

    beating = Beating()
    thread = running(beating._beat)
    eventually(lambda: cast(Refusing, beating.learn).passed())
    beating._closing.set()
    thread.join(10.0)
    assert beating._failure is None and beating.called.passed()


def announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a server that cannot be asked for a while."""
    call = Refusing(lambda request: AnnounceReply(heartbeat_timeout_seconds=0.05))
    control = SimpleNamespace(announce=call, close=lambda: None)
    monkeypatch.setattr(announcement, "ControlClient", lambda *_: control)
    monkeypatch.setattr(timeouts, "BEAT_SECONDS", 0.05)
    announced = announcement.Announcement(["127.0.0.1:1"], 0, "a")
    eventually(call.passed)
    announced.joined()


def observers() -> None:
    """The heartbeat of who reads."""
    observer, call = Observer.__new__(Observer), Refusing()
    observer._ended, observer._lock = threading.Event(), threading.Lock()
    observer._reply, observer._pausing = cast(Any, SimpleNamespace(session="s")), False
    observer._control = cast(Any, SimpleNamespace(observe=call))
    thread = running(lambda: observer._beat(0.001))
    eventually(call.passed)
    observer._ended.set()
    thread.join(10.0)


def followers() -> None:
    """The look at a coordinator that may be silent."""
    link, look = FollowerLink.__new__(FollowerLink), Refusing()
    link._over, link._timeouts, link._name = threading.Event(), Timeouts(0.01), "server 0"
    link._end = cast(Any, SimpleNamespace(wait_heard=lambda seconds: False, end=lambda: None))
    link._look = look  # type: ignore[method-assign]
    thread = running(link._beat)
    eventually(look.passed)
    link._over.set()
    thread.join(10.0)


def outboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream breaks, and another one takes what was sent."""
    from pserver.transport.stream import SequencedStream
    from pserver.wire_pb2 import Done, Frame, Kind
    from tests.pserver.client.test_channel import opened

    def serve(stream: Any) -> None:
        stream = SequencedStream(stream)
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.COMMIT:
                stream.send(Frame(kind=Kind.DONE, done=Done(version=7)))

    monkeypatch.setattr(retrying_stream, "DIRECT_BYTES", -1)  # all by the outbox
    opening = opened(serve)
    answer = opening.begin()
    opening._stream.send = Refusing(times=1)  # type: ignore[method-assign]
    opening.commit(1, {})
    assert answer.result(timeout=10).version == 7 and opening.reconnects == 1
    opening.close()


def clocks_of_servers() -> None:
    """What a tick does."""
    server, tick = Server.__new__(Server), Refusing()
    server._stopping = threading.Event()
    server.job = cast(Any, SimpleNamespace(tick=tick))
    nothing = SimpleNamespace(end_late=lambda: None)
    server._streams = server._control = cast(Any, nothing)
    server._access = cast(Any, SimpleNamespace(keys=None))
    thread = running(server._tick)
    eventually(tick.passed)
    server._stopping.set()
    thread.join(10.0)


def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word to a trainer that waits for long."""
    monkeypatch.setattr(timeouts, "WORKING_SECONDS", 0.002)
    working, send, stop = streams.WorkingStreams(), Refusing(), threading.Event()
    stream = Nothing()
    stream.send_if_free = send  # type: ignore[attr-defined]
    working.works(cast(Any, stream))
    thread = running(lambda: working.probe_until(stop))
    eventually(send.passed)
    stop.set()
    thread.join(10.0)


def accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection where the system has no more descriptors, and after it has."""
    monkeypatch.setattr("pserver.transport.stream.RETRY_SECONDS", 0.001)
    listening = socket.create_server(("127.0.0.1", 0))
    accept = Refusing(listening.accept)
    came = threading.Event()

    class Listening:
        """A socket that refuses."""

        def __getattr__(self, name: str) -> Any:
            return accept if name == "accept" else getattr(listening, name)

    def greet(connection: socket.socket) -> None:
        came.set()
        raise OSError("it is no trainer")

    loop = AcceptLoop(cast(Any, Listening()), greet, cast(Any, None), "test", Limits())
    with socket.create_connection(listening.getsockname()):
        assert came.wait(10.0)
    loop.close()


def pages_of_metrics() -> None:
    """A connection that cannot be taken."""
    exposition = Exposition("127.0.0.1", 0, cast(Any, Nothing()), None)
    take = Refusing(exposition._server.get_request)
    exposition._server.get_request = take  # type: ignore[method-assign]
    with socket.create_connection(("127.0.0.1", exposition.port)) as client:
        client.settimeout(10.0)
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(12).startswith(b"HTTP/1.0 200")
    exposition.close()


def collectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot be read, and what is made of what servers say."""
    access = Refusing()
    take = Refusing()
    collector = Collector(["127.0.0.1:1"], take, cast(Any, access), 0.001)
    monkeypatch.setattr("pserver.control.collector.ControlClient", Refusing(times=10**6))
    with collector:
        eventually(lambda: access.passed() and take.passed())


def memberships(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other trainers say, and the look at the main thread."""
    member, look = TrainerHeartbeats.__new__(TrainerHeartbeats), Refusing()
    member._peers, member._timeout, member._closed, member._ends_process = {}, 0.01, False, True
    member._guard = cast(Any, SimpleNamespace(look=look))
    member._sending = threading.Lock()
    wake, member._woken = socket.socketpair()

    class Selector(selectors.DefaultSelector):
        """One that cannot wait for a while."""

        def __init__(self) -> None:
            super().__init__()
            self.select = Refusing(super().select)  # type: ignore[method-assign]

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    thread = running(member._run)
    eventually(lambda: look.passed(4))
    member._closed = True
    wake.close()
    thread.join(10.0)


def the_thread_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word goes nowhere, and the process ends."""
    own, ended = termination.Termination(), list[int]()
    monkeypatch.setattr(timeouts, "HANDLER_SECONDS", 0.0)
    monkeypatch.setattr(own, "_owns", lambda: True)
    own._read, writes = os.pipe()
    os.write(writes, bytes([signal.SIGTERM]))
    monkeypatch.setattr(os, "_exit", ended.append)
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        own._watch()
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
    for each in (own._read, writes):
        os.close(each)
    assert ended == [143]


LASTING: dict[tuple[str, str], Callable[..., None] | str] = {
    ("pserver/client/announcement.py", "self._announce_ticking"): announcements,
    ("pserver/client/client.py", "self._beat"): heartbeats,
    ("pserver/client/observer.py", "self._beat"): observers,
    ("pserver/client/stream.py", "target"): outboxes,
    ("pserver/launcher/processes.py", "self._read"): "a test above",
    ("pserver/control/collector.py", "self._ask"): collectors,
    ("pserver/control/collector.py", "self._take_all"): collectors,
    ("pserver/job_log/follower.py", "target"): followers,
    ("pserver/telemetry/metrics.py", "self._server.serve_forever"): pages_of_metrics,
    ("pserver/service/server.py", "self._tick"): clocks_of_servers,
    ("pserver/service/server.py", "self._working.probe_until"): probes,
    ("pserver/transport/stream.py", "self._accept"): accepts,
    ("trainer/collective/rendezvous.py", "self._run"): memberships,
    ("trainer/communicator/termination.py", "self._watch"): the_thread_of_sigterm,
    # what is beside their work is nothing that the system could refuse
    ("pserver/running_clock.py", "self._run"): "asks for the time",
    ("pserver/launcher/processes.py", "self._wait"): "waits for a child, and puts it into a queue",
    ("pserver/transport/strangers.py", "self._run"): "any error drops one connection",
    ("pserver/web/server.py", "self._server.serve_forever"): "as that of metrics",
    # only look: off after an error, see pserver/onlookers.py
    ("pserver/launcher/panel.py", "self._draw"): "an onlooker",
    ("pserver/launcher/panel.py", "self._read"): "an onlooker",
    ("pserver/launcher/supervisor.py", "self._read"): "an onlooker",
    ("trainer/job/loggers.py", "self._run"): "a logger is closed after an error",
    # what fails there is the work itself, and whoever waits for it is told
    ("pserver/job/background_saves.py", "self._write"): "the save has failed",
    ("pserver/job/coordination.py", "self._write_anew"): "the present file stays",
    ("pserver/lane/recorder.py", "self._write_all"): "the recording ends, and says so",
    ("pserver/launcher/question.py", "self._read"): "the answer is: unknown",
    ("trainer/collective/process_groups.py", "call"): "the group does not come up",
    ("trainer/senders/async_lane.py", "target"): "the lane has failed",
    ("trainer/senders/kstep_lane.py", "self._send_in_order"): "the exchange has failed",
    ("trainer/communicator/trace.py", "self._tell"): "there is no trace",
    ("trainer/data/batches.py", "self._run"): "the iteration raises it",
    ("trainer/job/part_saves.py", "self._complete"): "there is no checkpoint, which is logged",
    ("trainer/samplers/sample_leases.py", "ask"): "the lease raises it",
    ("trainer/senders/look_ahead.py", "self._run"): "the lookup asks by itself",
    # one connection, or one call
    ("pserver/security/enrolment.py", "self._meet"): "one peer",
    ("pserver/security/enrolment.py", "_end"): "ends one connection",
    ("pserver/service/handler.py", "_send_drain"): "one stream",
    ("pserver/transport/stream.py", "self._serve"): "one connection",
    ("pserver/transport/stream.py", "stream.cancel"): "ends one stream",
    ("pserver/transport/grpc_stream.py", "call.cancel"): "ends one call",
    ("pserver/transport/grpc_stream.py", "self._streams.run"): "one stream",
    ("pserver/transport/inprocess.py", "self._streams.run"): "one stream",
    ("pserver/web/server.py", "self._do"): "one act",
    ("pserver/lane/tasks.py", "torch.set_num_threads"): "one call",
    ("trainer/communicator/termination.py", "client.announce_end"): "one call",
    ("trainer/communicator/joint_calls.py", "self._answer"): "one call",
    ("trainer/communicator/termination.py", "os.kill"): "one call",
    ("trainer/communicator/termination.py", "tell"): "one call",
    ("trainer/collective/spawn.py", "_end_with_parent"): "waits for one end",
    ("trainer/data/formats.py", "_end_with_parent"): "waits for one end",
}
FAULTS = ("tests/faults/", "tests/checker/")  # injectors of faults, and the checker's own


def threads(path: Path) -> set[tuple[str, str]]:
    """The threads and timers that a file starts, with what they run."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "Thread",
            "Timer",
        ):
            named = [each.value for each in node.keywords if each.arg == "target"]
            target = ast.unparse((named or node.args[1:])[0])
            found.add((relative(path), target))
    return found


def test_every_thread_is_known() -> None:
    """With what the system may refuse beside its work, or why that ends nothing else."""
    started = set().union(*map(threads, MODULES))

    assert {each for each in started if not each[0].startswith(FAULTS)} == set(LASTING)


@pytest.mark.parametrize(
    "inject",
    dict.fromkeys(each for each in LASTING.values() if not isinstance(each, str)),
    ids=lambda inject: inject.__name__,
)
def test_a_thread_that_others_stand_on_goes_on(
    inject: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the system refuses something a few times, and then no more."""
    caplog.set_level(logging.CRITICAL)
    wants = inject.__code__.co_argcount
    inject(*[monkeypatch] * wants)
