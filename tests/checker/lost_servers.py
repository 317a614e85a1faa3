"""Servers of a trial that are lost, and come back as other processes do that have nothing of their
memory.

[Note: a server that dies in this process]  The kernel ends all of a process at one moment: its
sockets close, and what it was doing is not done.  Here the job's lock makes that moment.  While it
is held no step is decided and no call changes anything.  Under it the sockets close, without a word
to anybody; then the file of server 0's log; and then the job ends, for those threads alone that
still wait in it.  What they do from there on nobody hears of, and the history does not have it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pserver import timeouts
from pserver.errors import PServerError
from pserver.job.program import InstalledProgram
from pserver.job_log.follower import FollowerLink
from pserver.job_log_pb2 import OwnEntry
from pserver.service.server import Server, ServerLinks
from tests.checker.history import History, Stood
from tests.checker.server_lives import Life, ServerLives
from tests.checker.trial import TwinServer
from tests.checker.worlds import Event

BEAT_SECONDS = 0.1  # of trainers, which notice by it that a server has come back
RECORD_SECONDS = 0.3  # for a server to write a record, or to stage a step, behind which it dies
PORT_SECONDS = 10.0  # for the port of a dead server to be free
ASK_SECONDS = 0.1  # between two questions whether the trial is over
RETURN_SECONDS = 45.0  # for trainers to bring a server its program: longer than one of them dies


@contextmanager
def quick_heartbeats() -> Iterator[None]:
    """While it lasts, trainers notice sooner that a server has come back."""
    before = timeouts.BEAT_SECONDS
    timeouts.BEAT_SECONDS = BEAT_SECONDS
    try:
        yield
    finally:
        timeouts.BEAT_SECONDS = before


def kill(server: Server, died: Callable[[InstalledProgram], None]) -> bool:
    """Ends a server as the kernel ends a process: see [Note: a server that dies in this process].

    Args:
        died: told what it held; under the job's lock.

    Returns:
        Whether somebody still steps there; otherwise it goes on.
    """
    job = server.job
    with job.condition:
        held = job.program
        over = held is None or job.failure is not None or not job._members.unfinished()
        if server._stopping.is_set() or held is None or over:
            return False
        server._stopping.set()
        died(held)
        server._control._grpc._proxy.close(0.0)
        for transport in server._transports:
            _break(transport)
        _unlink(held, job.links)
        held.decisions._closed = True
        job._write_nothing()
        job.lifecycle.drain()
    return True


def _break(transport: Any) -> None:
    """Its streams break, and others are not taken."""
    streams = transport._streams
    with streams._condition:
        streams._closing, found = True, list(streams._open)
    for stream in found:
        stream.cancel()


def _unlink(held: InstalledProgram, links: Any) -> None:
    """Other servers hear nothing more."""
    link = held.decisions._link
    if isinstance(link, FollowerLink):
        link._claim()
        link._end.end()
    elif isinstance(links, ServerLinks) and links._links is not None:
        with links._links._lock:
            followers = list(links._links._followers.values())
        for follower in followers:
            follower.end.end()


def _bury(server: Server) -> None:
    """Its threads end."""
    port = server._control._grpc
    port.server.stop(0.0).wait(1.0)
    port._private.close()
    server._control._threads.close()
    server._control._pool.shutdown(wait=False)
    server._close_transports(0.0)
    if server._control._exchanges is not None:
        server._control._exchanges.end_threads()
    server.job.saves.wait(PORT_SECONDS)
    server._clock.join()


class LostServers:
    """Kills servers of a trial, one after the other, and starts others in their places.

    Args:
        servers: of the trial; another one takes the place of one that is lost.
        lives: of these.
        history: of the trial.
        names: by port, of servers, for faults of the network.
        lost: called when one has died.
    """

    def __init__(
        self,
        servers: list[TwinServer],
        lives: ServerLives,
        history: History,
        names: dict[int, str],
        lost: Callable[[], None],
    ) -> None:
        self._servers, self._lives, self._history = servers, lives, history
        self._names, self._lost = names, lost
        self._one = threading.Lock()  # held by who has a server die
        self._returning: threading.Thread | None = None
        self._failure, self._over = "", False

    def lose(self, event: Event, path: str) -> None:
        """Has a server die, when the one before has come back.

        Args:
            path: of the save from which it comes back, for all servers.
        """
        with self._one:
            self.wait()
            server, written = self._servers[event.server], threading.Event()
            if event.first or not _dies_behind_a_word(server, self._died, written):
                if not kill(server, self._died):
                    return
                written.set()
            self._returning = threading.Thread(
                target=self._returns, args=(event, f"{path}/server-{event.server}", written)
            )
            self._returning.start()

    def wait(self) -> None:
        """Until the one that has died is there again.

        Raises:
            AssertionError: it does not come back.
        """
        if self._returning is not None:
            self._returning.join()
        assert not self._failure, self._failure

    def end(self) -> None:
        """The trial is over; harmless when called twice."""
        self._over = True
        if self._returning is not None:
            self._returning.join()

    def _died(self, held: InstalledProgram) -> None:
        self._history.dies(held.decisions)
        self._lost()

    def _returns(self, event: Event, path: str, written: threading.Event) -> None:
        before = self._servers[event.server]
        if not written.wait(RECORD_SECONDS) and not kill(before, self._died):
            if not before._stopping.is_set():
                return  # its job is over
        try:
            _bury(before)
            time.sleep(event.seconds)  # nobody is there
            self._servers[event.server] = after = self._another(before, path)
            for port in after.job.transports.values():
                self._names[port] = f"server {event.server}"
            if (stood := self._stood(after)) is not None:
                self._lives.add(Life(event.server, stood.held, path, stood))
            else:
                self._failure = f"server {event.server} has not come back: {after.job.failure}"
        except (OSError, PServerError) as error:
            self._failure = f"server {event.server}: {type(error).__name__}: {error}"

    def _stood(self, server: Server) -> Stood | None:
        """What a server says when it has come back; None: it does not."""
        end, stood = time.monotonic() + RETURN_SECONDS, self._history.stood
        while time.monotonic() < end and not self._over:
            if self._history.wait_until(lambda: server.job in stood, ASK_SECONDS):
                return stood[server.job]
        return None

    def _another(self, before: TwinServer, path: str) -> TwinServer:
        """Another process, at the same port, when that is free."""
        end = time.monotonic() + PORT_SECONDS
        config = replace(before.config, endpoint=before.endpoint, reload=path)
        while True:
            after = TwinServer(config)
            try:
                after.start()
                return after
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


def _dies_behind_a_word(
    server: TwinServer, died: Callable[[InstalledProgram], None], written: threading.Event
) -> bool:
    """Has server 0 die when it has written its next record, and before anybody hears of that; or
    another one, when it has told server 0 of the next step that it has.

    Returns:
        Whether it says any.
    """

    def dies() -> None:
        if kill(server, died):
            written.set()

    with server.job.condition:
        held = server.job.program
        if held is None:
            return False
        coordinator = held.decisions.coordinator
        if coordinator is None:
            staged = held.decisions.staged

            def stages(*step: Any) -> None:
                staged(*step)
                dies()

            vars(held.decisions)["staged"] = stages
            return True
        if coordinator.write is None:
            return False
        write = coordinator.write

        def writes(entry: OwnEntry) -> None:
            write(entry)
            if entry.HasField("record"):
                dies()

        coordinator.write = writes
        return True
