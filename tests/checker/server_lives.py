"""The lives of a trial's servers: each process of each of them, and what it holds by the log.

::

    life 0   [first values] update 1, 2, ..., v, ..., w     v: the cut of a save;  w: it dies
    life 1   [ that save's: update 1, 2, ..., v ] update of the first record after its standing, ...
             what was decided between v and its standing is lost there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch

from pserver.checkpoint import checkpoint
from pserver.job.program import InstalledProgram
from pserver.job_log.records import Decided, Process, ProcessStep, Record
from tests.checker.history import Cut, History, Stood
from tests.checker.reapplication import JobReplica, ServerReplica
from tests.checker.worlds import World

LaneStep = tuple[int, ProcessStep]


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a server.

    Attributes:
        held: what it holds, or held when it died.
        path: the directory of what it has begun with; "": with the job's first values.
        stood: what it has said then; None: nothing, as it is the first one.
    """

    server: int
    held: InstalledProgram
    path: str = ""
    stood: Stood | None = None

    @property
    def stands(self) -> int:
        """The number of the last record before it serves."""
        return 0 if self.stood is None else self.stood.last


class ServerLives:
    """All processes of all servers, in their order.

    Args:
        held: by the first ones.
    """

    def __init__(self, held: Sequence[InstalledProgram]) -> None:
        self.of = [[Life(server, each)] for server, each in enumerate(held)]

    def add(self, life: Life) -> None:
        """Another process has taken the place of one that was lost."""
        self.of[life.server].append(life)

    @property
    def held(self) -> list[InstalledProgram]:
        """What the servers hold now, in their order."""
        return [lives[-1].held for lives in self.of]

    @property
    def returned(self) -> list[Life]:
        """The processes that have taken another one's place."""
        return [life for lives in self.of for life in lives[1:]]

    def log(self, history: History) -> list[Record]:
        """All of it: as server 0 has it now, where it, or another server, was lost."""
        decisions = self.held[0].decisions
        coordinator = decisions.coordinator
        assert coordinator is not None, "server 0 has it"
        return list(coordinator._recent) if self.returned else history.log(decisions)

    def __iter__(self) -> Iterator[Life]:
        return (life for lives in self.of for life in lives)


@dataclass(slots=True)
class Timeline:
    """The values that a slice has had, in all lives of its server.

    Attributes:
        passed: update by update.
        updates: for each value but the first, which steps it has taken; nothing where it is that of
            a save, with which a life has begun.
    """

    passed: list[torch.Tensor] = field(default_factory=list)
    updates: list[tuple[ProcessStep, ...]] = field(default_factory=list)


class LivedReplicas:
    """What servers hold by the log, in all of their lives.

    Args:
        world, history: of a trial.
        lives: of its servers.
        log: all of it.

    Attributes:
        servers: as they are now, in their order.
        timelines: by slice.
    """

    def __init__(
        self, world: World, history: History, lives: ServerLives, log: Sequence[Record]
    ) -> None:
        self._world, self._history, self._lives, self._log = world, history, lives, log
        self.servers: list[ServerReplica] = []
        self.timelines: dict[str, Timeline] = defaultdict(Timeline)

    def live(self) -> None:
        """Goes through all lives."""
        if not self._lives.returned:  # all at once: where norms clip they have each other's
            job = self._begun(self._lives.of[0][0])
            job.apply(self._log)
            for server in job.servers.values():
                self._add(server)
            return
        for lives in self._lives.of:
            for life, later in zip_longest(lives, lives[1:]):
                job = self._begun(life)
                job.apply(self._behind(life, None if later is None else later.stands))
                self._add(job.servers[life.server])

    def _add(self, server: ServerReplica) -> None:
        """A life is over, or goes on."""
        self.servers[server.server :] = [server]
        for name, own in server.slices.items():
            timeline = self.timelines[name]
            begins = [()] if timeline.passed else []
            timeline.passed += own.passed
            timeline.updates += [*begins, *own.updates]

    def saved(self, directory: str) -> ServerReplica:
        """A server as it was when it saved."""
        return self._at_cut(directory).servers[self.life_at(directory).server]

    def life_at(self, directory: str) -> Life:
        """Of the server that has written a directory."""
        held = self._cut(directory).held
        return next(life for life in self._lives if life.held is held)

    def lost(self, life: Life) -> set[LaneStep]:
        """The decided steps that a server has not which has come back."""
        if life.stood is None:
            return set()
        decided = {
            (each.what.lane, step)
            for each in self._log
            if each.number <= life.stands and isinstance(each.what, Decided)
            for step in each.what.steps
        }
        return decided.difference(self._at_cut(life.path).taken)

    def counted(self, directory: str) -> set[LaneStep]:
        """The steps that server 0's save counts, though some of them were lost there before."""
        return {*self._at_cut(directory).taken, *self.lost(self.life_at(directory))}

    def watermark(self, directory: str, process: Process, lane: int) -> int:
        """The last step of a process that a server's save counts; 0: it has none."""
        counted = self.counted(directory)
        return max(
            (s.step for each, s in counted if (each, s.process) == (lane, process)), default=0
        )

    def _cut(self, directory: str) -> Cut:
        return self._history.cuts[str(Path(directory).resolve())]

    def _behind(self, life: Life, last: int | None = None) -> list[Record]:
        """The records that a life has been told, up to one."""
        most = len(self._log) if last is None else last
        return [each for each in self._log if life.stands < each.number <= most]

    def _begun(self, life: Life) -> JobReplica:
        """What a life has begun with."""
        if life.stood is None:
            alone = {life.server: life.held}
            held = alone if self._lives.returned else dict(enumerate(self._lives.held))
            return JobReplica(self._world, self._history, held)
        job = self._at_cut(life.path)
        job.servers[life.server].reload(life.held, checkpoint.reading(life.path))
        return job

    def _at_cut(self, directory: str) -> JobReplica:
        life, cut = self.life_at(directory), self._cut(directory)
        job = self._begun(life)
        record = checkpoint.reading(directory).meta["log"]["record"]
        job.apply(self._behind(life, record - 1), cut.removals)
        return job
