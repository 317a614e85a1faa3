"""The state of a server that was started again while its job continued.

::

    ASKING --a trainer brings the program--> LOADING --the save is read--> LINKING
                                                                              |
                              DONE <--server 0 says where the log stands------'
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pserver.errors import UnknownSession
from pserver.job_log.records import Applied, LogSnapshot, Loss, Process, losses
from pserver.membership.members import Watermarks


@dataclass(slots=True)
class Reload:
    """The state of a reload.  The caller holds the job's lock.

    Attributes:
        path: of the save from which it resumes.
        began: a program has arrived, and the save is being read.
        done: it serves.
        lost: by trainer, what was lost of decided steps.
    """

    path: str
    began: bool = False
    done: bool = False
    lost: Mapping[int, Loss] = field(default_factory=dict)
    _installer: str = ""  # the incarnation of the trainer that brings the program
    _sessions: list[str] = field(default_factory=list)  # that such trainers were given for this
    _asked_at: float = 0.0
    _saved: Mapping[Process, Sequence[Applied]] = field(default_factory=dict)
    _lost_before: Mapping[int, Loss] = field(default_factory=dict)
    _record: int = 0  # of the job's log, as of which the save is

    def asked(self, incarnation: str, now: float, timeout: float) -> str:
        """The session with which a joining trainer is to bring the program; "" where it is not to
        bring it, and asks again later.

        Args:
            now: in seconds of the job's clock.
            timeout: after which another trainer is to bring it.
        """
        if self.began:
            return ""
        if self._installer not in ("", incarnation) and now - self._asked_at < timeout:
            return ""
        if self._installer != incarnation:
            self._installer = incarnation
            self._sessions.append(secrets.token_hex(16))
        self._asked_at = now
        return self._sessions[-1]

    def asks(self, session: str) -> bool:
        """Whether a call comes from a trainer that was asked for the program, even a late one."""
        asked = [secrets.compare_digest(each.encode(), session.encode()) for each in self._sessions]
        return any(asked)

    def check(self, session: str) -> None:
        """Returns if a call comes from such a trainer.

        Raises:
            UnknownSession: it is of another; or was asked by another process of this server.
        """
        if not self.asks(session):
            raise UnknownSession(
                "this server has come back, and takes its program from another trainer"
            )

    def read(self, meta: Mapping[str, Any]) -> None:
        """Notes the contents of the save, which has been read.

        Args:
            meta: the save's.
        """
        self._saved = saved_steps(meta.get("watermarks", {}))
        self._record = meta.get("log", {}).get("record", 0)
        lost = meta.get("lost", {})
        self._lost_before = {int(trainer): Loss(*each) for trainer, each in lost.items()}

    def lacks_load(self, snapshot: LogSnapshot) -> bool:
        """Whether the job has loaded other values since the save: then this server would hold
        values from before it beside the others'.
        """
        return self._of_this_run(snapshot) and snapshot.loaded > self._record

    def _of_this_run(self, snapshot: LogSnapshot) -> bool:
        """Whether the save is of this run of the job: one of an earlier run says nothing of it."""
        return any(each.process in self._saved for each in snapshot.processes)

    def stands(self, snapshot: LogSnapshot) -> Mapping[int, Loss]:
        """Takes server 0's state of the log.

        Returns:
            By trainer, the losses since the save; ``lost`` has earlier ones, too.
        """
        found = losses(snapshot, self._saved)
        before = self._lost_before if self._of_this_run(snapshot) else {}
        trainers = sorted(found.keys() | before.keys())
        self.lost = {t: found.get(t, Loss()).plus(before.get(t, Loss())) for t in trainers}
        self.done = True
        return found


def saved_steps(watermarks: Watermarks) -> dict[Process, list[Applied]]:
    """The steps of each process that are in a save, by lane.

    Args:
        watermarks: the save's.
    """
    found: dict[Process, list[Applied]] = {}
    for trainer, each in watermarks.items():
        lanes = {int(lane): values for lane, values in each["lanes"].items() if int(lane) >= 0}
        empty: list[int] = [0, 0, 0]
        by_lane = [lanes.get(lane, empty) for lane in range(max(lanes, default=-1) + 1)]
        process = Process(int(trainer), each["incarnation"])
        found[process] = [Applied(values[0], sum(values[3:])) for values in by_lane]
    return found
