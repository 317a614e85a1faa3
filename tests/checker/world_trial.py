"""Runs one trial in which trainers come and go and links break, and checks its history."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

from pserver.config import ServerConfig, split_endpoint
from pserver.errors import ServerLost
from pserver.job_log.follower import FollowerLink
from pserver.job_log.records import Process as LogProcess
from pserver.lane.independent import IndependentSteps
from pserver.lane.together import JointSteps
from pserver.launcher import last_word
from pserver.membership.decisions import Decisions
from pserver.security.access import OPEN
from tests.checker.history import History
from tests.checker.laws import Laws
from tests.checker.lost_servers import LostServers, quick_heartbeats
from tests.checker.processes import TIMEOUT_SECONDS, Process
from tests.checker.restores import restored
from tests.checker.server_lives import ServerLives
from tests.checker.standing import Standing
from tests.checker.trial import TwinServer, ViolatedInvariant, short_waits
from tests.checker.worlds import LOSSES, Event, World
from tests.checker.written import written_differences
from tests.faults.faults import CallInjector, Partitions, faulty_calls, injected

ENDS = (*LOSSES, "leaves")
# of servers, where one is lost: the trainer that is to bring its program may die, too
HEARTBEAT_SECONDS = 8.0
FENCED_SECONDS = 20.0  # until all servers have a record of a loss
ATTEND_SECONDS = 0.05  # between two looks of one that has nothing left to do
SLOW_SECONDS = (0.0, 0.0, 0.002, 0.01)  # of a slow update
TOLD_SECONDS = 0.5  # between two words of it, where servers may be away


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        failure: "" if every law held.
        faults: by (what, direction, kind): how often.
        events: by kind: how often.
        quiet_seconds: where it did not end, for how long nothing had happened by then.
    """

    world: World
    failure: str = ""
    faults: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    records: int = 0
    quiet_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.world}\n  {self.failure or 'every law held'}"


