"""A trainer that does what its plan says at named places, and whose values say which steps and
which samples count.

::

    python scripted_trainer.py PLAN

A step of a trainer moves the elements of its own column, and of its own rows, by GRADIENT times
RATE, and the weight of each of its samples by 1; where the members of a step have its mean, by that
divided by their number, which float32 has exactly.  So what a server holds says how many steps of
each trainer are in it.

Places, in the order in which they come:

=====================  ========================================================================
starts                 before ``fleet.init``; in a process that takes a place, "starts again"
joins                  before ``distributed_optimizer``; likewise "joins again"
joined                 after it; likewise "joined again"
E: N                   batch N of epoch E is there, its step has not begun
E: ends                the samples of epoch E are over
sending N              of step N gradients are on their way, and no commit is
between commits N      one server has the commit of step N, and the other one has not
committed N            all have it, and the trainer has not seen the answer
averaging N            in a mixed mode: its rows have left, and the average is under way
stepped N              all that it has sent is applied
saved                  5 steps after the first checkpoint of the job is complete
completing             trainer 0 has written its part of another checkpoint than the first one
ends                   it has taken all steps, and has told nobody that it has
finishing              before ``fleet.finish``
leaving                in ``fleet.finish``, where it leaves the group of trainers without servers
finished               after ``fleet.finish``
=====================  ========================================================================

There it does what the plan says:

=====================  ========================================================================
SIGKILL                gets this signal, from itself, or another one; "soon SIGKILL" in a second
raise, exit 9          ends so; all of these happen once in a job, and leave the file "struck"
wait NAME, mark NAME   waits for a file, or makes it
save NAME, load NAME   with the others, as ``fleet`` does
meet, flush            waits for the others; until what it has sent is applied
outside 60             is outside of Python for so many seconds
say WORDS              in a line
=====================  ========================================================================
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pserver.checkpoint import checkpoint
from pserver.errors import PServerError
from pserver.table import ids as id_arithmetic
from trainer import Constant, DistributedEmbedding, Executor, fleet, row_optimizers
from trainer.collective.process_groups import ProcessGroups
from transpiler import DistributeTranspiler, InputSpec, capture

ROWS = 9000  # so that each server has a slice of the columns
RATE, GRADIENT = 0.5, 6.0
PATIENCE = 600.0  # the test's own waits end sooner
OUTER = {"type": "sgd", "lr": 1.0}
# whether the mode is asynchronous, and its a_sync_configs
MODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "sync": (False, {}),
    "async": (True, {"send_queue_size": 1}),
    "half_async": (True, {"half_async": True}),
    "staleness": (True, {"send_queue_size": 1, "staleness": 2}),
    "geo": (True, {"k_steps": 1}),
    "geo by 3": (True, {"k_steps": 3}),
    "diloco": (True, {"k_steps": 1, "outer_optimizer": OUTER}),
    "diloco by 3": (True, {"k_steps": 3, "outer_optimizer": OUTER}),
    "dc_asgd": (True, {"dc_asgd": 0.1}),
    "merged": (True, {"max_merge_var_num": 4, "send_queue_size": 4, "merge": "sum"}),
    "tables": (True, {"send_queue_size": 1}),
    "sync tables": (False, {}),
    "mixed": (False, {"modes": {"rows*": "sync", "*": "collective"}}),
    "mixed_async": (True, {"modes": {"rows*": "async", "*": "collective"}, "send_queue_size": 1}),
    "collective": (False, {}),
}
HAVE_TABLES = ("tables", "sync tables", "mixed", "mixed_async")
STRIKES = ("SIG", "raise", "exit")


@dataclass(frozen=True)
class Plan:
    """Of one trainer, or of all trainers that ``launch`` starts.

    Attributes:
        programs: whether it is a job of programs.
        configs: what the mode's ``a_sync_configs`` have besides.
        steps: of each trainer, where there are no data.
        data: none (""), "samples", "iterable", or, from files, "queue", "memory" or "shuffled".
        pause: seconds that a step computes.
        caught: what the script does when it has caught the job's error: it does not ("") or, as at
            a place, "exit 75"; or it goes on to the end ("finishes"), or stops before ("ends").
        at: what the trainer of a number does at a place.
    """

    mode: str
    programs: bool = False
    configs: dict[str, Any] = field(default_factory=dict)
    trainers: int = 2
    steps: int = 12
    data: str = ""
    samples: int = 80
    batch: int = 4
    epochs: int = 2
    files: tuple[int, ...] = ()
    pause: float = 0.0
    caught: str = ""
    at: tuple[tuple[int, str, str], ...] = ()

    @property
    def word(self) -> str:
        """The argument of the script."""
        return json.dumps(asdict(self))


class Places:
    """Does what a plan says at the places that a trainer comes to."""

    def __init__(self, plan: Plan, me: int) -> None:
        self.me = me
        self.actions: dict[str, list[str]] = {}
        for number, place, action in plan.at:
            if number == me:
                self.actions.setdefault(place, []).append(action)
        self.again = not _first(f"trainer {me} has begun")
        self.attend: Callable[[], object] = lambda: None  # to what the others need, in a wait
        self.flush: Callable[[], None] = lambda: None  # what it has sent is applied

    def begin(self, place: str) -> None:
        """A place that has another name in a process that takes another one's place."""
        self(f"{place} again" if self.again else place)

    def __call__(self, place: str) -> None:
        for action in self.actions.get(place, ()):
            verb, _, rest = action.partition(" ")
            if action.startswith(STRIKES):
                self._strike(place, verb, rest)
            elif verb == "outside":
                ctypes.PyDLL(None).sleep(int(rest))
            elif verb == "soon":
                threading.Timer(1.0, self._strike, (place, rest, "")).start()
            elif verb == "wait":
                self._wait(rest)
            elif verb == "mark":
                Path(rest).touch()
            elif verb == "meet":
                fleet.barrier_worker()
            elif verb == "flush":
                self.flush()
            elif verb in ("save", "load"):
                getattr(fleet, verb)(rest)
            else:
                say(rest)

    def _strike(self, place: str, verb: str, rest: str) -> None:
        if not _first(f"struck {self.me} {place}"):
            return
        Path("struck").touch()
        say("strikes")
        if verb == "raise":
            raise ArithmeticError("the data are gone")
        if verb == "exit":
            sys.exit(int(rest))
        os.kill(os.getpid(), signal.Signals[verb])

    def _wait(self, mark: str) -> None:
        say(f"waits for {mark}")
        end = time.monotonic() + PATIENCE
        while not Path(mark).exists() and time.monotonic() < end:
            self.attend()
            time.sleep(0.02)

    def before(self, owner: Any, name: str, place: str, number: int = 1) -> None:
        """The place comes when a method is called for this time from now on."""
        if place not in self.actions:
            return
        call, calls = getattr(owner, name), itertools.count(1)

        def calling(*arguments: Any, **named: Any) -> Any:
            if next(calls) == number:
                self(place)
            return call(*arguments, **named)

        setattr(owner, name, calling)

    def arm(self, communicator: Any, step: int) -> None:
        """Lets the places in a step come."""
        self.before(communicator, "close_step", f"sending {step}")
        if f"between commits {step}" in self.actions:
            channel = communicator.clients[1].channels[0]
            self.before(channel, "commit", f"between commits {step}")
        if f"committed {step}" in self.actions:
            self.before(communicator.lanes[0], "finish", f"committed {step}")
        # a sum of how many have gradients comes before theirs
        self.before(ProcessGroups, "begin", f"averaging {step}", 2)

    def complete(self) -> None:
        """Lets the place come when another checkpoint than the first one is all but complete."""
        if "completing" not in self.actions:
            return
        commit = checkpoint.Writer.commit

        def completing(writer: checkpoint.Writer, meta: Any) -> None:
            if checkpoints():
                self("completing")
            commit(writer, meta)

        vars_of: Any = checkpoint.Writer
        vars_of.commit = completing


