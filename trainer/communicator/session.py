"""SIGTERM: a trainer that is told to end says so to the whole job, and exits with 143.

Without a handler the kernel ends the process at once, and the others wait for the heartbeat
timeout.

[Note: whose signal it is]  A script, or its trainer class, may install a handler of its own for
SIGTERM before this one or after it, for the whole job or for a while.  So who owns the signal is
asked when it comes: it is the handler that the interpreter has then.  Where that is another one,
nobody is told anything, and the process goes on as that handler says.  It may call the one that it
has found: from inside another's handler ours only notes that SIGTERM has come.

[Note: told within a second]  Python runs a handler between two bytecodes of the main thread, which
may be in a long backward pass or in a wait inside a library.  So the handler of the C level also
writes the signal's number into a pipe (``signal.set_wakeup_fd``), where a thread of ours reads
it.  That thread tells the job, whatever the main thread is doing; the handler then raises
``SystemExit(143)`` in the main thread, so that ``finally`` and ``atexit`` run.  A main thread that
does not come to its handler for ``GRACE_SECONDS`` is left behind: the process ends without it.

[Note: a grace period]  Where the job allows it, the first SIGTERM changes nothing but a flag, and
the trainer leaves the job at the end of its step::

    SIGTERM --> the step goes on --its end--> leaves the servers --> SystemExit(143)
                       |
                       `--the grace period is over--> as without one

Further SIGTERMs during that time change nothing.

The interpreter ignores what is raised inside a ``__del__`` or the callback of a weak reference,
where the handler may happen to run: then the signal is raised once more.

A forked child (a worker of a DataLoader, which is ended with SIGTERM) inherits handler and pipe,
and gives both back at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from pserver.telemetry.memory import freeze_at_exit

STATUS = 128 + signal.SIGTERM
REASON = "ended by SIGTERM"
TELL_SECONDS = 0.9  # for all servers together
GRACE_SECONDS = 3.0  # for the main thread to come to its handler
AGAIN_SECONDS = 0.05  # for the main thread to leave what has ignored it

Tell = Callable[[str], None]


class Termination:
    """What this process does on SIGTERM.

    Attributes:
        came: SIGTERM has come.
    """

    def __init__(self) -> None:
        self.came = False
        self._lock = threading.Lock()  # of who replaces _tells; nothing else happens under it
        # what tells the job, and its grace period in seconds; replaced, never changed, as the
        # handler must not wait for a lock
        self._tells: Mapping[Tell, float] = {}
        self._granted: dict[str, float] = {}  # the grace period of the SIGTERM that came
        self._over = threading.Event()  # the grace period, or the trainer has left
        self._installed = False
        self._exit: SystemExit | None = None  # that the handler has raised last
        self._read, self._write = -1, -1  # a pipe, from where the handler is installed
        self._told = threading.Event()
        self._noticed = threading.Event()

    def add(self, tell: Tell) -> None:
        """Tells the job by ``tell`` when SIGTERM comes; it is called in a thread of its own, with
        the reason, and must not wait for locks that the script's threads hold for long.

        The first call installs the handler, if it comes from the main thread and the script has
        none.  See [Note: whose signal it is].
        """
        freeze_at_exit()  # others wait for this process's end
        self.allow(tell, 0.0)
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._install()

    def allow(self, tell: Tell, seconds: float) -> None:
        """From here on a SIGTERM is told by ``tell`` only when the trainer has not left by then.

        Args:
            seconds: the grace period; 0: it is told at once.
        """
        with self._lock:
            self._tells = {**self._tells, tell: seconds}

    def remove(self, tell: Tell) -> None:
        """Forgets one that :meth:`add` was given."""
        with self._lock:
            self._tells = {each: s for each, s in self._tells.items() if each != tell}

    @property
    def ends(self) -> bool:
        """Whether SIGTERM ends the process: the handler here has raised, not the script's own."""
        return self._exit is not None

    @property
    def awaited(self) -> bool:
        """Whether SIGTERM has come, and the trainer may leave the job in good order."""
        return bool(self._granted.get("seconds")) and not self._over.is_set()

    def end(self) -> NoReturn:
        """Ends the process: the trainer has left the job in good order."""
        self._told.set()
        self._over.set()
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)  # the handler ends the main thread
        raise SystemExit(STATUS)

    def _grant(self) -> float:
        """The grace period in seconds: the shortest of all; 0: there is none.  It is decided
        once.
        """
        return self._granted.setdefault("seconds", min(self._tells.values(), default=0.0))

    def _owns(self) -> bool:
        """See [Note: whose signal it is]."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _install(self) -> None:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._installed = True
        self._read, self._write = os.pipe()  # not before: forked processes have one each
        threading.Thread(target=self._watch, name="termination", daemon=True).start()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop has one already, and the handler alone must do
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self._handle)
        sys.unraisablehook = partial(self._ignored, sys.unraisablehook)
        # a child that gets SIGTERM before it has given back would speak for this process
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, (signal.SIGTERM,)),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, (signal.SIGTERM,)),
            after_in_child=self._give_back,
        )

    def _give_back(self) -> None:
        """In a forked child: the pipe too, where the handler is another's for a while."""
        if (other := signal.set_wakeup_fd(-1)) not in (-1, self._write):
            signal.set_wakeup_fd(other)
        if self._owns():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread; also called from inside another's."""
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
        """``sys.unraisablehook``: if the interpreter has ignored the handler's exception, the
        signal comes again.
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
        if not self._noticed.wait(GRACE_SECONDS):
            with suppress(OSError):  # nobody can be told
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