class Trial:
    """One trial, with real servers in this process and trainers in threads."""

    def __init__(
        self,
        world: World,
        servers: list[TwinServer],
        partitions: Partitions,
        folder: str | None = None,
        standing: Standing | None = None,
    ) -> None:
        self.world, self.servers, self._partitions = world, servers, partitions
        self._folder, self._standing = folder, standing or Standing()
        self.endpoints = tuple(server.endpoint for server in servers)
        self.history = History()
        self.starts: list[Process] = []
        self.events: Counter[str] = Counter()
        self._ended: set[int] = set()  # numbers whose process has no samples left
        self._begun = (
            0  # of the first processes: nothing befalls the job before all of them are there
        )
        self._joining = 0  # another process is to take a number
        self._taken = Counter[int]()  # steps, by trainer
        self._newest = ""  # save
        self._saving = threading.Lock()  # one trainer at a time saves
        self._lost: LostServers | None = None
        self._changed = threading.Condition()  # guards all of the above
        self._due = list(world.events)
        self.deadline = time.monotonic() + TIMEOUT_SECONDS
        self.quiet_seconds = 0.0  # when it is given up

    # ---- starts ----

    def _start(self, number: int) -> Process:
        with self._changed:
            count = sum(each.number == number for each in self.starts)
            process = Process(self.world, self.endpoints, number, count, self.history)
            self.starts.append(process)
        process.start()
        return process

    def run(self) -> None:
        """From the first start until all have finished.

        Raises:
            ViolatedInvariant, PServerError: what went wrong.
        """
        pool = ThreadPoolExecutor(self.world.trainers, thread_name_prefix="trainer")
        try:
            self._all(pool.submit(self._live, number) for number in range(self.world.trainers))
        finally:
            pool.shutdown(wait=False)
        if self._lost is not None:
            self._lost.wait()

    def _begins(self, number: int) -> Process:
        """One of the job's first processes, which start side by side; the first of them that has
        started finds all servers at work.
        """
        process = self._start(number)
        with self._changed:
            if self._lost is None:
                self.lives = ServerLives([server.job.installed() for server in self.servers])
                self._lost = LostServers(
                    self.servers, self.lives, self.history, self._partitions.names, self._loses
                )
            self._begun += 1
            self._changed.notify_all()
        return process

    def _loses(self) -> None:
        self.events["server_lost"] += 1

    def _all(self, submitted: Iterator[Future[None]]) -> None:
        running = list(submitted)
        done = wait(running, self.deadline - time.monotonic(), FIRST_EXCEPTION)
        for each in sorted(done.done, key=lambda each: each.exception() is None):
            each.result()
        if done.not_done:
            self.quiet_seconds = self.history.quiet_seconds
            if missed := self._standing.missed():
                raise ViolatedInvariant(f"nobody wakes a thread that waits for {missed}")
            raise ViolatedInvariant(f"the trial did not end within {TIMEOUT_SECONDS:g} s")

    def restored(self) -> str:
        """Has new servers load the last save.

        Returns:
            What they hold that they should not; "": all is as it was saved.
        """
        paths = [path for each in self.starts for path in each.saved]
        if self._folder is None or not paths:
            return ""
        self.events["restores"] += 1
        return next(restored(self.world, self._folder, paths[-1], self.history, self.lives), "")

    def end(self, failure: str) -> None:
        """Whoever still takes part ends."""
        if self._lost is not None:
            self._lost.end()
        for process in self.starts:
            if not process.left:
                process.communicator.leave(failure or "the trial is over")

    # ---- the life of a trainer's number ----

    def _live(self, number: int) -> None:
        process: Process | None
        if number not in self.world.late:
            process = self._begins(number)
        else:
            late = next(e for e in self._due if (e.kind, e.trainer) == ("late", number))
            with self._changed:
                self._changed.wait_for(lambda: self._taken.total() >= late.step, 1.0)
            process = self._start(number)
            with self._changed:
                self._due.remove(late)
                self.events["late"] += 1
                self._changed.notify_all()
        while process is not None:
            last, process = process, self._train(process)
        with self._changed:
            self._ended.add(number)
            self._changed.notify_all()
        if not last.left:
            self._wait_for_joiners(last)
            last.finish()

    def _wait_for_joiners(self, process: Process) -> None:
        """A job whose trainers have all finished is over: nobody can join it any more.

        Args:
            process: has nothing left to do, and is there for them.
        """

        def none() -> bool:
            coming = (
                event.kind == "late" or (event.again and event.trainer not in self._ended)
                for event in self._due
            )
            return not self._joining and not any(coming)

        end = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < end:
            with self._changed:
                if self._changed.wait_for(none, ATTEND_SECONDS):
                    return
            process.attend()

    def _train(self, process: Process) -> Process | None:
        """Until it has no samples left, or ends.

        Returns:
            Another process that has taken its place.
        """
        for _ in process.batches():
            with self._changed:
                self._taken[process.number] += 1
                step = self._taken[process.number]
                self._changed.notify_all()
                due = [e for e in self._due if (e.trainer, e.step) == (process.number, step)]
                self._due = [each for each in self._due if each not in due]
                end = next((each for each in due if each.kind in ENDS), None)
                self._joining += end is not None and self._holds(end)
                if due:  # nothing befalls a job that has not all of its first processes
                    self._changed.wait_for(self._all_begun, TIMEOUT_SECONDS)
            for event in due:
                self.events[event.kind] += event.kind != "server_lost"
                if event.kind in ENDS:
                    return self._goes(event, process)
                self._befalls(event, process)
            process.step()
        return None

    def _all_begun(self) -> bool:
        return self._begun >= self.world.trainers - len(self.world.late)

    def _holds(self, end: Event) -> bool:
        """Whether the job has to go on for a while: for another process, or for what a lost one
        tries in vain.
        """
        return end.again or end.kind == "zombie"

    def _befalls(self, event: Event, process: Process) -> None:
        if event.kind == "partition":
            self._partitions.sever(event.server, process.number, event.seconds)
        elif event.kind == "link":
            self._partitions.sever(0, -1 - event.server, event.seconds)
        elif event.kind == "unlinked":
            self._unlink(event.server)
        elif event.kind == "shrink":
            process.shrink(1.0)
        elif event.kind == "saves":
            with self._saving:
                self._newest = process.save() or self._newest
        elif event.kind == "server_lost" and self._newest and self._lost is not None:
            self._lost.lose(event, f"{self._folder}/{self._newest}")

    def _unlink(self, server: int) -> None:
        """A server takes server 0 for lost."""
        link = self.lives.held[server].decisions._link
        assert isinstance(link, FollowerLink), "it follows since trainers have joined"
        link._lose(ServerLost("server 0 was not heard for a while"))

    def _goes(self, event: Event, process: Process) -> Process | None:
        """A process ends, or is taken for ended; another one may take its place."""
        if event.kind == "leaves":
            process.leave()
        else:
            if event.kind == "dies":
                process.die(event.commits, event.first)
            self._tell(event, process)
            if event.kind == "zombie" and event.first:
                self._haunts(process)
        another = self._start(process.number) if event.again else None
        if event.kind == "zombie" and not event.first:
            self._haunts(process)
        with self._changed:
            self._joining -= self._holds(event)
            self._changed.notify_all()
        return another

    def _tell(self, event: Event, process: Process) -> None:
        """As launch tells a server that a process has ended; returns when all know.  Where servers
        may be away, all are told that are there.
        """
        word, known = f"{process.number}=killed", LogProcess(process.number, process.incarnation)
        one = self.endpoints[event.server]

        def ends() -> list[Decisions]:
            return [each.decisions for each in self.lives.held]

        end = time.monotonic() + FENCED_SECONDS
        last_word.report_ends(OPEN, self._reached if self.world.loses_servers else [one], [word])
        while not self.history.wait_for_loss(known, ends, TOLD_SECONDS):
            if time.monotonic() > end:
                raise ViolatedInvariant(f"{process.incarnation} was not fenced everywhere")
            if self.world.loses_servers:  # one has come back that was not told
                last_word.report_ends(OPEN, self._reached, [word])
        if not event.again:  # otherwise steps that need all trainers wait for another process
            last_word.report_ends(OPEN, self._reached, [word], unreplaced=True)

    @property
    def _reached(self) -> list[str]:
        """The endpoints of the servers that are there."""
        return [each.endpoint for each in self.servers if not each._stopping.is_set()]

    def _haunts(self, process: Process) -> None:
        said = process.goes_on()
        process.kill()
        if said:
            raise ViolatedInvariant(said)


