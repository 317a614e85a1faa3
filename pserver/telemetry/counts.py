"""The counts of each trainer's steps, and of what else a trainer does, on one server.

A row of :data:`COUNTS` is a metric with the label "trainer", a number of the trainer's status, and,
where it has one, a line of ``pserver status`` and a warning of the page.  All are counted by
:meth:`TrainerCounts.count`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pserver.wire_pb2 import TrainerStatus


@dataclass(frozen=True, slots=True)
class TrainerCount:
    """One count of a trainer on one server, from the job's start.

    Attributes:
        metric: its name, without "_total".
        sentence: for documentation.
        line: of ``pserver status`` and of the page, about the sum over trainers, which takes the
            place of "{}"; "": there is none.
    """

    metric: str
    sentence: str
    line: str = ""


COUNTS: Mapping[str, TrainerCount] = MappingProxyType(
    {
        "nonfinite": TrainerCount(
            "pserver_nonfinite", "Steps in which this server has found a NaN or an infinity."
        ),
        "outlier": TrainerCount(
            "pserver_outlier_pushes",
            "Steps with a norm far beyond its history, where outlier_push looks for them.",
        ),
        "partial": TrainerCount(
            "pserver_partial_steps",
            "Steps of lost trainers that count in lanes of one mode, or in averages, only.",
            "{} steps of lost trainers count in some modes only",
        ),
        "refused_nonfinite": TrainerCount(
            "pserver_refused_nonfinite",
            "Steps that servers have refused because of a NaN or an infinity.",
            "{} steps refused because of a NaN or an infinity",
        ),
        "refused_outlier": TrainerCount(
            "pserver_refused_outlier",
            "Steps that servers have refused because a norm was far beyond its history.",
            "{} steps refused because a norm was far beyond its history",
        ),
        "wrong_lines": TrainerCount(
            "pserver_wrong_lines",
            'Lines of files that trainers have left out, with on_error="skip": each time that they '
            "are read.",
            "{} wrong lines of files left out",
        ),
    }
)


class TrainerCounts:
    """The counts of all trainers of a job.  Any thread may call it.

    Example:
        >>> counts = TrainerCounts()
        >>> counts.count(1, "nonfinite")
        >>> counts.of(1)
        {'nonfinite': 1}
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, int]] = {}  # by trainer, by name
        self._lock = threading.Lock()  # guards it

    def count(self, trainer: int, name: str, times: int = 1) -> None:
        """Counts a trainer's steps, or whatever the name counts.

        Args:
            name: a key of ``COUNTS``.
        """
        with self._lock:
            self._counts.setdefault(trainer, dict.fromkeys(COUNTS, 0))[name] += times

    def of(self, trainer: int) -> dict[str, int]:
        """The counts of a trainer that are not 0, by name."""
        with self._lock:
            return {name: each for name, each in self._counts.get(trainer, {}).items() if each}

    def all(self) -> dict[int, dict[str, int]]:
        """All counts, by trainer and name."""
        with self._lock:
            return {trainer: dict(each) for trainer, each in self._counts.items()}


def counted(trainers: Iterable[TrainerStatus], name: str) -> int:
    """A count over the trainers of a server's status.

    Args:
        name: a key of ``COUNTS``.
    """
    return sum(each.counts[name] for each in trainers if name in each.counts)


def most_counted(servers: Iterable[Iterable[TrainerStatus]], name: str) -> int:
    """A count over the trainers of a job: that of the server that has counted most, as all servers
    refuse alike.

    Args:
        servers: the trainers of each server's status.
        name: a key of ``COUNTS``.
    """
    return max((counted(trainers, name) for trainers in servers), default=0)


def count_lines(servers: Sequence[Iterable[TrainerStatus]]) -> Iterator[str]:
    """The lines about the counts of a job that are not 0.

    Args:
        servers: the trainers of each server's status.
    """
    for name, each in COUNTS.items():
        if each.line and (found := most_counted(servers, name)):
            yield each.line.format(found)