def _first(name: str) -> bool:
    """Whether no process of the job has asked for this before."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def checkpoints() -> int:
    """The number of the job's checkpoints."""
    try:
        return len(json.loads(Path("saved/checkpoints.json").read_text())["checkpoints"])
    except (OSError, ValueError):
        return 0


def say(words: str) -> None:
    """A line, whole: another thread may be writing its own."""
    os.write(1, f"{words}\n".encode())


class Stream(IterableDataset[int]):
    """Samples whose order is drawn."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())


def data(plan: Plan) -> Any:
    """The batches that the script iterates over in each epoch."""
    if plan.data == "samples":
        return fleet.shard(DataLoader(torch.arange(plan.samples), plan.batch, shuffle=True))  # type: ignore[arg-type]  # it has a length
    if plan.data == "iterable":
        return fleet.shard(DataLoader(Stream(plan.samples), plan.batch))
    dataset = fleet.QueueDataset() if plan.data == "queue" else fleet.InMemoryDataset()
    dataset.init(batch_size=plan.batch, use_var=[fleet.Slot("n")], thread_num=2)
    dataset.set_filelist([f"part-{number}" for number in range(len(plan.files))])
    if plan.data != "queue":
        dataset.load_into_memory()
    return dataset


class Counts(nn.Module):
    """A column for each trainer; rows and the weights of samples where the plan has them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.columns = nn.Linear(plan.trainers, ROWS, bias=False)
        nn.init.zeros_(self.columns.weight)
        self.rows = None
        if plan.mode in HAVE_TABLES:
            rule = row_optimizers.SGD(lr=RATE)
            self.rows = DistributedEmbedding(
                plan.trainers, optimizer=rule, init=Constant(0.0), name="rows"
            )
        self.samples = nn.Parameter(torch.zeros(plan.samples)) if plan.data else None

    def forward(self, own: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Of which the gradients are those of the elements that count."""
        total: torch.Tensor = self.columns(own).sum()
        if self.rows is not None:
            total = total + (self.rows(torch.arange(ROWS)) * own).sum()
        total = total * GRADIENT
        if self.samples is not None and samples is not None:
            total = total + self.samples[samples].sum()
        return total


class Eager:
    """The job of a script."""

    def __init__(self, plan: Plan, at: Places) -> None:
        collective = plan.mode == "collective"
        fleet.init(strategy=None if collective else strategy(plan), is_collective=collective)
        self.model: Any = fleet.distributed_model(Counts(plan))
        nn.init.zeros_(self.model.columns.weight)
        at.begin("joins")
        self.optimizer: Any = fleet.distributed_optimizer(sgd(self.model))
        self.communicator = None if collective else self.optimizer.communicator
        self.meet, self.flush, self.finish = (
            fleet.barrier_worker,
            self.optimizer.flush,
            fleet.finish,
        )

    @property
    def steps(self) -> int:
        """That it has taken, with those before it came."""
        return int(self.optimizer.steps)

    def step(self, *batch: torch.Tensor | None) -> None:
        """One step."""
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Programs:
    """The same job as programs, without data."""

    def __init__(self, plan: Plan, at: Places) -> None:
        self.model = Counts(plan)
        batch = InputSpec([1, plan.trainers])
        main, startup = capture(self.model, Counts.__call__, sgd(self.model), (batch,))
        servers = os.environ["PSERVER_ENDPOINTS"]
        job, chosen = DistributeTranspiler(), strategy(plan)
        job.transpile(at.me, main, servers, plan.trainers, startup_program=startup, strategy=chosen)
        self.program, self.executor = job.get_trainer_program(), Executor()
        at.begin("joins")
        self.executor.run(job.get_startup_program())
        self.communicator: Any = self.executor.connection_of(self.program.storage)
        self.flush, self.finish = self.executor.flush, self.executor.close

    @property
    def steps(self) -> int:
        """That it has taken, with those before it came."""
        return self.executor.steps(self.program)

    def step(self, own: torch.Tensor, samples: None) -> None:
        """One step."""
        self.executor.run(self.program, feed=(own,))

    def meet(self) -> None:
        """Waits for the others."""
        self.communicator.barrier("the end")


def strategy(plan: Plan) -> fleet.DistributedStrategy:
    """Of the plan's mode."""
    made = fleet.DistributedStrategy()
    made.a_sync, configs = MODES[plan.mode]
    if configs := {**configs, **plan.configs}:
        made.a_sync_configs = configs
    return made


def sgd(model: Counts) -> torch.optim.SGD:
    """A step lowers the weight of a sample by one."""
    groups = [{"params": [each for each in model.parameters() if each is not model.samples]}]
    if model.samples is not None:
        groups.append({"params": [model.samples], "lr": 1.0})  # type: ignore[dict-item]
    return torch.optim.SGD(groups, lr=RATE)


class Trainer:
    """The whole job of one trainer."""

    def __init__(self, plan: Plan) -> None:
        me = int(os.environ.get("TRAINER_ID", os.environ.get("RANK", "0")))
        self.plan, self.at = plan, Places(plan, me)
        self.own = nn.functional.one_hot(torch.tensor(me), plan.trainers).float()[None]
        self.since = 0  # steps since there is a checkpoint

    def join(self) -> None:
        """Comes to the others."""
        self.at.begin("starts")
        kind: Any = Programs if self.plan.programs else Eager
        self.job = kind(self.plan, self.at)
        self.at.flush = self.job.flush
        if (communicator := self.job.communicator) is not None:
            self.at.attend = lambda: (communicator.joint.attend(), communicator.position.answer())
        say(f"begins at {self.job.steps} in {os.getpid()}")
        self.at.begin("joined")
        self.at.complete()

    def train(self) -> None:
        """All steps."""
        plan = self.plan
        if not plan.data:
            while self.job.steps < plan.steps:
                self.step(None)
            return
        batches = data(plan)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.job.optimizer, lambda _: 1.0)
        for epoch in range(plan.epochs):
            if plan.data == "shuffled":
                batches.global_shuffle()
            seen = 0
            for number, batch in enumerate(batches, 1):
                samples = batch["n"] if isinstance(batch, dict) else batch
                self.at(f"{epoch}: {number}")
                self.step(samples)
                say(f"trained {json.dumps([epoch, samples.tolist()])}")
                seen += len(samples)
            self.at(f"{epoch}: ends")
            schedule.step()
            total = int(fleet.all_reduce(torch.tensor(seen)))
            say(f"epoch {epoch} {json.dumps([total, schedule.last_epoch])}")

    def step(self, samples: torch.Tensor | None) -> None:
        """One step; its number is said when it has been answered."""
        number = self.job.steps + 1
        self.at(f"before {number}")
        if self.job.communicator is not None:
            self.at.arm(self.job.communicator, number)
        self.job.step(self.own, samples)
        say(f"step {self.job.steps}")
        self.at(f"stepped {number}")
        self.since += checkpoints() > 0 if "saved" in self.at.actions else 0
        if self.since == 5:
            self.at("saved")
        time.sleep(self.plan.pause)  # what it computes

    def end(self) -> None:
        """Says what the servers have in the end."""
        self.at("ends")
        self.job.meet()  # a lost one is not waited for
        self.job.flush()
        model, communicator = self.job.model, self.job.communicator
        columns = model.columns.weight
        record: dict[str, Any] = {"steps": self.job.steps}
        slices = [(0, columns.numel())]
        if communicator is not None:
            communicator.pull()
            held = [each.slices for each in communicator.plan.placements if "columns" in each.name]
            slices = [(part.begin, part.end) for part in sum(held, ())] or slices
        with torch.no_grad():
            places = torch.arange(columns.numel()) % self.plan.trainers
            record["columns"] = [
                [
                    (columns.flatten()[a:b][places[a:b] == trainer] / -RATE).unique().tolist()
                    for trainer in range(self.plan.trainers)
                ]
                for a, b in slices
            ]
            if model.rows is not None:
                ids = torch.arange(ROWS)
                order, bounds = id_arithmetic.partition(ids.numpy(), 2)
                rows = model.rows(ids) / -RATE
                record["rows"] = [
                    [each.unique().tolist() for each in rows[torch.from_numpy(order[a:b])].T]
                    for a, b in itertools.pairwise(bounds)
                ]
            if model.samples is not None:
                record["samples"] = (-model.samples).tolist()
        say(f"record {json.dumps(record)}")
        self.at("finishing")
        self.at.before(torch.distributed, "destroy_process_group", "leaving")
        self.job.finish()
        say("finished")
        self.at("finished")


def main(plan: Plan) -> None:
    """Trains, and ends as the plan says."""
    trainer = Trainer(plan)
    try:
        trainer.join()
        trainer.train()
    except PServerError as error:
        say(f"caught {type(error).__name__} {error}")
        if plan.caught.startswith("exit"):
            sys.exit(int(plan.caught.removeprefix("exit ")))
        if not plan.caught:
            raise
        if plan.caught == "finishes":
            trainer.job.finish()
        return
    finally:
        say(f"finally at {time.monotonic()}")
    trainer.end()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