@contextmanager
def slow_updates(seed: int) -> Iterator[None]:
    """While it lasts, servers of this process take a while for some updates, under no lock."""
    draw = random.Random(f"{seed} slow updates")
    before = {policy: policy.update for policy in (IndependentSteps, JointSteps)}

    def slow(right: Any) -> Any:
        def update(*arguments: Any) -> None:
            time.sleep(draw.choice(SLOW_SECONDS))
            right(*arguments)

        return update

    for policy, right in before.items():
        policy.update = slow(right)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for policy, right in before.items():
            policy.update = right  # type: ignore[method-assign]


def play_world(world: World) -> Outcome:
    """Runs a trial to its end.

    Returns:
        The outcome, with the first violation, if there was one.
    """
    gc.collect()  # the tables of earlier trials have reserved most of the addresses that there are
    outcome = Outcome(world)
    with short_waits(), ExitStack() as stack:
        transport = "grpc" if world.transport == "inprocess" else world.transport
        least = world.trainers - len(world.late) if world.late else 0
        place = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        folder, written = place if world.saves else None, f"{place}/written"
        config = ServerConfig(
            transport=transport,
            min_trainers=least,
            data_dir=folder,
            await_servers=world.awaits,
            write_ahead_log=written if world.awaits else None,
        )
        if world.loses_servers:
            stack.enter_context(quick_heartbeats())
            config = replace(config, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        servers = [TwinServer(config) for _ in range(world.servers)]
        stack.callback(_stop, servers)
        for server in servers:
            server.start()
        names = {
            port: f"server {index}"
            for index, server in enumerate(servers)
            for port in server.job.transports.values()
        }
        partitions = Partitions((), world.seed, world.rate, names)
        stack.enter_context(injected(partitions, world.transport, transport))
        calls = {split_endpoint(s.endpoint)[1]: f"server {i}" for i, s in enumerate(servers)}
        injector = CallInjector((), world.seed, world.call_rate, calls)
        stack.enter_context(faulty_calls(injector))
        if world.slow:
            stack.enter_context(slow_updates(world.seed))
        standing = stack.enter_context(Standing().watched())
        trial = Trial(world, servers, partitions, folder, standing)
        stack.enter_context(trial.history.taken_down())
        try:
            trial.run()
            if world.awaits:
                held = trial.lives.held[0]
                outcome.failure = next(written_differences(world, written, held), "")
            laws = Laws(world, trial.history, trial.lives, trial.starts, folder)
            outcome.failure = outcome.failure or next(laws.violations(), "") or trial.restored()
        except Exception as error:
            outcome.failure = f"{type(error).__name__}: {error}"
        trial.end(outcome.failure)
        outcome.quiet_seconds = trial.quiet_seconds
        outcome.faults, outcome.events = partitions.done + injector.done, trial.events
    return outcome


def _stop(servers: Iterable[TwinServer]) -> None:
    """Those that are there at the end."""
    for server in reversed(list(servers)):
        server.stop(0.0)
