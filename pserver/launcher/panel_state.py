"""What the panel of ``launch`` shows, computed from what servers say: pure, but for its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STALE_SECONDS = 5.0  # after which an answer says nothing of now
RATE_SECONDS = 10.0  # over which samples are counted

Server = Mapping[str, Any]  # what ``watch.said`` makes of a server's answer


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the trainer that is least far has come in the data.

    Attributes:
        number: of the pass, from 1.
        batch: that it has been given.
        batches: of the pass; 0: not known.
        seconds_left: of the pass; None: not known yet.
    """

    number: int
    batch: int
    batches: int
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process.

    Attributes:
        step: None: it has none, or none is known.
        memory_bytes: resident; 0: not known.
    """

    name: str
    state: str
    step: int | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """All that a panel shows.

    Attributes:
        seconds: since the launch.
        samples_per_second: of all trainers together; None: not known.
        values: of ``fleet.report``, by name: the mean over the trainers that report it.
    """

    title: str
    seconds: float
    processes: Sequence[ProcessLine]
    progress: Progress | None = None
    samples_per_second: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


class Feed:
    """What servers have said of a job, one time after another.

    One thread calls :meth:`take`; what another reads meanwhile is of before or after.
    """

    def __init__(self) -> None:
        self._servers: Sequence[Server] = ()
        self._taken = 0.0
        self._seen = set[int]()  # trainers that a server has ever known
        self._samples = deque[tuple[float, int]]()  # when, and how many in all
        self._pass = (0, 0)  # which one is timed, and how many batches it has
        self._began = (0.0, 0)  # when it was first seen, and at which batch
        self._view: tuple[Progress | None, float | None, Mapping[str, float]] = (None, None, {})

    def take(self, servers: Sequence[Server], now: float) -> None:
        """What all servers say now.

        Args:
            servers: by number.
            now: in seconds of any clock that only goes on.
        """
        self._servers, self._taken = servers, now
        if not any(server["state"] for server in servers):
            return  # they have ended, or nobody can be reached: what was last known stays
        trainers = self._trainers()
        self._seen |= trainers.keys()
        reports = [trainer["report"] for trainer in trainers.values()]
        self._view = self._progress(reports, now), self._rate(reports, now), means(reports)

    def view(self, title: str, seconds: float, processes: Sequence[ProcessLine]) -> View:
        """What a panel shows of it."""
        return View(title, seconds, processes, *self._view)

    def server(self, number: int, now: float) -> str:
        """A server's state in a word or two; "" where none has been asked."""
        if number >= len(self._servers):
            return ""
        if now - self._taken > STALE_SECONDS or not self._servers[number]["state"]:
            return "no answer"
        return str(self._servers[number]["state"])

    def version(self, number: int) -> int | None:
        """The updates that a server has applied."""
        if number >= len(self._servers) or not self._servers[number]["state"]:
            return None
        return int(self._servers[number]["version"])

    def trainer(self, number: int) -> tuple[str, int | None]:
        """A trainer's state in some words, "" where no server knows it, and its step."""
        known = self._trainers().get(number)
        if known is None:
            return "running" if number in self._seen else "", None
        state, doing = str(known["state"]), str(known["activity"])
        if state == "joined":
            state = "training" if not doing or doing.startswith("step ") else doing
        return state, int(known["step"])

    def _trainers(self) -> dict[int, Mapping[str, Any]]:
        """Each trainer by number, as the first server says that knows it."""
        found: dict[int, Mapping[str, Any]] = {}
        for server in self._servers:
            for trainer in server["trainers"]:
                found.setdefault(trainer["trainer_id"], trainer)
        return found

    def _progress(self, reports: Sequence[Mapping[str, Any]], now: float) -> Progress | None:
        places = [(each["passes"], each["batch"], each["batches"]) for each in reports]
        number, batch, batches = min((each for each in places if each[0]), default=(0, 0, 0))
        if not number:
            return None
        if self._pass != (number, batches) or batch < self._began[1]:
            self._pass, self._began = (number, batches), (now, batch)
        seconds, done = now - self._began[0], batch - self._began[1]
        left = (batches - batch) * seconds / done if batches and done else None
        return Progress(number, batch, batches, left)

    def _rate(self, reports: Sequence[Mapping[str, Any]], now: float) -> float | None:
        samples = sum(each["samples"] for each in reports)
        if self._samples and samples < self._samples[-1][1]:
            self._samples.clear()  # a trainer has left
        self._samples.append((now, samples))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        first, before = self._samples[0]
        return (samples - before) / (now - first) if samples and now > first else None


def means(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each value over the reports that have it.

    Example:
        >>> means([{"values": {"loss": 1.0}}, {"values": {"loss": 3.0, "auc": 0.5}}])
        {'auc': 0.5, 'loss': 2.0}
    """
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report["values"].items():
            found.setdefault(name, []).append(float(value))  # "nan" and "inf" are texts
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}
