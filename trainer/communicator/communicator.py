"""A trainer's side of a job: its connections to all servers of the plan, and one sender for each
lane.

The eager path (``fleet``) and the program path (``Executor``) both end here.  A step is::

    send(slice, gradient)  ...         in any order: tensors leave while the script continues
    close_step(hparams)                the step is complete
    finish_step()                      waits as the lanes require, takes in the received values
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import torch

from pserver.client.channel import Channel, Hparams
from pserver.client.client import Client, Identity
from pserver.client.replies import Admission, Reply
from pserver.config import PREFERRED_TRANSPORTS
from pserver.errors import Refused
from pserver.table.gradient import RowGradient
from pserver.telemetry.memory import keep_memory, trim_memory
from pserver.transport.frames import DTYPES
from pserver.transport.memory import totals
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.elastic_means import DenseSteps
from trainer.communicator.joint_calls import JointCalls, PositionExchange
from trainer.communicator.metrics import TrainerMetrics
from trainer.communicator.probe import probe_of, show_if_only
from trainer.communicator.termination import Shutdown, spelled, termination
from trainer.communicator.transfer import StateTransfer
from trainer.environment.environment import Connection
from trainer.senders.async_lane import AsyncSender
from trainer.senders.buffers import SyncedBuffers, travelling
from trainer.senders.kstep_lane import DiLoCoSender, GeoSender, drain_for_others, window_of
from trainer.senders.live_trainers import LiveTrainers, live_trainers_of
from trainer.senders.parameters import ParameterSlices, ScriptWrites, local_gradient, take_over
from trainer.senders.pipeline import LaneSender
from trainer.senders.sync_lane import SyncSender
from transpiler.distribute import pserver_program
from transpiler.plan.plan import Deployment, Lane, Placement, Plan
from transpiler.program import Program
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainer.communicator.table_sources import TableSources
    from trainer.embedding.rows import RowSource
    from trainer.senders.look_ahead import LookAhead
    from trainer.senders.served_rows import Lookups


# ---- connections ----
#
# A trainer's clients, one for each server of its plan.


def clients_of(deployment: Deployment, connection: Connection, incarnation: str) -> list[Client]:
    """The clients of a trainer, by server; none has joined yet.

    Args:
        deployment: a trainer's.
        connection: timeouts, which transports to offer, and the key.
        incarnation: of this trainer.
    """
    # Without wait_port the servers are expected to be up already.
    start_timeout = (
        connection.start_timeout_seconds
        if deployment.wait_port
        else connection.heartbeat_timeout_seconds
    )
    access = connection.access_to(deployment.endpoints)
    identity, plan = _identity(deployment, connection, incarnation), deployment.plan
    return [
        Client(
            endpoint,
            index,
            identity,
            connection.heartbeat_timeout_seconds,
            start_timeout,
            len(plan.lanes),
            bool(plan.tables),
            access,
        )
        for index, endpoint in enumerate(deployment.endpoints)
    ]


def _identity(deployment: Deployment, connection: Connection, incarnation: str) -> Identity:
    assert deployment.trainer_id is not None, "a trainer's deployment has its number"
    return Identity(
        trainer_id=deployment.trainer_id,
        incarnation=incarnation,
        fingerprint=deployment.plan.fingerprint(),
        manifest=deployment.plan.manifest(),
        transports=PREFERRED_TRANSPORTS
        if connection.transport == "auto"
        else (connection.transport,),
        coordinator=deployment.endpoints[0],
    )


def channels_of(clients: Sequence[Client], plan: Plan, lane: int) -> list[Channel]:
    """A lane's channels, by server, to servers that have been joined."""
    shorter = {
        table.name: DTYPES[table.gradients_in]
        for table in plan.tables
        if table.gradients_in != table.computes_in and not plan.lanes[lane].kind.steps_on_trainer
    }
    channels = [client.channels[lane] for client in clients]
    for channel in channels:
        channel.rows_travel = shorter
    return channels


