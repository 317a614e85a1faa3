"""The servers learn of trainers that have ended on this host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pserver.launcher.process import Process
from pserver.launcher.question import Question, patience
from pserver.launcher.started_processes import StartedProcesses

LAST_WORD = (sys.executable, "-m", "pserver.launcher.last_word")
TELL_SECONDS = 10.0  # for other hosts' servers to be told


@dataclass(frozen=True, slots=True)
class Answer:
    """The servers' answers about a trainer that has ended; None: they have not said it.

    Attributes:
        took_part: no server had seen it leave.
        done: every server had, or had heard that it takes no further step.
        goes_on: every server serves the job without it, or says that the job is done.
    """

    took_part: bool | None = None
    done: bool | None = None
    goes_on: bool | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Answer:
        """From what last_word.py prints; unknown where it has printed nothing."""
        return cls(said.get("took_part"), said.get("done"), said.get("goes_on"))


class EndedTrainers:
    """Tells the servers of trainers that have ended here.

    Args:
        started: the processes of this host.
        environment: the variables of ``launch``; PSERVER_KEYS counts.
    """

    def __init__(self, started: StartedProcesses, environment: Mapping[str, str]) -> None:
        self._started, self._environment = started, environment

    def tell(self, ended: Sequence[Process]) -> None:
        """Tells the servers: for them these trainers are lost, unless they have left."""
        if command := self._command(ended):
            # local servers may have ended with their job, while a trainer still evaluates
            quiet = subprocess.DEVNULL if self._started.cluster.host is None else None
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, timeout=TELL_SECONDS, check=False, stderr=quiet)

    def ask(self, ended: Process, replaced: bool) -> Question | None:
        """Tells the servers of one, and asks what becomes of the job.

        Args:
            replaced: it is to be started again, if the job goes on.

        Returns:
            The question; ``started.events`` gets None when it is answered.  None: there is nobody
            to ask.
        """
        command = self._command([ended])
        if not command:
            return None
        more = [] if replaced else ["--unreplaced"]
        wake = partial(self._started.events.put, None)
        return Question([*command, *more, "--ask", f"{self.patience_seconds:g}"], wake)

    @property
    def patience_seconds(self) -> float:
        """For how long servers are asked that do not answer."""
        return patience(self._started.cluster.heartbeat_timeout_seconds)

    def _command(self, ended: Sequence[Process]) -> list[str]:
        """What tells the servers; nothing where there is nobody to tell, or of nobody."""
        words = [
            f"{number}=its process ended with status {trainer.status}"
            for number, trainer in self._started.trainers.items()
            if trainer in ended
        ]
        endpoints = self._started.asked
        # another host may have taken a joining one's place since: servers must miss it themselves
        if not endpoints or not words or self._started.cluster.joining:
            return []
        keys = self._environment.get("PSERVER_KEYS", "")
        operator = self._started.tokens.operator
        return [*LAST_WORD, operator, keys, ",".join(endpoints), *words]
