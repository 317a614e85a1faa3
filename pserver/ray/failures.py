"""Which process is the cause of a failure, and the error that says so."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """A process that has failed.

    Attributes:
        kind: "server" or "trainer".
        number: which of them.
        node: the address of its node; "" where it never had one.
        status: its exit status, or 128 + the signal that killed it; None: it went with its actor,
            and nobody knows.
        tail: its last lines.
        told: the words in which it says that another process has ended it; "" where there are
            none.
        gone: why its actor is gone, in Ray's words; "" where it is there.
    """

    kind: str
    number: int
    node: str
    status: int | None
    tail: tuple[str, ...] = ()
    told: str = ""
    gone: str = ""

    @property
    def name(self) -> str:
        """``"trainer 0"``."""
        return f"{self.kind} {self.number}"

    def __str__(self) -> str:
        """One sentence, without the last lines."""
        where = f"{self.name} on node {self.node}" if self.node else self.name
        if self.status is None:
            return f"{where} is gone with its actor: {self.gone}"
        said = f", told by others: {self.told}" if self.told else ""
        return f"{where} failed with status {self.status}{_killer(self.status)}{said}"


class ProcessFailed(RuntimeError):
    """A process of a job on Ray failed, and the job is not started again.

    Attributes:
        failures: the processes that failed by themselves, the likeliest cause first.
        exit_status: of the first one, for ``sys.exit``; 1 where nobody knows it.
    """

    def __init__(self, failures: Sequence[Failure], restarts: int) -> None:
        self.failures = by_cause(failures)
        first = self.failures[0]
        self.exit_status = first.status or 1
        lines = [f"{first}; its last lines:" if first.tail else str(first)]
        lines += [f"    {line}" for line in first.tail]
        lines += [str(other) for other in self.failures[1:]]
        if restarts:
            lines.append(f"the job was started {restarts + 1} times")
        super().__init__("\n".join(lines))


def by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """The likeliest cause first: processes that are gone with their actors, those that a signal
    killed, those that nobody told of another's end, then the others; of each trainers, then
    servers, in the order in which they ended.
    """
    return sorted(
        failures,
        key=lambda each: (
            each.status is not None,
            (each.status or 0) < 128,
            bool(each.told),
            each.kind == "server",
        ),
    )


def _killer(status: int) -> str:
    """The signal that a status of 128 and more stands for, as part of a sentence."""
    if status - 128 not in {each.value for each in signal.Signals}:
        return ""
    return f" (killed by {signal.Signals(status - 128).name})"
