"""A trainer's side of a job: its connections to all servers of the plan, and one sender for each
lane.

The eager path (``fleet``) and the program path (``Executor``) both end here.  A step is::

    send(slice, gradient)  ...         in any order: tensors leave while the script goes on
    close_step(hparams)                the step is complete
    finish_step()                      waits for what the lanes wait for, takes in what has arrived
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING

import torch

from pserver.client.channel import Hparams
from pserver.client.client import Client
from pserver.client.replies import Joined, Reply
from pserver.table.gradient import RowGradient
from pserver.telemetry.memory import keep_memory, trim_memory
from pserver.transport.memory import totals
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.elastic_means import DenseSteps
from trainer.communicator.connections import begun_at, channels_of, clients_of
from trainer.communicator.counters import counters
from trainer.communicator.departure import Departure, spelled
from trainer.communicator.device_copy import is_on_gpu
from trainer.communicator.initial_values import take_over
from trainer.communicator.joint_calls import JointCalls
from trainer.communicator.kstep_senders import drain_for_others, window_of
from trainer.communicator.options import SendOptions
from trainer.communicator.parameter_slices import ParameterSlices, check_gradient
from trainer.communicator.position import Position
from trainer.communicator.roll import roll_of
from trainer.communicator.senders import buffers_of, senders_of, written_names
from trainer.communicator.state_transfer import StateTransfer
from trainer.communicator.step_probe import probe_of, show_if_only
from trainer.communicator.table_requests import lookups_of, sources_of, table_destination
from trainer.communicator.termination import termination
from trainer.communicator.trainer_metrics import TrainerMetrics
from trainer.communicator.written_values import WrittenValues
from trainer.environment.environment import Connection
from transpiler.distribute import pserver_program
from transpiler.plan.plan import Deployment, Lane, Placement
from transpiler.program import Program

if TYPE_CHECKING:
    from trainer.embedding.rows import RowSource

log = logging.getLogger(__name__)

Drained = Callable[[], None] | None  # called when the servers have all that a trainer sends


class Communicator:
    """One trainer's part in a job.

    The script's thread calls it.

    Args:
        deployment: the plan, the endpoints and this trainer's number.
        tensors: every placed variable by name, the live ones: parameters arrive in them.  Any
            device, any strides.
        optimizers: whose states, where they have some already, are the servers' initial ones.
        connection: timeouts, and which transports to offer.
        start_rows: by table, ids (int64 [n]) and values ([n, dim]) that servers begin with.
        options: of this trainer alone.
        incarnation: with which this trainer has announced itself; "" where it has not.

    Attributes:
        plan: of the job.
        step: steps that the script has closed, those included that the servers had when it joined.
        lanes: the senders, by lane.
        consumed: samples that the script trains on; the first lane's messages say it.
        clients: the connections, by server.
        lookups: requests for rows, where the plan has tables.
        roll: which trainers are still there.
        written: what the script has written into parameters.
        buffers: of models, which travel with steps.
        transfer: of values and states, outside of steps.
        dense_allreduce: the mean of those gradients that trainers share without servers, if any.
        group: of the trainers that are there, once they have made values together.
        page: its metrics for Prometheus.
        position: of the script, for trainers that join late.
        joint: the calls that all trainers make together.
        hand_over: called before it leaves because it was preempted: gives back what another trainer
            has to have then.
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
        held_back: set[str] = set()  # variables that nothing lands on
        self._all = ParameterSlices(list(self.plan.placements), tensors, held_back)
        self.roll = roll_of(self.plan, self.trainer_id, connection)
        self.buffers = buffers_of(self.plan, tensors, self.roll)
        self.transfer = StateTransfer(
            self.plan, self._programs, self._all, tensors, optimizers, self.buffers
        )
        options, buffers = self._options, self.buffers
        self.lanes = senders_of(self.plan, tensors, options, self.roll, held_back, buffers)
        self.consumed = self.lanes[0].consumed
        names = written_names(self.plan, tensors)
        self.written = WrittenValues(self.lanes, names, tensors, held_back, self.trainer_id)
        self._open: set[int] = set()  # lanes that have sent something of a step that is not closed
        self._closed: set[int] = set()  # lanes whose step is closed and not finished
        self._left, self._asked_at = False, 0
        self.hand_over: Callable[[], None] = lambda: None
        self._start_rows = dict(start_rows or {})
        self.lookups = lookups_of(self.plan)
        self._make_clients(deployment, connection, incarnation or secrets.token_hex(8))

    def _make_clients(
        self, deployment: Deployment, connection: Connection, incarnation: str
    ) -> None:
        """The connections, and what needs them."""
        self.page = TrainerMetrics(deployment, connection, self.lanes, incarnation)
        self.clients = clients_of(
            deployment,
            connection,
            [self.transfer.destination(lane) for lane in self.lanes],
            partial(table_destination, self.lookups),
            incarnation,
        )
        self.clients[0].learn = self.roll.learn
        self.position = Position(self.clients[0], self.roll, self.plan, self.lanes, self._closed)
        self.joint = JointCalls(self.clients[0], self.position, self.check)
        self._departure = Departure(self.clients, self.trainer_id, self.leave)
        self.transfer.start(self.clients, self.lanes[0])
        if self.lookups is not None:
            self.lookups.start(self.clients)
        self._probe = probe_of(connection, self.plan, self.clients, self.lanes, self.lookups)
        self._sources = sources_of(
            self.plan, self.lookups, self.lanes, self.clients, self.roll, self.drain
        )

    # ---- the life of a job ----

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Joins every server, installs those that are empty (trainer 0), and receives the
        parameters.

        Args:
            meanwhile: called while it waits for a server; raises what should end the wait.

        Raises:
            PServerError: a server cannot be reached or says no; then no server keeps this trainer.
            SystemExit: only the plan was asked for; it has been printed.
        """
        show_if_only(self.plan, self._connection)
        keep_memory()
        self.page.open(self.clients)
        self._departure.expect()
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
            self.written.start()
            self.page.joined(joined[0].run)
            self._departure.allow(self._connection.grace_seconds)
        except BaseException as error:
            self.leave(spelled(error))
            raise
        trim_memory()

    def _join(self, client: Client, program: Program, meanwhile: Callable[[], None]) -> Joined:
        # the job may end at one server while this trainer waits to be let in by another
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

        See [Note: a job is done when all say so] in departure.py.

        Args:
            drained: called when the servers have all that this trainer sends.

        Raises:
            PServerError: the job has failed.
        """
        if not self._left:
            self._end("", drained, returns=False, preempted=False)

    def leave(self, failure: str = "", returns: bool = False) -> None:
        """Drains the lanes and leaves every server, without waiting for the other trainers; or
        tells the servers why this trainer cannot go on.

        A second call does nothing.

        Args:
            returns: this process joins again, with another plan: the servers wait for it.

        Raises:
            PServerError: without a ``failure``: the job has failed.
        """
        if not self._left:
            self._end(failure, None, returns, preempted=False)

    def end_if_asked(self) -> None:
        """At the end of a step: where SIGTERM has come, and there is a grace period, leaves the
        servers and ends the process.  Gradients that are being added up are not left so.  See
        [Note: preempted] in departure.py.

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
        if not failure:
            try:
                with self.written.landing():
                    self._departure.drain(self.lanes)
                if drained is not None:
                    self.transfer.upload_buffers()
                    with self.position.waiting():
                        preempted = not self._departure.agree(self.dense_allreduce, drained)
                    self.transfer.pull_buffers()  # of the others' last steps
            except BaseException as error:
                ended, failure = error, spelled(error)
        self._left = True
        self._departure.forget()
        told = self._departure.leave(self.lanes, failure, returns, self.step if preempted else None)
        self.page.close()
        for each in (self.group, self.dense_allreduce):
            if each is not None:
                each.close(failure)
        if (cause := ended or (None if failure else told)) is not None:
            raise cause
        if preempted:
            self._departure.end(self.step)

    @property
    def transport(self) -> str:
        """The transports in use: "tcp", or "tcp, grpc" where servers differ."""
        return ", ".join(sorted({client.transport for client in self.clients}))

    def metrics(self) -> dict[str, float]:
        """Counters since the start; see :mod:`trainer.communicator.counters`."""
        total = counters(self.step, self.clients, self.lanes)
        return total if self.lookups is None else total | self.lookups.metrics()

    def variable_bytes(self) -> dict[str, dict[str, int]]:
        """Payload "bytes_in" and "bytes_out" of each variable since the start, as they travelled:
        after compression.
        """
        return totals((client.traffic for client in self.clients), self.plan)

    # ---- steps ----

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Queues the gradient of one slice.

        Args:
            name: of the slice.
            gradient: of as many elements as the slice, on any device; left unchanged by the caller
                until ``finish_step`` returns.

        Raises:
            ValueError: it has another dtype or number of elements than its slice, or is sparse.
        """
        placement, slice_ = self._all.owner(name)
        self._send(placement, name, gradient, slice_.shape)

    def _send(
        self, placement: Placement, name: str, gradient: torch.Tensor, shape: tuple[int, ...]
    ) -> None:
        """One slice, or a whole variable."""
        check_gradient(placement, name, gradient, math.prod(shape))
        self.check()
        self.written.begin(placement.lane)
        self._open.add(placement.lane)
        here = gradient.detach() if is_on_gpu(gradient) else gradient.detach().to("cpu")
        self.lanes[placement.lane].send(name, here.contiguous().view(shape))

    def send_whole(self, name: str, gradient: torch.Tensor) -> None:
        """Queues the gradient of a parameter: slice by slice, or whole where the lane's sending
        thread cuts it.
        """
        placement = self._all.placement(name)
        if gradient.is_sparse or (
            self._options.runtime_split_send_recv and self.plan.lane_of(placement).kind.queues
        ):
            self._send(placement, name, gradient, placement.shape)
            return
        for slice_, part in self._all.cut({name: gradient.detach().contiguous()}).items():
            self.send(slice_, part)

    def rows_of(self, table: str) -> RowSource:
        """The source that the embeddings of a table pull from: the servers; in a k-step lane the
        rows that this trainer steps.
        """
        assert self._sources is not None, "the plan has this table"
        return self._sources.source(table)

    def send_rows(self, table: str, gradient: RowGradient) -> None:
        """Queues the gradient of a table's rows; the caller does not write to its tensors again."""
        self.check()
        lane = self.plan.table(table).lane
        self.written.begin(lane)
        self._open.add(lane)
        self.lanes[lane].send_rows(table, gradient)

    def commit(self, hparams: Hparams, overflow: bool = False) -> Reply:
        """Closes the step in every lane and finishes it: :meth:`close_step`, then
        :meth:`finish_step`.
        """
        self.close_step(hparams, overflow)
        reply = self.finish_step()
        assert reply is not None, "every lane is closed"
        return reply

    def close_step(
        self, hparams: Hparams, overflow: bool = False, lanes: Sequence[int] | None = None
    ) -> None:
        """Completes the step; parameters that nothing was sent for have no gradient in it.

        Args:
            hparams: the present hyper-parameters of every group.
            overflow: a gradient was not finite: no trainer takes this step.
            lanes: only these; a program closes its lanes one after another.
        """
        self.check()
        self.position.answer()
        chosen = list(range(len(self.lanes))) if lanes is None else list(lanes)
        assert not self._closed.intersection(chosen), "one step at a time"
        if not self._closed:
            self.step += 1
            for client in self.clients:
                client.activity = f"step {self.step}"
        for index in chosen:
            self.written.begin(index)
        self._closed.update(chosen)
        self._open.difference_update(chosen)
        self.buffers.capture(chosen)
        for index in chosen:
            self.lanes[index].close(hparams, overflow)
            self.page.steps.closed(index)

    def finish_step(self) -> Reply | None:
        """Waits for what the closed lanes wait for, and takes in what has arrived.

        Returns:
            The reply of the first lane's first server, of those whose steps need all trainers if
            there is one; None if no lane's step is closed.

        Raises:
            PServerError: a server or another trainer is lost, or refused the step.
            SystemExit: this was the last step of a probe.
        """
        closed = sorted(self._closed)
        with self._probe, self.position.waiting():
            replies = [self.page.steps.blocked(each, self.lanes[each].finish) for each in closed]
        self._closed.clear()
        for index in closed:
            self.written.landed(index)
        self.buffers.land()
        if self.step & (self.step - 1) == 0:
            trim_memory()
        return _first(replies, [self.plan.lanes[each] for each in closed])

    @property
    def window(self) -> int:
        """Steps that the script has ended since the last exchange that all trainers make together:
        one who joins takes them, too, before the next one.
        """
        return max(0, window_of(self.lanes) - bool(self._closed))

    def has_sent(self, lane: int) -> bool:
        """Whether gradients of a step that is not closed yet have been sent in a lane."""
        return lane in self._open

    def is_closed(self, lane: int) -> bool:
        """Whether a lane's step has been closed and not yet finished."""
        return lane in self._closed

    def check(self) -> None:
        """Raises what ended the job, if something did.

        Raises:
            RuntimeError: this trainer has left.
        """
        if self._left:
            said = "this trainer has left the job: no step after fleet.finish() or Executor.close()"
            raise RuntimeError(said)
        for client in self.clients:
            client.check()

    def refresh(self) -> None:
        """Takes in parameters that have arrived without a step: at the entry of a forward."""
        for index, lane in enumerate(self.lanes):
            with self.written.landing(index):
                lane.refresh()
        self.buffers.land(between_steps=True)

    def drain(self) -> None:
        """Waits until everything that this trainer has sent is answered; nothing lands on what the
        script has written.

        Raises:
            RuntimeError: this trainer has left.
        """
        self.check()
        with self.written.landing():
            for lane in self.lanes:
                lane.drain()
        self.buffers.land(between_steps=True)

    # ---- values and states ----

    def flush(self) -> None:
        """Waits until everything sent has been applied, and receives what others have sent until
        now: before a model is evaluated or saved.

        In sync mode that is so after every step.  In the k-step modes the trainer's own parameters
        stay its own: :meth:`served` has the servers'.
        """
        queues = {index for index, lane in enumerate(self.plan.lanes) if lane.kind.queues}
        self.drain()
        with self.written.landing(pulled=True):
            self.transfer.pull_lanes(queues)

    def served(self) -> dict[str, torch.Tensor]:
        """The servers' values of those parameters that this trainer steps by itself, and of the
        buffers that travel with them, whole, by name; its own stay as they are.  Warns of those
        that the script has written since its last step: the servers have not, or only in part,
        what it wrote.
        """
        return self.transfer.served(self.lanes)

    def pull(self) -> None:
        """Receives every placed variable as the servers hold it: parameters, and what they never
        update.  Parameters that the trainers average stay as they are here.
        """
        self.transfer.pull_served()
        self.written.start()

    def push(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Trainer 0's values and optimizer states become the servers'; every trainer calls this and
        has the values afterwards.  Where trainer 0 was preempted, those of the least one left do.

        Args:
            optimizers: whose states; None: of all of them.
        """
        drain_for_others(self.lanes, self.drain)
        self.barrier("push")
        if self.roll.is_first:
            for client in self.clients:
                self.transfer.upload(client, optimizers)
        self.barrier("pushed")
        self.written.release()
        self.transfer.pull()
        for index, lane in enumerate(self.lanes):
            lane.start([client.channels[index] for client in self.clients], lane.step)
        self.written.start()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The servers' optimizer states, whole, by parameter name and state name: element-wise ones
        in the parameter's shape.
        """
        self.drain()
        return self.transfer.states()

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits for every trainer that has not left.  Server 0 keeps the list.

        Args:
            text: what this trainer tells the others there.

        Returns:
            What trainers have told, by trainer; those that told nothing are not in it.
        """
        return self.joint.meet(name, text)


def _first(replies: Sequence[Reply], lanes: Sequence[Lane]) -> Reply | None:
    """The first lane's reply, of those whose steps need all trainers if there is one."""
    together = compress(replies, (lane.kind.merges_gradients for lane in lanes))
    return next(chain(together, replies), None)


def _each(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()