def begun_at(clients: Sequence[Client], joined: Sequence[Admission], lane: int) -> int:
    """The last step of a lane that the servers have applied: 0 in a new job; if they were started
    with the programs of an earlier job, the last step of that job.

    Args:
        joined: the answers to the clients' Joins.

    Raises:
        Refused: the servers are at different steps.
    """
    steps = [each.steps[lane] if len(each.steps) > lane else 0 for each in joined]
    for client, step in zip(clients, steps, strict=True):
        if step != steps[0]:
            raise Refused(
                f"{clients[0].endpoint} begins with step {steps[0]} of lane {lane}, and "
                f"{client.endpoint} with step {step}: start all servers with what they held at one "
                "moment"
            )
    return steps[0]


# ---- counters ----
#
# What a trainer counts of its job, over all lanes and servers.


def counters(
    steps: int, clients: Sequence[Client], lanes: Sequence[LaneSender]
) -> dict[str, float]:
    """Counters since the start.

    steps (closed by the script), messages, bytes_out and bytes_in (payload), reconnects,
    steps_merged (into messages), steps_queued (not yet answered; in the k-step modes, taken since
    the last message), blocked_seconds (of waits for a full queue, or for its answers),
    steps_refused_nonfinite (messages with a NaN or an infinity, of which servers have applied
    nothing), steps_refused_outlier (the same of messages with a norm far beyond its history).
    """
    channels = [channel for client in clients for channel in client.every_channel]
    total = {
        "steps": float(steps),
        "bytes_out": float(sum(channel.bytes_out for channel in channels)),
        "bytes_in": float(sum(channel.bytes_in for channel in channels)),
        "reconnects": float(sum(channel.reconnects for channel in channels)),
        "steps_merged": 0.0,
        "steps_queued": 0.0,
        "blocked_seconds": 0.0,
        "steps_refused_nonfinite": 0.0,
        "steps_refused_outlier": 0.0,
    }
    for lane in lanes:
        for name, value in lane.metrics().items():
            total[name] = total.get(name, 0.0) + value
    return total


# ---- options ----
#
# The settings of a strategy that concern a trainer alone: no server and no other trainer needs to
# know them, so they are not part of the plan.


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How one trainer sends.  Each field is a key of ``a_sync_configs``.

    Attributes:
        runtime_split_send_recv: steps queue whole, and each lane's sending thread cuts them into
            slices.
        soft_wait_ms: see [Note: how far ahead] in senders/async_lane.py.
    """

    runtime_split_send_recv: bool = False
    soft_wait_ms: int = 50


def options_of(strategy: DistributedStrategy | None) -> SendOptions:
    """The options that a strategy asks for; without a strategy the defaults."""
    if strategy is None:
        return SendOptions()
    configs: Mapping[str, Any] = strategy.a_sync_configs
    return SendOptions(**{field.name: configs[field.name] for field in fields(SendOptions)})


# ---- senders ----
#
# Which sender each lane of a plan has on a trainer: one entry for each update mode.


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The constructor arguments of a sender, besides its slices.

    Attributes:
        plan: of the job.
        lane: of the sender.
        options: of this trainer alone.
        live: the live trainers.
        buffers: the ones that travel with the lane's steps.
    """

    plan: Plan
    lane: Lane
    options: SendOptions
    live: LiveTrainers
    buffers: SyncedBuffers

    @property
    def hparams(self) -> Hparams:
        """The plan's hyper-parameters, by group."""
        return {index: rule.hparams for index, rule in enumerate(self.plan.groups)}


SENDERS: Mapping[str, Callable[[ParameterSlices, SenderSettings], LaneSender]] = {
    "sync": lambda slices, of: SyncSender(
        of.lane, slices, of.plan.clip if of.plan.clips_on_servers else None, of.live, of.buffers
    ),
    "async": lambda slices, of: AsyncSender(
        of.lane, slices, of.options.soft_wait_ms, of.buffers, of.live.own
    ),
    "half_async": lambda slices, of: AsyncSender(of.lane, slices, 0, of.buffers, of.live.own),
    "geo": lambda slices, of: GeoSender(of.lane, slices, of.live, of.hparams, of.buffers),
    "diloco": lambda slices, of: DiLoCoSender(of.lane, slices, of.hparams, of.buffers),
}


