"""Trials in which trainers are lost and replaced: a step counts on all servers or on none.

Every trainer has a counter of its own in each slice of a parameter, to which each of its steps adds
one.  So a counter says how many of its number's steps are on that server, and all copies of it have
to say the same.  The killed process ends in the middle of a step, when some of the servers have its
COMMIT; in some trials another process of the same number takes its place.  Servers record what they
apply, and have to hold what a replay of that gives.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from pserver.config import ServerConfig
from pserver.errors import PServerError, Unreachable
from pserver.job.program import InstalledProgram
from pserver.launcher import last_word
from pserver.operations.replay import replay
from pserver.security.access import OPEN
from tests.checker.scenario import RULE, TRANSPORTS
from tests.checker.trial import AnyTransport, TwinServer, ViolatedInvariant
from trainer.communicator.communicator import Communicator
from transpiler.distribute import plan_parameters
from transpiler.plan.plan import Deployment, Plan
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import DistributedStrategy

TIMEOUT_SECONDS = 30.0  # of a whole trial
COPIES = 4  # of each trainer's counter in a slice
# in each of them a trainer's step waits for its own result
MODES = {
    "async": {"send_queue_size": 1},
    "half_async": {"half_async": True},
    "staleness": {"send_queue_size": 1, "staleness": 2},
}


@dataclass(frozen=True)
class Loss:
    """One trial; all of it is drawn from its seed.

    Attributes:
        seed: of the trial.
        asked: what is not drawn: ``mode``, ``transport``.
    """

    seed: int
    asked: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _draw(self) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} loss")
        servers = draw.choice((1, 2, 3))
        return {
            "mode": draw.choice(list(MODES)),
            "transport": draw.choice(TRANSPORTS),
            "servers": servers,
            "trainers": draw.choice((2, 3)),
            "steps": draw.choice((4, 6)),
            "at": draw.randint(1, 4),
            "commits": draw.randint(0, servers),
            "again": draw.random() < 0.5,
            **self.asked,
        }

    def __getattr__(self, name: str) -> Any:
        """What was drawn: see ``_draw``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self._draw[name]

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ", ".join(f"{k} {v}" for k, v in self._draw.items())

    @cached_property
    def plan(self) -> Plan:
        """One parameter, of as many slices as there are servers."""
        strategy = DistributedStrategy()
        strategy.a_sync, strategy.a_sync_configs = True, MODES[self.mode]
        block = COPIES * self.trainers
        return plan_parameters(
            [("w", (block * self.servers,), "float32", 0)],
            [RULE],
            lanes=lanes_of(strategy),
            trainers=self.trainers,
            servers=self.servers,
            min_block_size=block,
        )


class Process:
    """One start of a trainer, in a thread.

    Attributes:
        taken: steps whose result it has heard of.
        sent: steps that it has begun to send.
    """

    def __init__(self, loss: Loss, endpoints: tuple[str, ...], number: int) -> None:
        self.loss, self.number = loss, number
        self.w = torch.zeros(loss.plan.placements[0].shape)
        self.taken = self.sent = 0
        self.communicator = Communicator(
            Deployment(loss.plan, endpoints, trainer_id=number),
            {"w": self.w},
            connection=AnyTransport(
                heartbeat_timeout_seconds=10.0,
                start_timeout_seconds=10.0,
                transport=loss.transport,
            ),
        )

    def step(self) -> None:
        """Adds one to its counters."""
        gradient = torch.zeros_like(self.w)
        gradient[self.number :: self.loss.trainers] = -1.0
        self.sent += 1
        self.communicator.send_whole({"w": gradient})
        self.communicator.commit({0: RULE.hparams})
        self.taken += 1
        self.counters()

    def counters(self) -> list[int]:
        """How many steps of each trainer are in the parameter.

        Raises:
            ViolatedInvariant: not the same in all slices, where all steps are its own; or half a
                step.
        """
        found = []
        for trainer in range(self.loss.trainers):
            values = self.w[trainer :: self.loss.trainers].view(-1, COPIES)
            if not (values == values[:, :1]).all():
                raise ViolatedInvariant(f"half a step of trainer {trainer}: {values.tolist()}")
            found.append(int(values[0, 0]))
        own = sorted(set(self.w[self.number :: self.loss.trainers].tolist()))
        if len(own) > 1:
            raise ViolatedInvariant(f"trainer {self.number} finds {own} of its own steps")
        return found

    def die(self, commits: int) -> None:
        """Takes a step, and ends when so many servers have its COMMIT."""
        clients, ended = self.communicator.clients, threading.Event()

        def dies(*arguments: Any, **named: Any) -> None:
            raise Unreachable("the process has ended")

        def hears_nothing(*arguments: Any) -> None:
            ended.wait(TIMEOUT_SECONDS)

        for client in clients[commits:]:
            vars(client.channels[0])["commit"] = dies
        if commits == len(clients):
            vars(clients[0].channels[0])["_answered"] = hears_nothing
        sending = threading.Thread(target=self._send, daemon=True)
        sending.start()
        sending.join(0.5)
        for client in clients:  # as the kernel ends a process: nobody is told
            client._closing.set()
            for channel in client.every_channel:
                channel.close(abruptly=True)
            client._control.close()
        ended.set()
        self.communicator._shutdown.forget()

    def _send(self) -> None:
        with suppress(PServerError):
            self.step()


