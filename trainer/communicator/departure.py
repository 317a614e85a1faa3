"""How a trainer leaves its servers: when all trainers agree that the job is done, or with the
reason why it cannot go on.

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
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from pserver.client.client import Client
from pserver.errors import PServerError
from trainer.communicator.lane import LaneSender
from trainer.communicator.termination import REASON, TELL_SECONDS, termination

log = logging.getLogger(__name__)


def spelled(error: BaseException) -> str:
    """An error as the others are told of it."""
    return f"{type(error).__name__}: {error}"


class Averages(Protocol):
    """What trainers average among themselves, as far as a trainer's end concerns it."""

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
