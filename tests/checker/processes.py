"""One start of a trainer, in a thread: takes steps on leased samples, and ends in several ways."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pserver.client.channel import Channel
from pserver.client.client import Client, SaveState
from pserver.client.replies import PutOff
from pserver.errors import PServerError, Refused, TimedOut, Unreachable
from pserver.leases.epoch import Epoch
from pserver.table.gradient import RowGradient
from tests.checker.history import History
from tests.checker.trial import AnyTransport
from tests.checker.worlds import DIM, FEW, MANY, TOGETHER, World
from trainer.checkpoint.resume import jointly
from trainer.communicator.communicator import Communicator
from trainer.communicator.joint_calls import Apart
from trainer.job.due_saves import DueSaves
from trainer.job.save_schedule import SaveSchedule
from trainer.samplers.leased_part import LeasedPart
from trainer.samplers.sample_leases import SampleLeases, stripes_of
from trainer.samplers.sample_lists import SampleLists
from trainer.samplers.sample_pass import Pass
from transpiler.plan.plan import Deployment

TIMEOUT_SECONDS = 60.0  # of a whole trial
ANSWER_SECONDS = 0.3  # for a step of which nothing comes back
SHRINKS = 3  # calls, one after the other
JOIN_TRIES = 3  # of one that was lost
LARGE_STEP = 5_000  # ids of a large table in one step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Read:
    """What a process had of a slice after a step.

    Attributes:
        own: by lane, its last message that was answered before.
    """

    slice: str
    lane: int
    value: torch.Tensor
    own: int


class Loader:
    """Stands for the script's loader, which leases know by its identity."""