def senders_of(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    options: SendOptions,
    live: LiveTrainers,
    script: ScriptWrites,
    buffers: SyncedBuffers,
) -> list[LaneSender]:
    """The senders of a plan's lanes, each for its lane's mode.

    Args:
        plan: of the job.
        tensors: every placed variable by name, the live ones.
        options: of this trainer alone.
        live: the live trainers.
        script: the script's external writes.
        buffers: the models' buffers, which travel with the steps of one lane.
    """
    none = SyncedBuffers([], {}, "own", live)
    senders = []
    for index, lane in enumerate(plan.lanes):
        slices = ParameterSlices(_placements(plan, index, tensors), tensors, script)
        own = buffers if index == buffers.lane else none
        senders.append(SENDERS[lane.mode](slices, SenderSettings(plan, lane, options, live, own)))
    return senders


def buffers_of(
    plan: Plan, tensors: Mapping[str, torch.Tensor], live: LiveTrainers
) -> SyncedBuffers:
    """The synced buffers of all models of a job.  They travel with the first lane of gradients;
    without such a lane, with the first lane.
    """
    placements = travelling(plan, tensors)
    lane = _held_lane(plan) or 0
    return SyncedBuffers(placements, tensors, plan.lanes[lane].buffers, live, lane)


def _held_lane(plan: Plan) -> int | None:
    """The lane whose steps assign what servers hold and never update: the first lane of gradients,
    or None.
    """
    gradients = (i for i, lane in enumerate(plan.lanes) if not lane.kind.steps_on_trainer)
    return next(gradients, None)