def play(loss: Loss) -> str:
    """Runs a trial to its end.

    Returns:
        "" if every invariant held; otherwise what does not.
    """
    with ExitStack() as stack:
        transport = "grpc" if loss.transport == "inprocess" else loss.transport
        folder = stack.enter_context(TemporaryDirectory())
        config = ServerConfig(transport=transport, record_log=folder)
        servers = [TwinServer(config) for _ in range(loss.servers)]
        for server in servers:
            server.start()
            stack.callback(server.stop, 0.0)
        try:
            held = _run(loss, servers)
            _replay(Path(folder), servers, held)
        except Exception as error:
            return f"{loss}\n  {type(error).__name__}: {error}"
    return ""


def _run(loss: Loss, servers: Sequence[TwinServer]) -> list[InstalledProgram]:
    endpoints = tuple(server.endpoint for server in servers)
    processes = [Process(loss, endpoints, number) for number in range(loss.trainers)]
    pool = ThreadPoolExecutor(loss.trainers)
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False)
        for each in processes:
            each.communicator.start()
        *others, victim = processes
        running = [pool.submit(_steps, each, loss.steps) for each in others]
        for _ in range(loss.at - 1):
            victim.step()
        victim.die(loss.commits)
        last_word.report_ends(OPEN, endpoints[:1], [f"{victim.number}=killed"])
        if loss.again:
            another = Process(loss, endpoints, victim.number)
            another.communicator.start()
            # as far as the others, which it may bound, and they it
            left = loss.steps - another.communicator.lanes[0].step
            running.append(pool.submit(_steps, another, max(left, 2)))
            others.append(another)
        for done in running:
            done.result(timeout=TIMEOUT_SECONDS)
        _check(loss, others, victim)
        held = [server.job.installed() for server in servers]
        list(pool.map(lambda each: each.communicator.finish(), others))
        return held


def _replay(folder: Path, servers: Sequence[TwinServer], held: Sequence[InstalledProgram]) -> None:
    """Every server holds what a replay of the job's recorded log gives, to the bit."""
    for server in servers:
        _expect(server.job.end_recording(TIMEOUT_SECONDS), "the log is not written")
    for replayed, installed in zip(replay(folder, Console(quiet=True)), held, strict=True):
        theirs = dict(replayed.installed.slices.tensors())
        for name, tensor in installed.slices.tensors():
            _expect(torch.equal(theirs[name], tensor), f"a replay gives another {name}")


def _steps(process: Process, count: int) -> None:
    for _ in range(count):
        process.step()


def _check(loss: Loss, others: Sequence[Process], victim: Process) -> None:
    """What all servers hold at the end."""
    reader = others[0]
    reader.communicator.pull()
    values = reader.w.view(loss.servers, -1)
    _expect(bool((values == values[0]).all()), f"servers hold different steps: {values.tolist()}")
    found = reader.counters()
    for each in others:
        if each.number != victim.number:
            steps = found[each.number]
            _expect(steps == each.taken, f"{steps} of {each.taken} steps of {each.number}")
    more = sum(each.taken for each in others if each.number == victim.number)
    steps = found[victim.number] - more
    least = victim.taken
    most = victim.sent if loss.commits == loss.servers else victim.taken
    _expect(least <= steps <= most, f"{steps} steps of the lost trainer, not {least} to {most}")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ViolatedInvariant(what)


def failures(first: int, seeds: int) -> Iterator[str]:
    """The trials of some seeds that violate an invariant."""
    for seed in range(first, first + seeds):
        if said := play(Loss(seed)):
            yield said
