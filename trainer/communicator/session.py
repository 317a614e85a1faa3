"""A trainer's session in a job with servers: its joint calls, its position, how it leaves or ends.

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

[Note: a job is done when all say so]  Each trainer says to every server that it takes no further
step, waits until every server says that all trainers have, and leaves.  While it waits it sends
heartbeats and hears what ends the job.  So if a trainer or a server is lost before the end, no
trainer takes the job for done; and a trainer that has lost one server tells the others.  A process
that ends without having left fails the job, and exits with 1 itself, or with what it has given to
``sys.exit``, never with 0.

[Note: preempted]  A trainer whose host takes it away, and that has a grace period, leaves between
two steps.  All that it has sent is applied by then, the part of a window that a k-step mode has
kept on the trainer too, so nothing is lost, and no step, barrier or bound of the others waits for
it.  It leaves server 0 last: what that one says of it, all servers know.

[Note: joint calls of a trainer that joins late]  Its script makes them from the first one on, but
for those in iterations over ``fleet.shard`` that are over, which give no batch.  A call that the
others have made does not wait: it gives what they told one another then, where server 0 still
knows that.  A call in which they wait now is made with them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol

from pserver.client.client import Client, Told
from pserver.errors import PServerError
from pserver.telemetry.memory import freeze_at_exit
from trainer.senders.buffers import Roll
from trainer.senders.pipeline import LaneSender
from transpiler.files import bounded_json
from transpiler.plan.plan import Plan

# ---- termination ----
#
# SIGTERM: a trainer that is told to end says so to the whole job, and exits with 143.
#
# Without a handler the kernel ends the process at once, and the others wait for the heartbeat
# timeout.


STATUS = 128 + signal.SIGTERM
REASON = "ended by SIGTERM"
TELL_SECONDS = 0.9  # for all servers together
GRACE_SECONDS = 3.0  # for the main thread to come to its handler
AGAIN_SECONDS = 0.05  # for the main thread to leave what has ignored it

Tell = Callable[[str], None]


class Termination:
    """The reaction of this process to SIGTERM.

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


# ---- departure ----
#
# How a trainer leaves its servers: when all trainers agree that the job is done, or with the reason
# why it cannot go on.


log = logging.getLogger(__name__)


def spelled(error: BaseException) -> str:
    """An error as the others are told of it."""
    return f"{type(error).__name__}: {error}"


class Averages(Protocol):
    """The averages among trainers, as far as a trainer's end concerns them."""

    def finish(self) -> None:
        """Says that this trainer takes no further step."""


class Departure:
    """A trainer's end in its job.

    Args:
        clients: its connections.
        trainer_id: its number.
        leave: leaves the job, with the reason; called when the process ends without.
    """

    def __init__(
        self, clients: Sequence[Client], trainer_id: int, leave: Callable[[str], None]
    ) -> None:
        self._clients, self._trainer_id, self._leave = clients, trainer_id, leave

    def expect(self) -> None:
        """From here on the end of the process, or SIGTERM, is told to the servers."""
        atexit.register(self._abandoned)
        termination.add(self._tell)
        _note_status()

    def allow(self, seconds: float) -> None:
        """From here on SIGTERM gives the trainer so long to leave in good order."""
        termination.allow(self._tell, seconds)

    def forget(self) -> None:
        """The trainer leaves: the end of the process says nothing any more."""
        atexit.unregister(self._abandoned)
        termination.remove(self._tell)

    def drain(self, lanes: Sequence[LaneSender]) -> None:
        """Sends the last of what stays on the trainer, and waits until all of it has been applied.

        Raises:
            PServerError: the job has failed.
        """
        if all(client.channels for client in self._clients):
            for lane in lanes:
                lane.leave()
        for client in self._clients:
            client.check()

    def agree(self, among: Averages | None, drained: Callable[[], None]) -> bool:
        """Waits until all trainers have finished.

        Args:
            among: what the trainers average among themselves, if there is something: who waits
                there for this trainer learns that it takes no further step.
            drained: called before.

        Returns:
            Whether they have; False: SIGTERM has come meanwhile.

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
            returns: it joins again, with another plan.
            preempted_after: its host takes it away, after this step.

        Returns:
            What had ended the job before, if a server says so; the other servers are then told.
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
        """Ends the process; it was preempted, and has left.

        Args:
            step: the last one that it has taken.
        """
        # a line of its own form, by which ``launch`` knows it
        said = f"pserver: trainer {self._trainer_id} was preempted after step {step}"
        print(said, file=sys.stderr, flush=True)
        termination.end()

    def _tell(self, reason: str) -> None:
        """Tells all servers at the same time."""
        threads = [
            threading.Thread(target=client.tell, args=(reason, TELL_SECONDS), daemon=True)
            for client in self._clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TELL_SECONDS)

    def _abandoned(self) -> None:
        """The process ends, and has not left: after an exception or a signal, or without
        ``fleet.finish()`` or ``Executor.close()``.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        failed = next((client.failure for client in self._clients if client.failure), None)
        if termination.ends:
            return self._leave(REASON)
        if error is not None:
            return self._leave(spelled(error))
        if termination.came:  # the script's own handler has ended it, after it had called ours
            self._leave(REASON)
        elif failed is not None:  # which the script has caught: its end would be a success's
            self._leave(spelled(failed))
        else:
            failure = "it ended without fleet.finish() or Executor.close()"
            log.error("trainer %d: %s; the job fails", self._trainer_id, failure)
            self._leave(failure)
        _end_in_failure()