def _held_parameters(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the parameters that servers hold and that no process updates.  Buffers and the
    parameters that the trainers average among themselves are excluded.
    """
    return {
        placement.name
        for placement in plan.placements
        if placement.group is None
        and placement.name not in plan.averaged
        and isinstance(tensors[placement.name], torch.nn.Parameter)
    }


def _placements(plan: Plan, index: int, tensors: Mapping[str, torch.Tensor]) -> list[Placement]:
    """The variables that a lane's steps update or assign: those that servers update, and
    parameters that they only hold.
    """
    held = _held_parameters(plan, tensors) if index == _held_lane(plan) else set()
    return [
        p for p in plan.placements if (p.lane == index if p.group is not None else p.name in held)
    ]


# ---- table requests ----
#
# A communicator's requests for tables.  For a plan without tables there are none, and numba is not
# imported.


def lookups_of(plan: Plan) -> Lookups | None:
    """The requests for rows; None for a plan without tables."""
    if not plan.tables:
        return None
    from trainer.senders.served_rows import Lookups  # imports numba

    return Lookups(plan.tables)


def sources_of(
    plan: Plan,
    lookups: Lookups | None,
    lanes: Sequence[LaneSender],
    clients: Sequence[Client],
    live: LiveTrainers,
    drain: Callable[[], None],
) -> TableSources | None:
    """The sources of the embeddings' rows; None for a plan without tables.

    Args:
        live: the live trainers.
        drain: waits until every step sent has been applied.
    """
    if lookups is None:
        return None
    from trainer.communicator.table_sources import TableSources  # imports numba

    return TableSources(plan, lookups, lanes, clients, live, drain)


def look_ahead_of(plan: Plan, lookups: Lookups | None) -> LookAhead | None:
    """The lookups of coming steps; None where no table's lane has them."""
    if lookups is None or not any(plan.lanes[table.lane].look_ahead for table in plan.tables):
        return None
    from trainer.senders.look_ahead import LookAhead  # imports numba

    return LookAhead(lookups, plan)


# ---- communicator ----


log = logging.getLogger(__name__)

Drained = Callable[[], None] | None  # called when the servers have all that a trainer sends


class Communicator:
    """One trainer's part in a job.

    The script's thread calls it.

    Args:
        deployment: the plan, the endpoints and this trainer's number.
        tensors: every placed variable by name: the live tensors, which receive the parameters.  Any
            device, any strides.
        optimizers: their states, if they have some already, are the servers' initial states.
        connection: timeouts, and which transports to offer.
        start_rows: by table, ids (int64 [n]) and values ([n, dim]) that servers begin with.
        options: of this trainer alone.
        incarnation: the one that this trainer has announced; "" if it has announced none.

    Attributes:
        plan: of the job.
        step: steps that the script has closed, including those that the servers had when it joined.
        lanes: the senders, by lane.
        consumed: samples that the script trains on; the first lane's messages carry them.
        clients: the connections, by server.
        lookups: requests for rows, where the plan has tables.
        look_ahead: those of coming steps, where the strategy asks for them.
        live: the live trainers.
        buffers: the models' synced buffers, which travel with steps.
        transfer: transfers values and states outside of steps.
        dense_allreduce: averages the gradients that trainers share without servers, if any.
        group: the live trainers' group, once they have computed values together.
        page: its metrics for Prometheus.
        position: the script's position, for trainers that join late.
        joint: the calls that all trainers make together.
        hand_over: called before it leaves because it was preempted; gives back what another trainer
            needs then.
        take_back: takes back the gradients that have left before their step, because of what it is
            given; called before values or states travel on the same streams.
    """

    def __init__(
        self,
        deployment: Deployment,
        tensors: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        connection: Connection | None = None,
        start_rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        options: SendOptions | None = None,
        incarnation: str = "",
    ) -> None:
        assert deployment.trainer_id is not None, "a trainer's deployment has its number"
        connection = connection or Connection.from_environment()
        self.plan, self.trainer_id = deployment.plan, deployment.trainer_id
        self.step = 0
        self.dense_allreduce: DenseAllreduce | DenseSteps | None = None
        self.group: ElasticGroup | None = None
        self._connection, self._options = connection, options or SendOptions()
        self._tensors = tensors
        of, servers = deployment.of_server, range(self.plan.servers)
        self._programs = [pserver_program(of(index)) for index in servers]
        self._script = ScriptWrites()
        self._all = ParameterSlices(list(self.plan.placements), tensors, self._script)
        self.live = live_trainers_of(self.plan, self.trainer_id, connection)
        self.buffers = buffers_of(self.plan, tensors, self.live)
        self.transfer = StateTransfer(
            self.plan, self._programs, self._all, tensors, optimizers, self.buffers
        )
        options, buffers = self._options, self.buffers
        self.lanes = senders_of(self.plan, tensors, options, self.live, self._script, buffers)
        self.consumed = self.lanes[0].consumed
        self._open: set[int] = set()  # lanes that have sent something of a step that is not closed
        self._closed: set[int] = set()  # lanes whose step is closed and not finished
        self._finished: dict[int, Reply] = {}  # of those, once their answers are taken in
        # See [Note: an interrupted step] in pipeline.py.
        self._torn = 0  # the step of which a part can be neither withdrawn nor repeated; 0: none
        self._again: Callable[[], object] | None = None  # ends a step whose answers are awaited
        self._reply: Reply | None = None  # to that one, once they are taken in
        self._left, self._asked_at = False, 0
        self.hand_over: Callable[[], None] = lambda: None
        self.take_back: Callable[[str], None] = lambda cause: None
        self._start_rows = dict(start_rows or {})
        self.lookups = lookups_of(self.plan)
        self.look_ahead = look_ahead_of(self.plan, self.lookups)
        self._make_clients(deployment, connection, incarnation or secrets.token_hex(8))

    def _make_clients(
        self, deployment: Deployment, connection: Connection, incarnation: str
    ) -> None:
        """Makes the connections, and the parts that need them."""
        self.page = TrainerMetrics(deployment, connection, self.lanes, incarnation)
        self.clients = clients_of(deployment, connection, incarnation)
        self.clients[0].learn = self.live.learn
        self.position = PositionExchange(
            self.clients[0], self.live, self.plan, self.lanes, self._closed
        )
        self.joint = JointCalls(self.clients, self.position)
        self._shutdown = Shutdown(self.clients, self.trainer_id, self.leave)
        self.transfer.start(self.clients, self.lanes[0])
        if self.lookups is not None:
            self.lookups.start(self.clients)
        self._probe = probe_of(connection, self.plan, self.clients, self.lanes, self.lookups)
        self._sources = sources_of(
            self.plan, self.lookups, self.lanes, self.clients, self.live, self.drain
        )

    # ---- start and end ----

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Joins every server, installs those that are empty (trainer 0), and receives the
        parameters.

        Args:
            meanwhile: called while it waits for a server; an exception that it raises ends the
                wait.

        Raises:
            PServerError: a server cannot be reached or refuses; then this trainer has left every
                server.
            SystemExit: only the plan was asked for; it has been printed.
        """
        show_if_only(self.plan, self._connection)
        keep_memory()
        self.page.open(self.clients)
        self._shutdown.expect()
        try:
            joined = [
                self._join(client, program, meanwhile)
                for client, program in zip(self.clients, self._programs, strict=True)
            ]
            theirs = [] if all(each.install for each in joined) else self.plan.placements
            take_over(theirs, self._tensors, self.transfer.pull, self.trainer_id)
            for index, lane in enumerate(self.lanes):
                self.step = max(self.step, applied := begun_at(self.clients, joined, index))
                lane.start(channels_of(self.clients, self.plan, index), applied)
            self.page.joined(joined[0].run)
            self._shutdown.allow(self._connection.grace_seconds)
        except BaseException as error:
            self.leave(spelled(error))
            raise
        trim_memory()

    def _join(self, client: Client, program: Program, meanwhile: Callable[[], None]) -> Admission:
        # the job may end at one server while this trainer waits to join another
        client.meanwhile = partial(_each, self.check, meanwhile)
        joined = client.join(program if self.plan.outlives_servers else None)
        if joined.install:
            client.install(program)
            for name, (ids, values) in self._start_rows.items():
                assert self.lookups is not None, "the plan has this table"
                self.lookups.load_initial(client.index, name, ids, values)
            self.transfer.upload(client)  # the last: from here on the server serves
        return joined

    def finish(self, drained: Callable[[], None] = lambda: None) -> None:
        """Leaves when every trainer of the job has finished.

        See [Note: a job is done when all say so] in termination.py.

        Args:
            drained: called when the servers have everything that this trainer sends.

        Raises:
            PServerError: the job has failed.
        """
        if not self._left:
            self._end("", drained, returns=False, preempted=False)

    def leave(self, failure: str = "", returns: bool = False) -> None:
        """Drains the lanes and leaves every server, without waiting for the other trainers; or
        tells the servers why this trainer cannot continue.

        A second call does nothing.

        Args:
            returns: this process joins again, with another plan: the servers wait for it.

        Raises:
            PServerError: the job has failed, and no ``failure`` was given.
        """
        if not self._left:
            self._end(failure, None, returns, preempted=False)

    def end_if_asked(self) -> None:
        """Called at the end of a step: after a SIGTERM with a grace period, leaves the servers and
        ends the process.  It never leaves while gradients are being accumulated.  See [Note:
        preempted] in termination.py.

        Raises:
            SystemExit: it has left; the status is 143.
            PServerError: the job has failed.
        """
        stepped, self._asked_at = self.step > self._asked_at, self.step
        if stepped and termination.awaited and not self._left:
            self.hand_over()
            self._end("", None, returns=False, preempted=True)

    def _end(self, failure: str, drained: Drained, returns: bool, preempted: bool) -> None:
        ended: BaseException | None = None
        if self.look_ahead is not None:
            self.look_ahead.close()
        if not failure:
            try:
                self.settle()
                self._shutdown.drain(self.lanes)
                if drained is not None:
                    self.transfer.upload_buffers()
                    with self.position.waiting():
                        preempted = not self._shutdown.agree(self.dense_allreduce, drained)
                    self.transfer.pull_buffers()  # of the others' last steps
            except BaseException as error:
                ended, failure = error, spelled(error)
        self._left = True
        self._shutdown.forget()
        told = self._shutdown.leave(self.lanes, failure, returns, self.step if preempted else None)
        self.page.close()
        for each in (self.group, self.dense_allreduce):
            if each is not None:
                each.close(failure)
        if (cause := ended or (None if failure else told)) is not None:
            raise cause
        if preempted:
            self._shutdown.end(self.step)

    @property
    def transport(self) -> str:
        """The transports in use: "tcp", or "tcp, grpc" where servers differ."""
        return ", ".join(sorted({client.transport for client in self.clients}))

    def metrics(self) -> dict[str, float]:
        """Counters since the start: those of :func:`counters`; with tables "lookups" and
        "rows_looked_up"; and with ``look_ahead`` "rows_ahead", "rows_refreshed" and "rows_awaited".
        """
        total = counters(self.step, self.clients, self.lanes)
        if self.lookups is None:
            return total
        return total | self.lookups.metrics(ahead=self.look_ahead is not None)

    def variable_bytes(self) -> dict[str, dict[str, int]]:
        """Payload "bytes_in" and "bytes_out" of each variable since the start, as they travelled:
        after compression.
        """
        return totals((client.traffic for client in self.clients), self.plan)

    # ---- steps ----

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Queues the gradient of one slice.

        Args:
            name: the slice's name.
            gradient: as many elements as the slice, on any device; the caller leaves it unchanged
                until ``finish_step`` returns.

        Raises:
            ValueError: it has another dtype or number of elements than its slice, or is sparse.
        """
        placement, slice_ = self._all.owner(name)
        here = local_gradient(placement, name, gradient, slice_.shape)
        self._begin(placement.lane)
        self.lanes[placement.lane].send({name: here})

    def send_whole(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Queues the gradients of parameters: slice by slice, or whole if the lane's sending thread
        cuts them.

        Args:
            gradients: by the parameter's name; see :meth:`send`.

        Raises:
            ValueError: see :meth:`send`; nothing of the lane is queued.
        """
        for lane, own in self._all.by_lane(gradients).items():
            whole = {
                placement.name: local_gradient(placement, placement.name, gradient, placement.shape)
                for placement, gradient in own
            }
            self._begin(lane)
            cuts = self._options.runtime_split_send_recv and self.plan.lanes[lane].kind.queues
            self.lanes[lane].send(whole if cuts else self._all.cut(whole))

    def _begin(self, lane: int) -> None:
        """Begins a lane's step, unless something of it has been sent."""
        if lane not in self._open:
            self.check()
            self.lanes[lane].begin()
            self._open.add(lane)

    def rows_of(self, table: str) -> RowSource:
        """The source that the embeddings of a table pull from: the servers, or in a k-step lane the
        rows that this trainer steps.
        """
        assert self._sources is not None, "the plan has this table"
        return self._sources.source(table)

    def send_rows(self, gradients: Mapping[str, RowGradient]) -> None:
        """Queues the gradients of rows, by table; the caller does not write to their tensors
        again.
        """
        by_lane: dict[int, dict[str, RowGradient]] = {}
        for table in self.plan.tables:
            if table.name in gradients:
                by_lane.setdefault(table.lane, {})[table.name] = gradients[table.name]
        for lane, own in by_lane.items():
            self._begin(lane)
            self.lanes[lane].send_rows(own)

    def commit(self, hparams: Hparams, overflow: bool = False) -> Reply:
        """Closes the step in every lane and finishes it: :meth:`close_step`, then
        :meth:`finish_step`.
        """
        self.close_step(hparams, overflow)
        reply = self.finish_step()
        assert reply is not None, "every lane is closed"
        self.counted()
        return reply

    def settle(self) -> None:
        """Ends a step that was interrupted, as by Ctrl-C, while its answers were awaited: it
        counts.  Called before anything that a step must not be in the middle of.

        See [Note: an interrupted step] in trainer/senders/pipeline.py.

        Raises:
            RuntimeError: a step was interrupted where it cannot go on.
            PServerError: what ended the job.
        """
        if self._torn or any(lane.torn for lane in self.lanes):
            self.check()
            raise self._cannot_go_on(self._torn or self.step)
        if self._again is not None:
            self._again()

    @staticmethod
    def _cannot_go_on(step: int) -> RuntimeError:
        return RuntimeError(
            f"step {step} was interrupted, as by Ctrl-C, where it can be neither completed nor "
            "undone, and no other can follow: end the job, and begin again from a checkpoint"
        )

    def withdraw(self, lanes: Iterable[int]) -> None:
        """Withdraws a step that was interrupted before it was closed: the servers have nothing of
        it.
        """
        for index in self._open.intersection(lanes):
            self.lanes[index].withdraw()
            self._open.discard(index)

    def tear(self) -> None:
        """Notes that what follows of the step can be neither withdrawn nor repeated: this trainer
        steps by itself.  The step's close, or :meth:`counted`, follows.
        """
        self._torn = self.step + 1

    def counted(self) -> None:
        """Notes that a step has ended, and counts."""
        self._again, self._reply, self._torn = None, None, 0

    def close_step(
        self, hparams: Hparams, overflow: bool = False, lanes: Sequence[int] | None = None
    ) -> None:
        """Completes the step; parameters for which no gradient was sent have none in it.

        Args:
            hparams: the present hyper-parameters of every group.
            overflow: a gradient was not finite: no trainer takes this step.
            lanes: the lanes to close, as a program closes its lanes one after another; None: all.

        Raises:
            RuntimeError: the step before was interrupted between this call and
                :meth:`finish_step`; or this trainer has left.
            PServerError: what ended the job.
        """
        self.check()
        self.position.answer()
        chosen = list(range(len(self.lanes))) if lanes is None else list(lanes)
        if self._closed.intersection(chosen):
            raise self._cannot_go_on(self.step)
        for index in chosen:
            if index not in self._open:
                self.lanes[index].begin()
        self._torn = number = self.step if self._closed else self.step + 1
        if not self._closed:
            self.step = number
            for client in self.clients:
                client.activity = f"step {self.step}"
        self._closed.update(chosen)
        self._open.difference_update(chosen)
        self.buffers.capture(chosen)
        for index in chosen:
            self.lanes[index].close(hparams, overflow)
            self.page.steps.closed(index)
        if self.look_ahead is not None:
            self.look_ahead.closed({index: self.lanes[index].step for index in chosen})

    def finish_step(self, again: Callable[[], object] | None = None) -> Reply | None:
        """Waits for the closed lanes' replies, and takes in the received values.

        Args:
            again: calls this once more where it was interrupted, and counts the step.  None: an
                interrupted step cannot go on.  :meth:`counted` follows.

        Returns:
            The reply of the first server in the first closed lane, preferring lanes whose servers
            merge the gradients of all trainers; of a step that does not count yet once more; None
            if no lane's step is closed.

        Raises:
            PServerError: a server or another trainer is lost, or a server refused the step.
            SystemExit: this was the last step of a probe.
        """
        closed = sorted(self._closed)
        if closed:
            self._again = again
        if self._again is not None:
            self._torn = 0
        with self._probe, self.position.waiting():
            for index in closed:
                if index not in self._finished:
                    with self.page.steps.blocked(index):
                        self._finished[index] = self.lanes[index].finish()
        self.buffers.land()
        if self.step & (self.step - 1) == 0:
            trim_memory()
        replies = [self._finished[index] for index in closed]
        self._reply = _first(replies, [self.plan.lanes[each] for each in closed]) or self._reply
        self._closed.clear()
        self._finished.clear()
        return self._reply

    def look_again(self) -> None:
        """Finds later external writes, before steps are closed whose gradients were sent during
        backward.
        """
        for index in self._open:
            self.lanes[index].begin()

    def suspected(self) -> set[str]:
        """The variables with possible external writes that the next step brings to the servers."""
        return set().union(*(lane.suspected() for lane in self.lanes))

    @property
    def window(self) -> int:
        """Steps that the script has ended since the last exchange of all trainers.  A trainer that
        joins takes these steps, too, before the next exchange.
        """
        return max(0, window_of(self.lanes) - bool(self._closed))

    def has_sent(self, lane: int) -> bool:
        """Whether gradients of a step that is not closed yet have been sent in a lane."""
        return lane in self._open

    def is_closed(self, lane: int) -> bool:
        """Whether a lane's step has been closed and not yet finished."""
        return lane in self._closed

    def check(self) -> None:
        """Raises the error that ended the job, if any.

        Raises:
            RuntimeError: this trainer has left.
        """
        if self._left:
            said = "this trainer has left the job: no step after fleet.finish() or Executor.close()"
            raise RuntimeError(said)
        for client in self.clients:
            client.check()

    def refresh(self) -> None:
        """Takes in parameters that were received between steps; called before a forward pass.

        Raises:
            RuntimeError: see :meth:`settle`.
        """
        self.settle()
        for lane in self.lanes:
            lane.refresh()
        self.buffers.land(between_steps=True, waits=False)

    def _settle_all(self) -> None:
        """Ends a step that was interrupted, and takes back what has left of the coming one."""
        self.settle()
        self.take_back("a call that reads or writes what servers hold")

    def drain(self) -> None:
        """Waits until everything that this trainer has sent is answered.  Received values do not
        replace the script's external writes.

        Raises:
            RuntimeError: this trainer has left; or see :meth:`settle`.
        """
        self.check()
        self._settle_all()
        for lane in self.lanes:
            lane.drain()
        self.buffers.land(between_steps=True)

    # ---- values and states ----

    def flush(self) -> None:
        """Waits until everything sent has been applied, and receives what others have sent so far.
        Called before a model is evaluated or saved.

        In sync mode this holds after every step.  In the k-step modes the trainer keeps its own
        parameters: :meth:`served` gives the servers'.
        """
        self.drain()
        for lane in self.lanes:
            if isinstance(lane, AsyncSender):
                lane.pull()
        if self.plan.lanes[self.buffers.lane].kind.queues:
            self.transfer.pull_buffers()

    def served(self) -> dict[str, torch.Tensor]:
        """The servers' values of the parameters that this trainer steps by itself, and of the
        buffers that travel with them, whole, by name; the trainer's own values stay.  Warns of
        external writes since the last step: the servers have them only in part, or not at all.
        """
        self._settle_all()
        return self.transfer.served(self.lanes)

    def pull(self) -> None:
        """Receives every placed variable as the servers hold it, including variables that they
        never update.  Parameters that the trainers average stay as they are here.
        """
        self._settle_all()
        self.transfer.pull_served()
        for lane in self.lanes:
            lane.note_values()

    def push(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Loads the leader's values and optimizer states into the servers.  Every trainer calls
        this and has the values afterwards.  The leader is trainer 0 while it is live.

        Args:
            optimizers: the optimizers whose states are loaded; None: all, and the states of outer
                optimizers begin anew.
        """
        self._settle_all()
        drain_for_others(self.lanes, self.drain)
        self.barrier("push")
        self._replace(range(len(self.lanes)), optimizers)

    def push_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Loads the leader's states of an optimizer into the servers, with the values of the
        parameters that servers step.  Every trainer calls this.

        Where trainers step by themselves each has its own states: their parameters, and what they
        have changed since the last exchange, stay.  Before the first step there is no change:
        servers get these values, too, so that a script may begin with those of a file.
        """
        own = [self.step > 0 and lane.kind.steps_on_trainer for lane in self.plan.lanes]
        stepped = [number for number, is_own in enumerate(own) if not is_own]
        if stepped:
            self.drain()
            self.barrier("push")
            for lane in self.lanes if self.live.is_leader else ():
                if isinstance(lane, AsyncSender):
                    lane.pull_beneath()  # the others' last steps
            self._replace(stepped, [optimizer])

    def _replace(
        self, lanes: Sequence[int], optimizers: Sequence[torch.optim.Optimizer] | None
    ) -> None:
        """Replaces the servers' values, but for those of other lanes, and the states of these
        optimizers, by the leader's, when all trainers have come to this.
        """
        if self.live.is_leader:
            for client in self.clients:
                self.transfer.upload(client, optimizers, lanes)
        self.barrier("pushed")
        self._script.held_back.clear()
        self.transfer.pull(lanes)
        for index in lanes:
            lane = self.lanes[index]
            lane.start([client.channels[index] for client in self.clients], lane.step)

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The servers' optimizer states, whole, by parameter name and state name: element-wise ones
        in the parameter's shape.
        """
        self.drain()
        return self.transfer.states()

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits at a barrier for every trainer that has not left.  Server 0 keeps the list.

        Args:
            text: sent to the other trainers at the barrier.

        Returns:
            The trainers' texts, by trainer; trainers that sent none are left out.

        Raises:
            PServerError: a server or another trainer is lost.
            RuntimeError: this trainer has left.
        """
        self.check()
        return self.joint.meet(name, text)


def _first(replies: Sequence[Reply], lanes: Sequence[Lane]) -> Reply | None:
    """The first lane's reply, preferring lanes whose servers merge all trainers' gradients."""
    together = compress(replies, (lane.kind.merges_gradients for lane in lanes))
    return next(chain(together, replies), None)


def _each(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()
