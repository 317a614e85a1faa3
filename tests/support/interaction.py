"""The jobs of a few servers and their trainers, by commands, one after the other: each tells what
servers and trainers do and what they send.  Messages between servers arrive when a command delivers
them.

No sockets and no clock, and one thread at a time, so the same commands tell the same.  The jobs are
those that servers run; their threads wait in :mod:`tests.support.turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver import wire_pb2 as wire
from pserver.checkpoint import checkpoint
from pserver.config import PROTOCOL, ServerConfig
from pserver.errors import PServerError
from pserver.lane.rounds import Clipping
from pserver.lane.step import Step
from pserver.membership import lifecycle
from pserver.membership.decisions import process_of
from pserver.membership.members import Member
from tests.support import delivered, job_frames
from tests.support.delivered import Links, Network, Server
from tests.support.load import scaled
from tests.support.turns import Turns, WaitsInTurn
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.plan.planner import uniform

TIMEOUT = 20.0  # the heartbeat timeout
SHAPES = {"w": (2, 3), "b": (3,)}
RULE = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
LANES = {**job_frames.LANES, "stale": Lane("async", staleness=1, send_queue_size=1)}


def plan_of(mode: str, trainers: int, servers: int, lr: float = 1.0) -> Plan:
    """Server 0 has "w", and server 1 has "b"."""
    return plan_parameters(
        [(name, SHAPES[name], "float32", 0) for name in list(SHAPES)[:servers]],
        [Rule("sgd", {**RULE, "lr": lr}, {})],
        mode=mode,
        trainers=trainers,
        servers=servers,
        clip=None,
        lanes=uniform(LANES[mode]) if mode in LANES else None,
    )


@dataclass
class Trainer:
    """A trainer's process: by server its sessions, and what that knows of it; and the number of its
    last request.
    """

    number: int
    incarnation: str
    sessions: dict[int, str] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    requests: int = 0  # for leases

    def __str__(self) -> str:
        return f"{self.number}{self.incarnation}"


# ---- commands ----


class Interaction:
    """Runs commands.

    Args:
        folder: of the servers' files.
    """

    def __init__(self, folder: Path) -> None:
        self._root = self._folder = folder
        self._clock, self._turns = job_frames.Clock(), Turns()
        self._servers: dict[int, Server] = {}
        self._trainers: dict[str, Trainer] = {}  # by number and incarnation
        self._started: list[Server] = []  # of all jobs
        self._lines: list[str] = []
        self._quiet = False

    def run(self, line: str) -> list[str]:
        """Runs a command: its name, then words, flags and ``key=value``.

        Returns:
            The lines that it says.
        """
        name, *words = line.split()
        pairs = [word.partition("=") for word in words]
        flags = [key for key, equals, _ in pairs if not equals]
        said = {
            key: int(text) if text.isdecimal() else text for key, equals, text in pairs if equals
        }
        self._lines = []
        getattr(self, f"_do_{name}")(*flags, **said)
        self._turns.settle()
        return self._lines

    def close(self) -> None:
        """Ends all jobs."""
        self._quiet = True
        for each in self._started:
            each.lifecycle.drain()
        self._turns.settle()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._lines.append(text.replace(str(self._folder), "FOLDER"))

    def _call(
        self,
        who: str,
        call: Callable[[], Any],
        says: Callable[[Any], str],
        waits: str = "waits for its record",
    ) -> None:
        """Makes a call of a trainer; says how it ends, when it does, and that it waits until then.

        Args:
            waits: what is said where the wait itself says nothing.
        """

        def ended(result: Any) -> None:
            if isinstance(result, PServerError):
                self._say(f"{who}: {type(result).__name__}: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                self._say(f"{who}: {says(result)}")

        self._turns.begin(call, ended, lambda text: self._say(f"{who}: {text or waits}"))

    def _of(self, server: int | str) -> list[int]:
        return sorted(self._servers) if server == "" else [int(server)]

    # ---- the job ----

    def _do_job(
        self, *flags: str, mode: str = "async", servers: int = 1, trainers: int = 2, **config: Any
    ) -> None:
        """Begins.  With the flag ``joined`` all trainers have joined, with ``saved`` trainer 0 has
        saved to "a", and with ``unawaited`` lost servers are not awaited.
        """
        self.close()
        self._folder = self._root / f"after {len(self._started)}"
        self._network = Network(self._say)
        self._servers, self._trainers = {}, {}
        self._mode, self._counts = mode, (trainers, servers)
        self._awaits, self._config = "unawaited" not in flags, config
        for server in range(servers):
            self._start(server)
        for trainer in range(trainers) if "joined" in flags else ():
            self._do_join(trainer=trainer)
        self._do_deliver()
        if "saved" in flags:
            self._do_save(trainer=0, number=1)
            self._do_deliver()
        self._quiet = False

    def _plan(self, lr: float = 1.0) -> Plan:
        return plan_of(self._mode, *self._counts, lr)

    def _start(self, server: int, reload: str | None = None) -> None:
        config = ServerConfig(
            heartbeat_timeout_seconds=TIMEOUT,
            data_dir=str(self._folder / "saved"),
            write_ahead_log=None if server or not self._awaits else str(self._folder / "log"),
            await_servers=self._awaits,
            reload=reload,
            **self._config,
        )
        says = lambda text: self._say(f"server {server}, {text}")  # noqa: E731
        job = Server(says, config, {"inprocess": 1}, self._clock, Links(self._network, server))
        self._servers[server] = job
        self._started.append(job)

    def _do_restart(self, server: int, path: str = "a") -> None:
        """Another process of a server, which reads a save."""
        self._start(server, str(self._folder / "saved" / path / f"server-{server}"))

    def _do_deliver(self, pair: str = "", count: int = 0) -> None:
        """Delivers the messages that are under way from one server to another, as in ``1->0``;
        without a pair those to server 0, and then those to server 1.
        """
        for each in [pair] if pair else ["1->0", "0->1"]:
            sender, receiver = map(int, each.split("->"))
            for arrives in self._network.deliver(sender, receiver, count):
                arrives()
                self._turns.settle()

    # ---- trainers ----

    def _trainer(self, trainer: int | str) -> Trainer:
        """By its number and incarnation, which is "a" where it is not said."""
        name = f"{trainer}a" if isinstance(trainer, int) else trainer
        return self._trainers.setdefault(name, Trainer(int(name[:-1]), name[-1]))

    def _do_join(self, trainer: int | str, server: int | str = "", lr: float = 1) -> None:
        who, plan = self._trainer(trainer), self._plan(float(lr))
        for index in self._of(server):
            join = partial(self._join, who, index, plan)
            self._call(f"{who} on server {index}", join, lambda said: said)

    def _join(self, who: Trainer, index: int, plan: Plan) -> str:
        job = self._servers[index]
        program = pserver_program(
            Deployment(plan, ("h:1", "h:2")[: plan.servers], server_index=index)
        )
        reply = job.join(
            wire.JoinRequest(
                protocol=PROTOCOL,
                trainer_id=who.number,
                incarnation=who.incarnation,
                fingerprint=plan.fingerprint(),
                manifest=plan.manifest(),
                transports=["inprocess"],
                server_index=index,
            )
        )
        install = wire.InstallRequest(session=reply.session, program=program.to_proto())
        if reply.wants_program:
            job.install(install)
            return "brings the program, and joins later"
        if not reply.ready:
            held = f", until trainer {', '.join(map(str, reply.held_by))} has used up a pass"
            return "joins later" + (held if reply.held else "")
        who.sessions[index] = reply.session
        who.members[index] = job.member(reply.session)
        if reply.install:
            job.install(install)
            for value in job.installed().slices.values.values():
                value.zero_()
            job.loaded(who.members[index])
        return "joined" + (f", after step {reply.steps[0]}" if any(reply.steps) else "")

    def _do_step(
        self, *flags: str, trainer: int | str, step: int, server: int | str = "", samples: str = ""
    ) -> None:
        """A step, which adds 1, of trainer 1 it adds 10, and so on; with the flag ``last``
        it is the trainer's last one, and with ``late`` a thread of the server has had it before.
        """
        who = self._trainer(trainer)
        for index in self._of(server):
            take = partial(self._step, who, index, step, samples, flags)
            self._call(f"{who}/{step} on server {index}", take, lambda said: said)

    def _step(self, who: Trainer, index: int, step: int, samples: str, flags: Any) -> str:
        job = self._servers[index]
        late, lane = "late" in flags, job.installed().lanes[0]
        member = who.members[index] if late else job.member(who.sessions.get(index, ""))
        kind = lane.lane.kind
        ranges = [tuple(map(int, each.split("-"))) for each in samples.split(",") if each]
        # a gradient, a change, or the value itself
        change = 10.0**who.number if kind.steps_on_trainer else -(10.0**who.number)
        brought = {
            name: torch.full_like(update.value, change)
            + (update.value if kind.outer_optimizer else 0.0)
            for name, update in lane.updates.items()
        }
        own = Step(
            process_of(member),
            step,
            brought,
            {0: RULE},
            last="last" in flags,
            leases=() if index else tuple((0, a, b) for a, b in ranges),
        )
        taken = lane.commit(member, own)
        assert not isinstance(taken, Clipping), "no norm clips here"
        taken.finish()
        outcome = lane.outcome(member, step, taken)
        of = f" with {outcome.committed} trainers" if outcome.committed > 1 else ""
        return f"applied{of}, {self._values(index)}"

    def _values(self, index: int) -> str:
        values = self._servers[index].installed().slices.values
        return " ".join(f"{name}={values[name].flatten()[0]:g}" for name in sorted(values))

    def _do_leave(self, trainer: int | str, preempted: int = 0, failure: str = "") -> None:
        """A trainer leaves all servers; ``preempted`` after this step."""
        who = self._trainer(trainer)
        for index, session in sorted(who.sessions.items()):
            said = {"failure": failure} if failure else {"success": True}
            request = wire.LeaveRequest(
                session=session, preempted=bool(preempted), step=preempted, **said
            )
            leave = partial(self._servers[index].leave, request)
            self._call(f"{who} on server {index}", leave, lambda reply: reply.failure or "left")

    def _do_finish(self, trainer: int | str) -> None:
        """A trainer takes no further step."""
        who = self._trainer(trainer)
        for index, session in sorted(who.sessions.items()):
            finish = partial(self._servers[index].finish, wire.FinishRequest(session=session))
            over = lambda reply: f"finished, awaited are {list(reply.missing)}"  # noqa: E731
            self._call(f"{who} on server {index}", finish, over)

    def _do_barrier(self, trainer: int | str, name: str) -> None:
        """A trainer meets the others, on server 0."""
        who = self._trainer(trainer)
        request = wire.MeetRequest(session=who.sessions[0], key=name)
        meet = partial(self._servers[0].meet, request)

        def said(reply: wire.MeetReply) -> str:
            absent = f", absent {list(reply.roll.absent)}" if reply.roll.absent else ""
            return f"passes{absent}" if reply.over else "asks again"

        self._call(f"{who}", meet, said)

    def _do_heartbeat(self, trainer: int | str, server: int = 0) -> None:
        """The answer to a trainer's heartbeat."""
        who = self._trainer(trainer)
        request = wire.HeartbeatRequest(session=who.sessions.get(server, ""))

        def said(reply: wire.HeartbeatReply) -> str:
            roll = reply.roll
            steps = [f"{each} after step {roll.preempted[each]}" for each in sorted(roll.preempted)]
            return (
                f"{roll.changes} changes, first is {roll.first}, absent {list(roll.absent)}"
                + (f", preempted {', '.join(steps)}" if steps else "")
                + (f", {reply.error}: {reply.failure}" if reply.failure else "")
            )

        self._call(f"{who}", partial(self._servers[server].heartbeat, request), said)

    # ---- losses ----

    def _do_lose(self, server: int) -> None:
        """A server ends without a word."""
        self._quiet = True
        self._servers.pop(server).lifecycle.drain()
        self._turns.settle()
        self._quiet = False
        self._network.lose(server)

    def _do_ended(self, *flags: str, trainer: int, reason: str = "killed") -> None:
        """A trainer's launcher says to server 0 that its process has ended; with the flag
        ``unreplaced``, that it starts no other.
        """
        unreplaced = "unreplaced" in flags
        self._servers[0].announce(
            wire.AnnounceRequest(trainer_id=trainer, failure=reason, unreplaced=unreplaced)
        )

    def _do_time(self, seconds: int, server: int | str = "", silent: int | str = "") -> None:
        """Time passes for servers; all trainers but a silent one send heartbeats."""
        self._clock.time += seconds
        for who in self._trainers.values():
            for index, session in who.sessions.items() if str(who) != str(silent) else ():
                if index in self._servers:
                    self._heartbeat(index, session)
        for index in self._of(server):
            self._servers[index].tick()
            self._turns.settle()

    def _heartbeat(self, index: int, session: str) -> None:
        try:
            self._servers[index].heartbeat(wire.HeartbeatRequest(session=session))
        except PServerError:
            pass  # of a process before this one

    # ---- samples ----

    def _do_lease(
        self, *flags: str, trainer: int | str, samples: int = 20, batch: int = 5, most: int = 1
    ) -> None:
        """A request for samples of epoch 0; with ``again`` the same once more, with ``idle`` of a
        trainer that has none left, with ``stripes`` where all step together.
        """
        who = self._trainer(trainer)
        who.requests += 0 if "again" in flags else 1
        request = wire.LeaseRequest(
            session=who.sessions.get(0, ""),
            number=who.requests,
            epoch=wire.LeaseEpoch(
                number=0,
                seed="0",
                samples=samples,
                batch_size=batch,
                unit="samples",
                stripes=self._counts[0] if "stripes" in flags else 0,
            ),
            most=most,
            **({"unstepped": 0} if "idle" in flags else {}),
        )

        def said(reply: wire.LeaseReply) -> str:
            if reply.ranges:
                got = [f"{each.start}-{each.stop}" for each in reply.ranges]
                return f"samples {', '.join(got)}"
            return "the epoch is over" if reply.over else "none now"

        self._call(f"{who}", partial(self._servers[0].lease, request), said)

    def _do_account(self) -> None:
        """The account of all samples."""
        for epoch, of in self._servers[0].installed().leases.accounts.items():
            over = ", over" if of.over else ""
            self._say(
                f"epoch {epoch}: {of.samples} samples: {of.decided} decided, {of.leased} leased, "
                f"{of.skipped} skipped, {of.left_out} left out{over}"
            )

    # ---- saves ----

    def _do_save(
        self, *flags: str, trainer: int | str, number: int, server: int | str = "", path: str = "a"
    ) -> None:
        """A trainer asks servers to save; with the flag ``withdraw`` it gives that up."""
        who = self._trainer(trainer)
        for index in self._of(server):
            request = wire.SaveRequest(
                session=who.sessions.get(index, ""),
                path=path,
                number=number,
                background=True,
                withdraw="withdraw" in flags,
            )
            save = partial(self._save, index, request)
            name = f"save {number} of {who} on server {index}"
            self._call(name, save, lambda said: said)

    def _save(self, index: int, request: wire.SaveRequest) -> str:
        job = self._servers[index]
        job.save(request)
        if request.withdraw:
            return "withdrawn"
        assert job.saves.wait(scaled(TIMEOUT)), "it is not written"
        saved = checkpoint.reading(str(self._folder / "saved" / request.path / f"server-{index}"))
        values = {name: each.flatten()[0] for name, each in sorted(saved.tensors().items())}
        held = " ".join(f"{name}={value:g}" for name, value in values.items())
        return f"as of record {saved.meta['log']['record']}, {held}"

    # ---- what there is ----

    def _do_state(self, server: int | str = "") -> None:
        """The trainers as servers know them, and the servers that these await."""
        for index in self._of(server):
            job = self._servers[index]
            with job.condition:
                for line in self._state(index, job):
                    self._say(line)

    def _state(self, index: int, job: Server) -> Iterator[str]:
        installed, members = job.installed(), job._members
        away = ", ".join(map(str, installed.decisions.awaited))
        status = job.status(wire.StatusRequest())
        said = [job.lifecycle.word, f"record {installed.decisions.last}", self._values(index)]
        said += [f"awaits server {away}"] if away else []
        said += [f"kept for {status.kept_seconds:g} s"] if status.kept_seconds else []
        lost = status.reload.steps_by_trainer
        said += [f"lost steps {dict(sorted(lost.items()))}"] if status.reload.steps else []
        yield f"server {index}: {', '.join(said)}"
        staged = {
            each.process.trainer: each.step
            for each in (of.step for of in installed.lanes[0].staged)
        }
        for trainer, member in sorted(members.by_trainer.items()):
            said = [f"{trainer}{member.incarnation} {member.word}", f"step {member.step(0)}"]
            if trainer in staged:
                said.append(f"{staged[trainer]} staged")
            if trainer in members.reserved:
                left = members.reserved[trainer] - self._clock.time
                said.append(f"place kept for {left:g} s")
            yield f"  {', '.join(said)}"
        for _, known in sorted(members.away.items()):
            yield f"  {delivered.process(known)} has not joined again"

    def _do_records(self) -> None:
        """The log, as server 0 has it."""
        coordinator = self._servers[0].installed().decisions.coordinator
        assert coordinator is not None, "of server 0"
        for each in coordinator.since(0) or ():
            self._say(delivered.record(each))


@contextmanager
def interaction(folder: Path) -> Iterator[Interaction]:
    """Servers without a job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "Waits", WaitsInTurn)
        made = Interaction(folder)
        try:
            yield made
        finally:
            made.close()


# ---- transcripts ----


def ran(text: str, run: Callable[[str], list[str]]) -> str:
    """A transcript with the output of its commands: comments stay, and each block of commands ends
    with ``----``, what they say, and an empty line.
    """
    lines: list[str] = []
    said: list[str] | None = None  # of the block's commands
    in_output = False
    for line in text.splitlines():
        if in_output and line:
            continue
        if line == "----":
            lines += ["----", *(said or ["ok"])]
            in_output = True
            continue
        if line and not line.startswith("#"):
            said = (said or []) + run(line)
        elif not line:
            in_output, said = False, None
        lines.append(line)
    return "\n".join(lines) + "\n"