_status: object = None  # that the script has given to sys.exit


def _note_status() -> None:
    """From here on notes what is given to ``sys.exit``: at the process's end nothing tells it."""
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
    where that is 0 or none.  Nothing else can set it once a script has come to its end; ``atexit``
    functions that were registered before are left out, but logging's.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit((_status & 0xFF or 1) if isinstance(_status, int) else 1)


# ---- position ----
#
# Where a trainer's script is, for one that joins late; and, on that one, where the others are.
#
# See [Note: where the others are] in pserver/job/script_position.py.


MOST = 2**18  # characters of a position


class Position:
    """One trainer's side of the questions where the job is.

    The script's thread calls it; but for :meth:`asked`, which the heartbeat's does.

    Args:
        client: of server 0.
        roll: which trainers are there.
        plan: of the job.
        lanes: this trainer's side of its lanes.
        closed: those of them whose step is under way; it changes.

    Attributes:
        parts: what a position says: by name, what gives it, as JSON can hold it.
        quiet: nobody is told now where the script is.
        settled: whether the script is where its part says.
        taken: by name, what is told that part of the others' position; None: they could not say.
    """

    def __init__(
        self,
        client: Client,
        roll: Roll,
        plan: Plan,
        lanes: Sequence[LaneSender],
        closed: Collection[int],
    ) -> None:
        self._client, self._roll = client, roll
        self._plan, self._lanes, self._closed = plan, lanes, closed
        client.asked = self.asked
        self.settled: Callable[[], bool] = lambda: True
        self.quiet = False
        self.parts: dict[str, Callable[[], Any]] = {}
        self.taken: dict[str, Callable[[Any], None]] = {}
        self._asked = self._answered = 0  # numbers of questions
        self._lock = threading.Lock()  # guards the one below; while it is held no wait ends
        self._waits = 0  # how many waits the script's thread is in, one in another

    # ---- for others ----

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the script's thread waits: another one may say where it is."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, in the middle of a wait, the script's thread does something."""
        with self._lock:
            self._waits -= 1
        try:
            yield
        finally:
            with self._lock:
                self._waits += 1

    def asked(self, number: int) -> None:
        """Another trainer asks; answers if the script's thread waits now."""
        self._asked = max(self._asked, number)
        with self._lock:
            if not self._waits or self._answered >= number or not self._known:
                return
            told, step = self._said(), self.step
        # a heartbeat does not wait for another call
        threading.Thread(
            target=self._answer, args=(number, told, step), name="position", daemon=True
        ).start()

    def answer(self) -> None:
        """The script is about to close a step: answers what was asked."""
        if self._asked > self._answered and self._known:
            self._answer(self._asked, self._said(), self.step)

    @property
    def step(self) -> int:
        """That the position is just before: the one under way, or the next one, of the first lane
        whose steps need all trainers; 0: there is no such lane.
        """
        for index, lane in enumerate(self._plan.lanes):
            if lane.kind.merges_gradients:
                return self._lanes[index].step + (0 if index in self._closed else 1)
        return 0

    @property
    def _known(self) -> bool:
        return not (self.late or self.quiet) and self.settled()

    def _answer(self, number: int, told: Told, step: int) -> None:
        with suppress(PServerError):  # the job has failed, and says so elsewhere
            if self._client.positions.answer(number, told, step):
                self._answered = max(self._answered, number)

    def _said(self) -> Told:
        """This trainer's position, as text."""
        text = json.dumps({name: part() for name, part in self.parts.items()})
        if len(text) <= MOST:
            return Told(text)
        why = f"expected up to {MOST} characters of it, got {len(text)}"
        log.warning(
            "a trainer has joined, and cannot be told where the script is: %s; its schedulers and "
            "passes begin anew",
            why,
        )
        return Told("", why)

    # ---- on the one that joins ----

    @property
    def late(self) -> bool:
        """Whether this trainer has joined late, and does not know yet where the others are."""
        return self._client.late

    def find(self) -> None:
        """On a trainer that has joined late: waits until it knows where the others are.  Nothing
        afterwards, nor on any other trainer.

        Raises:
            PServerError: the job has failed.
        """
        if not self.late:
            return
        told = self._client.positions.ask(lambda: f"trainer {self._roll.first}")
        self._client.late = False
        if told.problem:
            log.warning(
                "this trainer joins a job under way, and cannot be told where its script is: %s; "
                "its schedulers and its passes over the data begin anew",
                told.problem,
            )
        position: Mapping[str, Any] = bounded_json.loads(told.position) if told.position else {}
        for name, take in self.taken.items():
            take(position.get(name))


