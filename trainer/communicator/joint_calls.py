"""The calls that all trainers of a job make together, counted alike on each of them.

[Note: joint calls of a trainer that joins late]  Its script makes them from the first one on, but
for those in iterations over ``fleet.shard`` that are over, which give no batch.  A call that the
others have made does not wait: it gives what they told one another then, where server 0 still
knows that.  A call in which they wait now is made with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pserver.client.client import Client
from trainer.communicator.position import Position


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
