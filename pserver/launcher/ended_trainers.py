"""The servers learn of trainers that have ended on this host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pserver.launcher.process import Process
from pserver.launcher.started_processes import StartedProcesses
from transpiler.files import bounded_json

LAST_WORD = (sys.executable, "-m", "pserver.launcher.last_word")
TELL_SECONDS = 10.0  # for other hosts' servers to be told


@dataclass(frozen=True, slots=True)
class Answer:
    """What servers say of a trainer that has ended.

    Attributes:
        took_part: no server had seen it leave.
        goes_on: every server serves the job without it.
        done: it had said on every server that it takes no further step.
    """

    took_part: bool
    goes_on: bool
    done: bool = False


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

    def ask(self, ended: Process, replaced: bool) -> Answer:
        """Tells the servers of one, and asks what becomes of the job.

        Args:
            replaced: it is to be started again, if the job goes on.
        """
        command = self._command([ended])
        if command and not replaced:
            command.append("--unreplaced")
        with suppress(subprocess.TimeoutExpired, ValueError, KeyError):
            if command:
                asked = subprocess.run(
                    [*command, "--ask"],
                    timeout=TELL_SECONDS,
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                said = bounded_json.loads(asked.stdout)
                return Answer(bool(said["took_part"]), bool(said["goes_on"]), bool(said["done"]))
        return Answer(took_part=False, goes_on=False)

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