# ---- joint calls ----
#
# The calls that all trainers of a job make together, counted alike on each of them.


class JointCalls:
    """One trainer's joint calls.  The script's thread makes them.

    Args:
        client: of server 0.
        position: of this trainer, and, where it has joined late, of the others.
        check: raises what has ended the job.

    Attributes:
        made: how many the script has made.
        past: the others had made the last one before this trainer came.
        noticed: called for each that it makes.
        meanwhile: called before it waits in one, and every second until then: comes to what the
            others may wait for.
        attend: likewise, in calls that are not counted, too.
        replays: a script that joins late makes its calls from the first one on; otherwise it begins
            with the next one.
    """

    def __init__(self, client: Client, position: Position, check: Callable[[], None]) -> None:
        self._client, self._position, self._check = client, position, check
        self.made = 0
        self.past = False
        self.noticed: Callable[[], None] = lambda: None
        self.meanwhile: Callable[[], None] = lambda: None
        self.attend: Callable[[], None] = lambda: None
        self.replays = False
        self._under_way = ""  # the one that the script waits in
        self._theirs = 0  # that the others had made when this trainer came
        self._awaited = ""  # the one that they waited in then
        position.parts["joint calls"] = self._plain
        position.taken["joint calls"] = self._take

    def meet(self, name: str, text: str) -> dict[int, str]:
        """Waits for every trainer that has not left.

        Returns:
            What trainers have told, by trainer; those that told nothing are not in it.
        """
        self._position.find()
        self.made += 1
        numbered = f"{self.made}: {name}"
        self.past = self.made <= self._theirs
        if self.past:
            return self._client.barrier(numbered, text, self._check, past=True)
        self._under_way = numbered
        try:
            return self._wait(numbered, text)
        finally:
            self._under_way = ""
            self.noticed()

    def _wait(self, name: str, text: str) -> dict[int, str]:
        def check() -> None:
            self._check()
            self.attend()
            with self._position.working():
                self.meanwhile()

        with self._position.waiting():
            check()
            return self._client.barrier(name, text, check)

    def meet_apart(self, name: str, text: str) -> dict[int, str]:
        """The same at a barrier that is not counted: its name alone says which one it is.  Trainers
        come there from joint calls, and from their waits for samples, too.

        Raises:
            PutOff: it is not held.
        """

        def check() -> None:
            self._check()
            self.attend()

        with self._position.waiting():
            return self._client.barrier(name, text, check, apart=True)

    def skip(self, calls: int) -> None:
        """The script does not come by so many calls, in an iteration that is over."""
        self.made += calls

    def arrive(self) -> None:
        """The script is where the others are; comes to the call in which they wait, where it has
        come by that without making it.
        """
        self.made = max(self.made, self._theirs)
        if self._awaited and self.made == self._theirs:
            self.made += 1
            self._wait(self._awaited, "")
        self._awaited = ""

    def _plain(self) -> dict[str, Any]:
        return {"made": self.made - bool(self._under_way), "under way": self._under_way}

    def _take(self, plain: Mapping[str, Any] | None) -> None:
        if plain is not None:
            self._theirs, self._awaited = plain["made"], plain["under way"]
        if not self.replays:
            self.made, self._awaited = self._theirs, ""


class Apart:
    """Where trainers meet by a name of the meeting's own, and not by the number of a call.

    Args:
        joint: the job's joint calls.
    """

    def __init__(self, joint: JointCalls) -> None:
        self._joint = joint

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """See :meth:`JointCalls.meet_apart`."""
        return self._joint.meet_apart(name, text)
