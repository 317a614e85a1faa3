"""The jobs of two servers in this process, one of which is lost, and comes back as another process
does that has nothing of its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pserver.config import ServerConfig
from pserver.job import job_files
from pserver.job.job import Job
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.transport import inprocess
from pserver.wire_pb2 import Frame, Hello, InstallRequest, JoinReply, Kind
from tests.support.job_frames import DEADLINE, Clock, Trainer
from tests.support.linked_jobs import Wire
from tests.support.load import Deadline, result
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

HELD = ("w", "b")  # by server
ONES = {"w": torch.ones(2, 3), "b": torch.ones(3)}
RULE = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


def plan_of(mode: str = "async", trainers: int = 2, momentum: float = 0.0) -> Plan:
    """Server 0 has "w", server 1 has "b"."""
    named = [("w", (2, 3), "float32", 0), ("b", (3,), "float32", 0)]
    return plan_parameters(
        named,
        [Rule("sgd", {**RULE, "momentum": momentum}, {})],
        mode=mode,
        trainers=trainers,
        servers=2,
        clip=None,
    )


class Part(Trainer):
    """One trainer's connection to one server; it joins when the server lets it."""

    def __init__(self, served: Served, plan: Plan, number: int, incarnation: str = "") -> None:
        self.job, self.plan, self.number = served.job, plan, number
        self.index, self.listener = served.index, served.listener
        self.incarnation = incarnation or f"of trainer {number}"

    def request(self, **changed: object):  # type: ignore[no-untyped-def]
        said = {"incarnation": self.incarnation, "server_index": self.index}
        return super().request(**{**said, **changed})

    def program(self, session: str) -> InstallRequest:
        deployment = Deployment(self.plan, ("h:1", "h:2"), server_index=self.index)
        return InstallRequest(session=session, program=pserver_program(deployment).to_proto())

    def enter(self) -> JoinReply:
        """Joins, and brings what the server asks for."""
        end = Deadline(DEADLINE)
        while not (reply := self.job.join(self.request())).ready:
            assert not end.over, "the server lets nobody in"
            if reply.wants_program:
                self.job.install(self.program(reply.session))
            time.sleep(0.01)
        self.session = reply.session
        self.stream = inprocess.connect("127.0.0.1", self.listener.port, timeout_seconds=DEADLINE)
        hello = Hello(session=self.session, trainer_id=self.number)
        self.stream.send(Frame(kind=Kind.HELLO, hello=hello))
        if reply.install:
            self.job.install(self.program(self.session))
            self.post(Kind.VALUE, 0, **{HELD[self.index]: ONES[HELD[self.index]]})
            self.ask(Frame(kind=Kind.COMMIT, step=0))
        return reply

    def take(self, step: int) -> torch.Tensor:
        """Takes a step with a gradient of ones; the slice afterwards."""
        name, momentum = HELD[self.index], self.plan.groups[0].hparams["momentum"]
        assert isinstance(momentum, float)
        _, values = self.step(step, momentum=momentum, **{name: ONES[name]})
        return values[name]


class Served:
    """One start of a server."""

    def __init__(self, wire: Wire, index: int, clock: Clock, **settings: object) -> None:
        self.index = index
        self.listener = inprocess.listen(lambda stream: handle(stream, self.job, WorkingStreams()))
        config = ServerConfig(
            heartbeat_timeout_seconds=DEADLINE,
            **{"await_servers": True, **settings},  # type: ignore[arg-type]
        )
        ports = {"inprocess": self.listener.port}
        self.job = Job(config, ports, clock, links=wire.of(index))

    def end(self) -> None:
        self.job.lifecycle.drain()
        self.listener.close(0.0)


class World:
    """Two servers and the trainers of an asynchronous job."""

    def __init__(self, mode: str = "async", momentum: float = 0.0, **settings: object) -> None:
        self.wire, self.clock = Wire(), Clock()
        self.plan = plan_of(mode, momentum=momentum)
        self.settings = settings
        self.started = [Served(self.wire, index, self.clock, **settings) for index in (0, 1)]
        self.zero, self.one = self.started
        self.trainers = [self.trainer(number) for number in (0, 1)]
        self.pool = ThreadPoolExecutor(8)

    def trainer(self, number: int, incarnation: str = "") -> list[Part]:
        """Its connections, by server; it has joined both."""
        parts = [Part(each, self.plan, number, incarnation) for each in (self.zero, self.one)]
        for part in parts:
            part.enter()
        return parts

    def step(self, number: int, step: int) -> list[torch.Tensor]:
        """A trainer's step on both servers; what they hold afterwards."""
        sent = [self.pool.submit(part.take, step) for part in self.trainers[number]]
        return [result(each, DEADLINE) for each in sent]

    def save(self, path: Path, server: int = 1) -> str:
        job = self.servers[server].job
        return job_files.save(str(path / f"server-{server}"), job.installed(), job._members)

    def lose(self, server: int = 1) -> None:
        """A server ends without a word."""
        self.wire.lose(server)
        self.servers[server].listener.close(0.0)

    def again(self, path: str, server: int = 1) -> Served:
        """Another process of a server, which nobody has joined yet."""
        made = Served(self.wire, server, self.clock, **self.settings, reload=path)
        self.started.append(made)
        self.zero, self.one = (made, self.one) if server == 0 else (self.zero, made)
        return made

    def rejoin(self, number: int, server: int = 1) -> JoinReply:
        """A trainer joins a server again."""
        incarnation = self.trainers[number][server].incarnation
        part = Part(self.servers[server], self.plan, number, incarnation)
        self.trainers[number][server] = part
        return part.enter()

    @property
    def servers(self) -> list[Served]:
        """Those that are there."""
        return [self.zero, self.one]

    def end(self) -> None:
        for each in self.started:
            each.end()
        self.pool.shutdown(wait=False)
        self.wire.end()


def until(done: Callable[[], bool]) -> None:
    end = Deadline(DEADLINE)
    while not done():
        assert not end.over
        time.sleep(0.01)