class Process:
    """One start of a trainer.

    Args:
        world: of the trial.
        endpoints: of the servers.
        number: of the trainer.
        start: which start of this number it is, from 0.
        history: takes down what it sends.

    Attributes:
        incarnation: names it in the log.
        begins_with: the values of parameters that servers update, when it has joined.
        reads: of parameters that servers update, in order.
        shrinks: calls that have been answered by all servers.
        saved: where servers have saved what they hold, below their directories.
        met: how many saves of the job's own it has made with the others.
        put_off: how many it has come to that were put off.
        left: it has gone, in order or not.
        preempted: it has gone in order, before the others have finished.
    """

    def __init__(
        self, world: World, endpoints: Sequence[str], number: int, start: int, history: History
    ) -> None:
        self.world, self.number, self._history = world, number, history
        self.incarnation = f"{number}.{start}"
        self.begins_with: list[Read] = []
        self.reads: list[Read] = []
        self.shrinks = self.saves = 0
        self.saved: list[str] = []
        self.met = self.put_off = self._taken = 0
        self.left = self.preempted = False
        self._seed = f"{world.seed} {self.incarnation}"
        self._draw = torch.Generator().manual_seed(random.Random(self._seed).getrandbits(60))
        self.tensors = {each.name: world.initial(each) for each in world.plan.placements}
        self.communicator = Communicator(
            Deployment(world.plan, tuple(endpoints), trainer_id=number),
            self.tensors,
            connection=AnyTransport(
                heartbeat_timeout_seconds=10.0,
                start_timeout_seconds=30.0 if world.loses_servers else 10.0,
                transport=world.transport,
            ),
            incarnation=self.incarnation,
        )
        self._sources: dict[str, Any] = {}
        self._own_saves()

    def _own_saves(self) -> None:
        """The saves that the job makes by itself, of which there is nothing but the meetings."""
        communicator, position = self.communicator, self.communicator.position
        client = communicator.clients[0]
        schedule = SaveSchedule(self.world.every, client.meetings.agree)
        self._due = DueSaves(schedule, lambda: self._taken, self._meet)
        self._together = self.world.mode in TOGETHER
        position.parts |= {"saves": self._due.plain, "taken": self._told}
        position.restorers |= {"saves": self._due.load, "taken": self._takes}

    def _told(self) -> int:
        return self._taken - self.communicator.window

    def _takes(self, taken: int | None) -> None:
        self._taken = taken or 0 if self._together else self._taken

    def _meet(self, name: str) -> None:
        """A save, without files."""
        meeting = Apart(self.communicator.joint)
        try:
            self.communicator.flush()
            meeting.barrier(f"automatic save {name}", "a place")
            with jointly(meeting, "an automatic save", f"automatically saved {name}"):
                if self.communicator.live.is_leader:
                    self.communicator.clients[0].leases.state()
        except PutOff:
            self.put_off += 1
            raise
        self.met += 1

    def _waits(self) -> None:
        """It waits for samples, as :meth:`AutomaticSaves.waits` says."""
        if not self.world.every:
            return
        if self._together or not self._taken:
            self._due.follow()
        else:
            self._due.between(waits=True)

    def attend(self) -> None:
        """It has nothing left to do: says where it is, and comes to others' saves."""
        self.communicator.position.answer()
        if self.world.every:
            self._due.follow()

    def start(self) -> None:
        """Joins, and gets the values."""
        self.communicator.start()
        clients = self.communicator.clients
        self._history.follow(
            self.incarnation,
            [
                (client.index, lane, channel)
                for client in clients
                for lane, channel in enumerate(client.channels)
            ],
        )
        self.begins_with = list(self._values())
        self._sources = {
            table.name: self.communicator.rows_of(table.name) for table in self.world.plan.tables
        }

    # ---- steps ----

    def batches(self) -> Iterator[None]:
        """One item for each of the batches that this process gets: the next step is on that."""
        if not self.world.leases:
            while self.communicator.lanes[0].step < self.world.target:
                yield
            return
        world, loader = self.world, Loader()
        stripes = stripes_of(world.plan, elastic=True)
        assert stripes is not None, "elastic jobs deal samples out"
        leases = SampleLeases(self.communicator, stripes, self._waits)
        self._due.begin()
        late = self.communicator.position.late and bool(world.every)
        if late:
            self.communicator.position.find()
        for number in range(world.passes):
            epoch = Epoch(number, "data", str(world.seed), world.samples, world.batch, stripes)
            leases.begin(loader, epoch)
            lists = SampleLists(epoch, range(world.samples))
            mine = Pass(lists, LeasedPart(leases, epoch))
            while mine.dealer.more():
                for _ in mine:
                    if late:  # now its script is where the others' are
                        late = False
                        self._due.arrived()
                    mine.dealer.give()
                    yield
                    if world.every and self._due.trained():
                        self._due.between()

    def step(self) -> None:
        """Takes a step with random gradients, which depend on the process and the step alone."""
        communicator, plan = self.communicator, self.world.plan
        for placement in plan.placements:
            change = torch.randn(placement.shape, generator=self._draw)
            if plan.lane_of(placement).kind.steps_on_trainer:
                self.tensors[placement.name].add_(change, alpha=0.1)
            else:
                communicator.send_whole({placement.name: change})
        for table in plan.tables:
            self._train_rows(table.name)
        communicator.commit(self.world.hparams(communicator.step + 1))
        self._taken += 1
        self._read()

    def _train_rows(self, name: str) -> None:
        draw, kind = self._draw, self.world.kind(name)
        count = LARGE_STEP if kind == "large" else int(torch.randint(0, 6, (), generator=draw))
        most = MANY if kind == "large" else FEW
        drawn = torch.randint(0, most, (count,), generator=draw)
        ids = torch.tensor(sorted(set(drawn.tolist())), dtype=torch.int64)
        self._sources[name].pull(ids)
        rows = torch.randn((len(ids), DIM), generator=draw)
        statistics = None
        if kind == "shown":
            shows = torch.randint(1, 3, (len(ids), 1), generator=draw)
            statistics = torch.cat([shows, shows - 1], dim=1).float()
        self.communicator.send_rows({name: RowGradient(ids, rows, statistics)})

    def _read(self) -> None:
        self.reads += self._values()

    def _values(self) -> Iterator[Read]:
        """Its values of what servers update."""
        for placement in self.world.plan.placements:
            lane = self.world.plan.lane_of(placement)
            if lane.kind.steps_on_trainer:
                continue
            waits = lane.send_queue_size == 1 or lane.staleness is not None or lane.kind.collects
            own = self.communicator.lanes[placement.lane].step if waits else 0
            flat = self.tensors[placement.name].view(-1)
            for each in placement.slices:
                value = flat[each.begin : each.end].clone()
                yield Read(each.name, placement.lane, value, own)

    def shrink(self, days: float) -> None:
        """Has all servers drop what rows are due."""
        for _ in range(SHRINKS):
            self._on_all(lambda client: client.shrink(days, None, []))
            self.shrinks += 1

    def save(self) -> str:
        """Has all servers save what they hold, while steps go on.

        Returns:
            Where they have, below their directories; "": the save was given up, as a server was
            lost or another trainer's save was being written.
        """
        self.saves += 1
        path = f"{self.incarnation} {self.saves}"
        try:
            self._save(path, self.saves)
        except PServerError:
            if not self.world.loses_servers:
                raise
            return ""
        self.saved.append(path)
        return path

    def _save(self, path: str, number: int) -> None:
        # of the servers as they are now: one that comes back knows of no such save
        calls = {client: client.saves for client in self.communicator.clients}

        def ask(client: Client) -> SaveState:
            return calls[client].in_background(path, number)

        def withdraw(client: Client) -> None:
            with suppress(PServerError):
                calls[client].withdraw(number)

        end = time.monotonic() + TIMEOUT_SECONDS
        while True:
            states = self._on_all(ask, withdraw)
            if all(state.done for state in states):
                break
            if time.monotonic() > end:
                raise TimedOut(f"the save {path!r} did not end")
            time.sleep(0.002)
        if failed := [state.failure for state in states if state.failure]:
            raise Refused(f"the save {path!r}: {failed[0]}")

    def _on_all(
        self, call: Callable[[Client], T], withdraw: Callable[[Client], None] = lambda client: None
    ) -> list[T]:
        """Makes a call that has a place in the job's log, on all servers side by side.

        Args:
            withdraw: called for the others where one has failed.
        """
        clients = self.communicator.clients
        with ThreadPoolExecutor(len(clients)) as pool:
            begun = {pool.submit(call, client): client for client in clients}
            failed = any(each.exception() for each in as_completed(begun))
            for each, client in begun.items() if failed else ():
                if not each.done():
                    withdraw(client)
        return [each.result() for each in begun]

    # ---- ends ----

    def finish(self) -> None:
        """Leaves when all have finished; a job's last process ends it."""
        self.communicator.finish()
        self.left = True

    def leave(self) -> None:
        """As a trainer leaves whose host takes it away, between two steps."""
        communicator, self.preempted = self.communicator, True
        communicator._shutdown.drain(communicator.lanes)
        communicator._shutdown.forget()
        communicator._left = self.left = True
        communicator._shutdown.leave(communicator.lanes, "", False, communicator.step)
        communicator.page.close()

    def die(self, commits: int, at_once: bool) -> None:
        """Takes a step, and ends when so many servers have its commits.

        Args:
            at_once: where all have them it ends when they have left, rather than when it would hear
                of the step.
        """
        clients, heard = self.communicator.clients, threading.Event()
        ended = threading.Event()

        def dies(*arguments: Any, **named: Any) -> None:
            raise Unreachable("the process has ended")

        def hears_nothing(*arguments: Any) -> None:
            heard.set()
            ended.wait(TIMEOUT_SECONDS)

        left = [channel for client in clients for channel in client.channels]

        def leaves(channel: Channel, commit: Any) -> Any:
            def commits_and_leaves(*arguments: Any, **named: Any) -> None:
                commit(*arguments, **named)
                left.remove(channel)
                if not left:
                    heard.set()

            return commits_and_leaves

        for client in clients:
            for channel in client.channels:
                if client.index >= commits:
                    vars(channel)["commit"] = dies
                elif commits == len(clients) and at_once:
                    vars(channel)["commit"] = leaves(channel, channel.commit)
                elif commits == len(clients):
                    vars(channel)["_answered"] = hears_nothing
        sending = threading.Thread(target=self._last_step, args=(heard,), daemon=True)
        sending.start()
        heard.wait(ANSWER_SECONDS)
        self.kill()
        ended.set()

    def _last_step(self, over: threading.Event) -> None:
        try:
            self.step()
        except Exception as error:
            # What a call meets whose channels go away under it is nobody's any more.
            if not self.left and not isinstance(error, PServerError):
                raise
        finally:
            over.set()

    def kill(self) -> None:
        """Ends as the kernel ends a process: nobody is told."""
        self.left = True
        for client in self.communicator.clients:
            client._closing.set()
            for channel in client.every_channel:
                channel.close(abruptly=True)
            client._control.close()
        for lane in self.communicator.lanes:
            lane.stop()
        self.communicator._shutdown.forget()

    def goes_on(self) -> str:
        """Goes on as one that does not know that it was lost.

        Returns:
            What it should not have been able to do; "": nothing.
        """
        try:
            for _ in range(max(1, *(lane.k_steps for lane in self.world.plan.lanes))):
                self.step()
            self.communicator.drain()
        except (PServerError, RuntimeError):
            joins = self._joins_again()
            return f"process {self.incarnation} was lost, and joins again" if joins else ""
        return f"process {self.incarnation} was lost, and its next step was answered"

    def _joins_again(self) -> bool:
        """Whether server 0 lets it in, though it was lost."""
        tries = iter(range(JOIN_TRIES))

        def again() -> None:
            if next(tries, None) is None:
                raise Unreachable("it is not let in")

        try:
            self.communicator.clients[0]._ask_to_join(again)
        except PServerError:
            return False
        return True
