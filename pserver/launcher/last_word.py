"""Tells servers on other hosts that trainers of this one have ended: ``launch`` runs it as a
process, because it imports gRPC, and ``launch`` does not.

::

    python -m pserver.launcher.last_word TOKEN KEYS ENDPOINTS "1=its process ended with status 3"

TOKEN is the path of the operator's token file, KEYS the folder of this host's keys, each or "".
With keys it must have an operator's: no other role may report for a process that has ended.

A trainer reports its own end if it can; this is for one that cannot.

With ``--unreplaced`` they will not be started again, so that the others need not wait for it.

With ``--ask SECONDS`` it also asks whether the job continues, and prints one line of JSON::

    {"took_part": true, "done": false, "goes_on": null, "reason": "..."}

``took_part``: every server knew them as members, and not every one had seen them leave; ``done``:
every server had, or knew that they take no further step; ``goes_on``: every server serves the job
without them, or reports that it is done.  A server that does not answer has not refused: it is
asked again, until that time is over.  Unknown values are null.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from pserver import timeouts
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.polling import poll
from pserver.security.access import Access
from pserver.wire_pb2 import AnnounceRequest, StatusReply

PAUSE_SECONDS = 0.2  # between two rounds of questions
ASK, UNREPLACED = "--ask", "--unreplaced"

log = logging.getLogger(__name__)


def report_ends(
    access: Access, endpoints: Sequence[str], words: Sequence[str], unreplaced: bool = False
) -> None:
    """Reports the ended trainers to every reachable server.

    Args:
        access: an operator's.
        words: "NUMBER=REASON" of each trainer.
        unreplaced: they will not be started again.
    """
    for endpoint in endpoints:
        control = ControlClient(endpoint, timeouts.WATCH_SECONDS, access=access)
        try:
            _announce(control, words, unreplaced)
        except PServerError as error:
            print(f"could not report ended trainers: {error}", file=sys.stderr)
        finally:
            control.close()


def _announce(control: ControlClient, words: Sequence[str], unreplaced: bool) -> None:
    for word in words:
        number, _, reason = word.partition("=")
        request = AnnounceRequest(trainer_id=int(number), failure=reason)
        request.unreplaced = unreplaced
        control.announce(request)


class EndQuestion:
    """One server's answers about trainers that have ended: first their states, then whether the job
    continues without them.

    Args:
        access: an operator's.
        words: "NUMBER=REASON" of each trainer.
        unreplaced: they will not be started again.

    Attributes:
        were: by trainer, the word for its state when the server answered first; None: it has not
            answered.
        told: the server knows of their ends.
        obstacle: why the job does not continue there; "": it does; None: not known.
    """

    def __init__(
        self, access: Access, endpoint: str, words: Sequence[str], unreplaced: bool
    ) -> None:
        self._access, self._endpoint, self._words = access, endpoint, words
        self._unreplaced = unreplaced
        self._trainers = {int(word.partition("=")[0]) for word in words}
        self.were: dict[int, str] | None = None
        self.told = False
        self.obstacle: str | None = None

    @property
    def answered(self) -> bool:
        """Whether all is known."""
        return self.told and self.obstacle is not None

    def ask(self) -> None:
        """Asks the server, and reports to it, once; nothing changes where it does not answer."""
        control = ControlClient(self._endpoint, timeouts.WATCH_SECONDS, access=self._access)
        try:
            status = control.status()
            if self.were is None:
                self.were = states(status, self._trainers)
            if not self.told:
                _announce(control, self._words, self._unreplaced)
                self.told = True
                status = control.status()
            self.obstacle = obstacle(status, self._trainers)
        except PServerError as error:
            log.debug("%s", error)  # it is asked again
        finally:
            control.close()


@dataclass(frozen=True, slots=True)
class EndAnswers:
    """The servers' answers about trainers that have ended.

    Attributes:
        took_part: every server knew them as members, and not every one had seen all of them leave;
            None: not known.
        done: every server had, or knew that they take no further step; None: not known.
        goes_on: every server continues without them, or its job is done; None: not known.
        reason: why it does not.
    """

    took_part: bool | None
    done: bool | None
    goes_on: bool | None
    reason: str

    @classmethod
    def of(cls, questions: Sequence[EndQuestion]) -> EndAnswers:
        """The answers of all servers as one."""
        words = [None if q.were is None else set(q.were.values()) for q in questions]
        each = [word for word in words if word is not None]
        known, left = len(each) == len(words), all(word <= GONE for word in each)
        obstacles = [question.obstacle for question in questions]
        reason = next((text for text in obstacles if text), "")
        return cls(
            took_part=all(w <= MEMBERS for w in each) and not left if known else None,
            done=left if known else None,
            goes_on=False if reason else None if None in obstacles else True,
            reason=reason,
        )


def ask(questions: Sequence[EndQuestion], seconds: float) -> EndAnswers:
    """Asks servers until all answers are known, or one has refused, or the time is over."""
    waited = "waiting for servers to report whether the job continues"
    for _ in poll(log, lambda: waited, seconds, PAUSE_SECONDS):
        for question in questions:
            if not question.answered:
                question.ask()
        if all(each.answered for each in questions) or any(each.obstacle for each in questions):
            break
    return EndAnswers.of(questions)


GONE = {"finished", "left", "preempted", "done"}  # takes no further step
MEMBERS = {"joined", "lost"} | GONE


def states(status: StatusReply, trainers: Collection[int]) -> dict[int, str]:
    """The state of each of these trainers on a server: its word in ``pserver status``; "done" where
    the job is; "" where the server has not seen it.
    """
    there = {each.trainer_id: each.state for each in status.trainers}
    other = "done" if is_done(status) else ""
    return {trainer: there.get(trainer, other) for trainer in trainers}


def is_done(status: StatusReply) -> bool:
    """Whether the last job of a server has ended well, and no other one has begun."""
    ends = [each.kind for each in status.events if each.kind in ("done", "failed")]
    return status.state == "empty" and ends[-1:] == ["done"]


def obstacle(status: StatusReply, trainers: Collection[int]) -> str | None:
    """Why a job does not continue without trainers; "" if it does; None while they are live.

    Args:
        status: of a server.
    """
    if is_done(status):
        return ""
    if status.state != "serving":
        return status.failure or f"the server is {status.state}"
    words = states(status, trainers).values()
    if "" in words:
        return "they had not joined"
    return None if "joined" in words else ""


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    rest = [each for each in arguments if each != UNREPLACED]
    unreplaced = len(rest) < len(arguments)
    seconds = None
    if ASK in rest:
        at = rest.index(ASK)
        seconds = float(rest[at + 1])
        del rest[at : at + 2]
    token, keys, endpoints, *words = rest
    access, servers = Access.of(token, keys, "operator", "trainer"), endpoints.split(",")
    if seconds is None:
        report_ends(access, servers, words, unreplaced)
        return
    said = ask([EndQuestion(access, each, words, unreplaced) for each in servers], seconds)
    print(json.dumps(asdict(said)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
