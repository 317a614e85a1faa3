"""A trainer's end in a job with servers: SIGTERM, preemption, and its shutdown.

[Note: whose signal it is]  A script, or its trainer class, may install a handler of its own for
SIGTERM before this one or after it, for the whole job or for a while.  So the owner of the signal
is found when it arrives: it is the handler that the interpreter has then.  If that is another
handler, the servers are not told, and the process continues as that handler decides.  It may call
the handler that it replaced: ours, called from inside another, only notes that SIGTERM has arrived.

[Note: told within a second]  Python runs a handler between two bytecodes of the main thread, which
may be in a long backward pass or in a wait inside a library.  So the handler of the C level also
writes the signal's number into a pipe (``signal.set_wakeup_fd``), where a thread of this module
reads it.  That thread tells the servers, whatever the main thread is doing; the handler then raises
``SystemExit(143)`` in the main thread, so that ``finally`` and ``atexit`` run.  If the main thread
does not reach its handler within ``HANDLER_SECONDS``, the process ends without it.

[Note: a grace period]  Where the job allows it, the first SIGTERM only sets a flag, and the trainer
leaves the job at the end of its step::

    SIGTERM --> the step continues --its end--> leaves the servers --> SystemExit(143)
                       |
                       `--the grace period is over--> as without one

Further SIGTERMs during that time change nothing.

The interpreter ignores exceptions raised inside a ``__del__`` or the callback of a weak reference.
If the handler has run there, the signal is raised once more.

A forked child (a worker of a DataLoader, which is ended with SIGTERM) inherits handler and pipe,
and gives both back at once.

[Note: a job is done when all say so]  Each trainer tells every server that it takes no further
step, waits until every server says that all trainers have done so, and leaves.  While it waits it
sends heartbeats, whose answers say if the job has failed.  So if a trainer or a server is lost
before the end, no trainer takes the job for done; and a trainer that has lost one server tells the
others.  A process that ends without having left fails the job, and exits with 1 itself, or with the
status given to ``sys.exit``, never with 0.

[Note: preempted]  A trainer that is preempted, with a grace period, leaves between two steps.  All
that it has sent is applied by then, the part of a window that a k-step mode has kept on the trainer
too, so nothing is lost, and no step, barrier or bound of the others waits for it.  It leaves server
0 last: whatever server 0 says of it, the other servers know already.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol

from pserver import timeouts
from pserver.client.client import Client
from pserver.errors import PServerError
from pserver.telemetry.memory import freeze_at_exit
from trainer.senders.pipeline import LaneSender

# ---- termination ----
#
# SIGTERM: a trainer that receives it tells the whole job, and exits with 143.
#
# Without a handler the kernel ends the process at once, and the others wait for the heartbeat
# timeout.


STATUS = 128 + signal.SIGTERM
REASON = "ended by SIGTERM"
TELL_SECONDS = 0.9  # for all servers together
AGAIN_SECONDS = 0.05  # for the main thread to leave the code that ignored the exception

Tell = Callable[[str], None]


class Termination:
    """The reaction of this process to SIGTERM.

    Attributes:
        came: SIGTERM has arrived.
    """

    def __init__(self) -> None:
        self.came = False
        self._lock = threading.Lock()  # held to replace _tells; nothing else happens under it
        # functions that tell the job, with their grace periods in seconds; replaced, never changed,
        # as the handler must not wait for a lock
        self._tells: Mapping[Tell, float] = {}
        self._granted: dict[str, float] = {}  # the grace period of the SIGTERM that arrived
        self._over = threading.Event()  # the grace period is over, or the trainer has left
        self._installed = False
        self._exit: SystemExit | None = None  # the last one that the handler raised
        self._read, self._write = -1, -1  # a pipe, once the handler is installed
        self._told = threading.Event()
        self._noticed = threading.Event()

    def add(self, tell: Tell) -> None:
        """Registers ``tell``, which tells the job when SIGTERM arrives.  It is called in a thread
        of its own, with the reason, and must not wait for locks that the script's threads hold for
        long.

        The first call installs the handler, if it comes from the main thread and the script has
        none.  See [Note: whose signal it is].
        """
        freeze_at_exit()  # others wait for this process's end
        self.allow(tell, 0.0)
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._install()

    def allow(self, tell: Tell, seconds: float) -> None:
        """Sets a grace period: ``tell`` is called only if the trainer has not left when it is over.

        Args:
            seconds: the grace period; 0: ``tell`` is called at once.
        """
        with self._lock:
            self._tells = {**self._tells, tell: seconds}

    def remove(self, tell: Tell) -> None:
        """Removes a ``tell`` that :meth:`add` registered."""
        with self._lock:
            self._tells = {each: s for each, s in self._tells.items() if each != tell}

    @property
    def ends(self) -> bool:
        """Whether SIGTERM ends the process: this handler has raised, not the script's own."""
        return self._exit is not None

    @property
    def awaited(self) -> bool:
        """Whether SIGTERM has arrived, and the trainer may still leave the job in good order."""
        return bool(self._granted.get("seconds")) and not self._over.is_set()

    def end(self) -> NoReturn:
        """Ends the process: the trainer has left the job in good order."""
        self._told.set()
        self._over.set()
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)  # the handler ends the main thread
        raise SystemExit(STATUS)

    def _grant(self) -> float:
        """The grace period in seconds, the shortest of all; 0 for none.  It is decided once."""
        return self._granted.setdefault("seconds", min(self._tells.values(), default=0.0))

    def _owns(self) -> bool:
        """Whether SIGTERM is this handler's; see [Note: whose signal it is]."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _install(self) -> None:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._installed = True
        self._read, self._write = os.pipe()  # not before: forked processes have one each
        threading.Thread(target=self._watch, name="termination", daemon=True).start()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop has one already: the handler alone must suffice
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self._handle)
        sys.unraisablehook = partial(self._ignored, sys.unraisablehook)
        # a child that gets SIGTERM before it has given both back would speak for this process
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, (signal.SIGTERM,)),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, (signal.SIGTERM,)),
            after_in_child=self._give_back,
        )

    def _give_back(self) -> None:
        """Gives handler and pipe back, in a forked child; the pipe also while another handler is
        installed.
        """
        if (other := signal.set_wakeup_fd(-1)) not in (-1, self._write):
            signal.set_wakeup_fd(other)
        if self._owns():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM in the main thread; another handler may call it, too."""
        self.came = True
        if not self._owns():
            return
        with suppress(OSError):  # where the wakeup descriptor is another's
            os.write(self._write, bytes([signal.SIGTERM]))
        if self._grant() and not self._over.is_set():
            return
        self._noticed.set()
        self._told.wait(TELL_SECONDS)
        self._exit = SystemExit(STATUS)
        raise self._exit

    def _ignored(self, before: Callable[[Any], object], ignored: Any) -> None:
        """``sys.unraisablehook``: raises the signal again if the interpreter has ignored the
        handler's exception.
        """
        if self._exit is None or ignored.exc_value is not self._exit:
            before(ignored)
            return
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    def _watch(self) -> None:
        """The thread that tells the job."""
        while signal.SIGTERM not in os.read(self._read, 64) or not self._owns():
            pass
        self.came = True
        reason = REASON
        if seconds := self._grant():
            if self._over.wait(seconds):
                return  # it has left
            self._over.set()
            reason = (
                f"{REASON}, and its step has not ended within the grace period of {seconds:g} s"
            )
        self._tell(reason)
        if seconds:
            os.kill(os.getpid(), signal.SIGTERM)  # the handler ends the main thread
        if not self._noticed.wait(timeouts.HANDLER_SECONDS):
            with suppress(OSError):  # stderr is closed
                print(
                    f"{reason}; the main thread does not return to Python, and is left behind",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(STATUS)

    def _tell(self, reason: str) -> None:
        threads = [
            threading.Thread(target=tell, args=(reason,), daemon=True, name="tells of SIGTERM")
            for tell in self._tells
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TELL_SECONDS)
        self._told.set()


termination = Termination()


# ---- shutdown ----
#
# How a trainer leaves its servers: when all trainers agree that the job is done, or with the reason
# why it cannot continue.


log = logging.getLogger(__name__)


def spelled(error: BaseException) -> str:
    """An error as text for the other processes."""
    return f"{type(error).__name__}: {error}"


class FinishableAverages(Protocol):
    """The averages among trainers: the part that a trainer's end concerns."""

    def finish(self) -> None:
        """Announces that this trainer takes no further step."""


class Shutdown:
    """A trainer's end in its job.

    Args:
        clients: its connections.
        trainer_id: its number.
        leave: leaves the job, with a reason; called if the process ends without having left.
    """

    def __init__(
        self, clients: Sequence[Client], trainer_id: int, leave: Callable[[str], None]
    ) -> None:
        self._clients, self._trainer_id, self._leave = clients, trainer_id, leave

    def expect(self) -> None:
        """Makes the servers learn of the end of the process, or of SIGTERM, from here on."""
        atexit.register(self._abandoned)
        termination.add(self._tell)
        _note_status()

    def allow(self, seconds: float) -> None:
        """Gives the trainer this grace period after SIGTERM, from here on."""
        termination.allow(self._tell, seconds)

    def forget(self) -> None:
        """Undoes :meth:`expect`: the trainer leaves."""
        atexit.unregister(self._abandoned)
        termination.remove(self._tell)

    def drain(self, lanes: Sequence[LaneSender]) -> None:
        """Sends what is still kept on the trainer, and waits until all of it has been applied.

        Raises:
            PServerError: the job has failed.
        """
        if all(client.channels for client in self._clients):
            for lane in lanes:
                lane.leave()
        for client in self._clients:
            client.check()

    def agree(self, among: FinishableAverages | None, drained: Callable[[], None]) -> bool:
        """Waits until all trainers have finished.

        Args:
            among: the averages among trainers, if any: a trainer that waits there for this one
                learns that it takes no further step.
            drained: called before the wait.

        Returns:
            Whether all have finished; False: SIGTERM has arrived meanwhile.

        Raises:
            PServerError: the job has failed before that.
        """
        drained()
        if among is not None:
            among.finish()
        for client in self._clients:
            client.finish()
        return all(client.all_finished(lambda: termination.awaited) for client in self._clients)

    def leave(
        self,
        lanes: Sequence[LaneSender],
        failure: str,
        returns: bool = False,
        preempted_after: int | None = None,
    ) -> PServerError | None:
        """Ends the lanes and leaves every server.

        Args:
            lanes: the trainer's.
            failure: "" for a trainer that has done its part.
            returns: this trainer joins again, with another plan.
            preempted_after: the last step of a trainer that is preempted.

        Returns:
            The error that had ended the job before, if a server reports one; it is then passed on
            to the other servers.
        """
        told = None
        for lane in lanes:
            lane.stop()
        for client in reversed(self._clients):  # see [Note: preempted]
            told = client.leave(failure, returns, preempted_after) or told
            failure = failure or (spelled(told) if told is not None else "")
        for lane in lanes:
            lane.rest()
        return told

    def end(self, step: int) -> NoReturn:
        """Ends the process of a preempted trainer that has left.

        Args:
            step: the last step that it has taken.
        """
        # a line of its own form, by which ``launch`` knows it
        said = f"pserver: trainer {self._trainer_id} was preempted after step {step}"
        print(said, file=sys.stderr, flush=True)
        termination.end()

    def _tell(self, reason: str) -> None:
        """Tells all servers at the same time."""
        threads = [
            threading.Thread(target=client.announce_end, args=(reason, TELL_SECONDS), daemon=True)
            for client in self._clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TELL_SECONDS)

    def _abandoned(self) -> None:
        """Leaves in failure, as the process ends without having left: after an exception or a
        signal, or without ``fleet.finish()`` or ``Executor.close()``.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        failed = next((client.failure for client in self._clients if client.failure), None)
        if termination.ends:
            return self._leave(REASON)
        if error is not None:
            return self._leave(spelled(error))
        if termination.came:  # the script's own handler has ended it, after it had called ours
            self._leave(REASON)
        elif failed is not None:  # the script has caught it: the process would end with 0
            self._leave(spelled(failed))
        else:
            failure = "it ended without fleet.finish() or Executor.close()"
            log.error("trainer %d: %s; the job fails", self._trainer_id, failure)
            self._leave(failure)
        _end_in_failure()


_status: object = None  # given to sys.exit by the script


def _note_status() -> None:
    """Notes the status given to ``sys.exit`` from here on: ``atexit`` functions cannot find it."""
    if getattr(sys.exit, "notes_status", False):
        return
    leave = sys.exit

    def noted(status: Any = None, /) -> NoReturn:
        global _status
        _status = status
        leave(status)

    noted.notes_status = True  # type: ignore[attr-defined]  # a function's own
    sys.exit = noted


def _end_in_failure() -> None:
    """Ends the process with the exit status that the script has given to ``sys.exit``, or with 1
    where that is 0 or none.  Nothing else can set it once a script has ended.  ``atexit`` functions
    that were registered before do not run, except logging's.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit((_status & 0xFF or 1) if isinstance(_status, int) else 1)
