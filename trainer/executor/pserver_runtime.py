"""The kernels of the communication ops of a trainer program, over one communicator.

In sync mode ``send_barrier`` closes the step and ``fetch_barrier`` waits for the replies; an async
program has neither, and its first ``recv`` does both, as does the one ``send`` of a k-step program.
The lanes of a program share one step: each closes it at its own op, and it is finished when all
have closed it.  Whether that waits for a result depends on the lane: a queue has room.  Parameters
arrive in the module's own memory, so ``recv`` names what has arrived there, and ``concat`` finds
its slices in their places already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pserver.client.channel import Hparams
from pserver.errors import FingerprintMismatch
from pserver.service.server import serve_job
from trainer.collective.gradient_means import GradientMeans
from trainer.communicator.communicator import Communicator, SendOptions
from trainer.communicator.trace import TRACING, meeting_of
from trainer.environment.environment import Connection
from trainer.executor.loaded_program import CompressedGradients, StoredStates
from trainer.executor.table_handle import TableHandle
from trainer.gradients.averaging import AveragedStep, AveragedValues, dense_means_of
from transpiler.ir.graph import Op, Role, Storage, refs
from transpiler.ir.rules import ROW_RULES, Hparam, is_dense, rule_of
from transpiler.ir.scaling_ops import (
    CHECK,
    UPDATE,
    check_finite_and_unscale,
    update_loss_scaling,
)
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.lower import Kernel
from transpiler.plan.modes import Barrier, Mode
from transpiler.plan.plan import Deployment, Plan
from transpiler.program import Program
from transpiler.verify.evaluation import is_evaluation

if TYPE_CHECKING:
    from trainer.executor.feeds_ahead import FeedsAhead
    from trainer.executor.tables import ServedTables


# ---- checkpoint warning ----
#
# Programs do not save by themselves, whatever the environment asks for.


log = logging.getLogger(__name__)


def warn_of_checkpoint(connection: Connection) -> None:
    """Warns of this, once, where the environment asks for checkpoints."""
    if connection.checkpoint:
        _warn(connection.checkpoint)


@cache
def _warn(path: str) -> None:
    log.warning(
        "PSERVER_CHECKPOINT: programs do not save to %s by themselves: call Executor.save", path
    )


# ---- program averages ----
#
# Gradients of a program that trainers average among themselves, beside servers: kernels, and the
# values for a trainer that joins late.
#
# See [Note: a step of both] in trainer/gradients/averaging.py; and transpiler/passes/trainer.py for
# where the ops stand.


class _Ops:
    """The optimizer ops of a program that has no live optimizer."""

    def __init__(self, storage: Storage) -> None:
        self.state = StoredStates(storage)


class _Steps:
    """The steps of a program's values; see :class:`trainer.gradients.averaging.Stepper`.

    Args:
        storage: that holds them.

    Attributes:
        storage: as given.
        ahead: whether the averaged part of a step counts that the Executor has not counted yet.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self.ahead = storage, False

    @property
    def steps(self) -> int:
        """The steps of the job."""
        return self.storage.steps + self.ahead

    @steps.setter
    def steps(self, steps: int) -> None:
        self.storage.steps = steps

    @property
    def inner(self) -> torch.optim.Optimizer | _Ops:
        """The optimizer of the program's optimizer ops."""
        found = self.storage.optimizer
        return _Ops(self.storage) if found is None else found

    def trained(self) -> Mapping[str, Tensor]:
        """Every tensor that the program may train, by name."""
        return self.storage.tensors


class ProgramAverages:
    """The gradients of a job's programs that its trainers average among themselves.

    Args:
        plan: of the job, which leaves some to the trainers.
        storage: of the first program that runs.
        communicator: returns the connection, joined on first use.
    """

    def __init__(
        self, plan: Plan, storage: Storage, communicator: Callable[[], Communicator]
    ) -> None:
        self._plan, self._communicator = plan, communicator
        self._steps = _Steps(storage)

    def connect(self, communicator: Communicator) -> None:
        """Connects to the other trainers, after this one has joined the servers.

        Raises:
            PServerError: they have not arrived.
            ValueError: a grace period is set, and trainers cannot leave this job.
        """
        communicator.dense_allreduce = dense_means_of(communicator, [self._steps])

    def _move_to(self, storage: Storage) -> None:
        """Makes this the storage of the steps.  A loaded program has states beside its startup
        program's: they continue from those that this trainer received with its first values.
        """
        if storage is not self._steps.storage and storage.optimizer is None:
            given = AveragedValues(self._plan, [self._steps]).give()
            AveragedValues(self._plan, [_Steps(storage)]).load(given)
        self._steps.storage = storage

    def kernels_of(self, program: Program, committed: Callable[[], int]) -> Mapping[str, Kernel]:
        """The kernels of a program's ops.

        Args:
            committed: returns the number of trainers in the last step that servers have decided.
        """
        of = {gradient_of(op): parameter_of(op) for op in optimizer_ops(program.main)}
        if of and program.storage is not None:
            self._move_to(program.storage)

        def parameters_of(op: Op) -> list[Tensor]:
            tensors = self._steps.trained()
            return [tensors[of[gradient]] for gradient in op.outputs]

        def average(op: Op, x: Sequence[Tensor], **_: Any) -> Any:
            parameters, step = parameters_of(op), self._step
            gradients = dict(zip(parameters, x, strict=True))
            means = step.average(self._steps.trained(), gradients, overflow=False)
            if step.decided:
                return _results(x)  # the result of the wait counts
            return self._count(means, parameters)

        def wait(op: Op, x: Sequence[Tensor], **_: Any) -> Any:
            if not self._step.decided:
                return _results(x)
            return self._count(self._step.settle(committed()), parameters_of(op))

        return {"c_allreduce_avg": average, "c_sync_comm_stream": wait}

    @property
    def _step(self) -> AveragedStep:
        lanes = range(len(self._plan.lanes))
        return AveragedStep(lanes, self._communicator())

    def _count(self, means: GradientMeans, parameters: Sequence[Tensor]) -> Any:
        """Copies of means, which now count; another trainer may still have to receive them."""
        self._steps.ahead = True
        found = dict(zip(means.parameters, means.means, strict=True))
        return _results([_copied(found[parameter], parameter) for parameter in parameters])

    def counted(self) -> None:
        """Notes that the Executor has counted the step."""
        self._steps.ahead = False


def _results(tensors: Sequence[Tensor]) -> Any:
    """Results in the form that generated code takes."""
    return tensors[0] if len(tensors) == 1 else tensors


def _copied(mean: Tensor | None, parameter: Tensor) -> Tensor:
    """A mean on its parameter's device: a mean from another trainer is on the host."""
    assert mean is not None, "every trainer of a program has all gradients"
    return mean.to(parameter.device, parameter.dtype, copy=True)


# ---- server values ----
#
# The values of the pserver programs that an Executor serves: a job's first and last ones.


class ServerValues:
    """The values of pserver programs that hold none themselves.  One thread uses it.

    Args:
        scope: returns what startup programs have bound: slices by name.
        rows: and the first rows of tables.
    """

    def __init__(
        self,
        scope: Callable[[], Mapping[str, Tensor]],
        rows: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        self._scope, self._rows = scope, rows
        self._held: list[tuple[Program, Storage]] = []  # of programs that have served, or loaded

    def forget(self) -> None:
        """Drops all values after a startup program has run: servers begin anew."""
        self._held.clear()

    def of(self, program: Program) -> Storage:
        """The values that a program serves next: those of a loaded file, those of its last job, or
        those of its startup program.

        Raises:
            ValueError: there are none.
        """
        if program.storage is not None:
            return program.storage
        found = next((storage for known, storage in self._held if known == program), None)
        if found is None:
            wanted = program.main.variables_of(Role.PARAMETER, Role.BUFFER)
            bound = self._scope()
            missing = [each.name for each in wanted if each.name not in bound]
            if missing:
                raise ValueError(
                    f"the server holds no value for {missing[0]!r}; run the pserver's startup "
                    "program first"
                )
            values = {each.name: bound[each.name] for each in wanted}
            found = Storage(values, None, rows=self._rows)
            self._held.append((program, found))
        return found

    def save(self, path: str, program: Program) -> None:
        """Writes a pserver program with its values to one file.

        Raises:
            OSError: the file cannot be written.
            ValueError: there are no values.
        """
        replace(program, storage=self.of(program)).save(path)

    def load(self, path: str, program: Program) -> int:
        """Reads what :meth:`save` wrote: the program's next job continues from there.

        Returns:
            The step at which it was saved.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, holds no server's program, or that of another server.
            FingerprintMismatch: it is of another job; the message has the differences.
        """
        read = Program.load(path)
        mine, theirs = program.deployment, read.deployment
        assert mine is not None and mine.server_index is not None, "a pserver program"
        if theirs is None or theirs.server_index is None or read.storage is None:
            raise ValueError(f"{path}: expected a pserver program, got another")
        if theirs.server_index != mine.server_index:
            raise ValueError(
                f"{path}: expected the program of {_place(mine)}, got that of {_place(theirs)}"
            )
        if read.fingerprint() != program.fingerprint():
            raise FingerprintMismatch(
                f"{path} is of another job: expected the program of {_place(mine)}, but "
                + "; ".join(program.diff(read).splitlines()[:5])
            )
        if program.storage is None:
            self._held = [each for each in self._held if each[0] != program]
            self._held.append((program, read.storage))
        else:
            vars(program.storage).update(vars(read.storage))
        return read.storage.steps


def _place(deployment: Deployment) -> str:
    index = deployment.server_index
    assert index is not None, "a pserver program"
    return f"server {index}, {deployment.endpoints[index]}"


def serve(program: Program, values: ServerValues) -> None:
    """Runs a pserver program: serves one job until it is done.

    Args:
        values: of the servers of this process.

    Raises:
        ValueError: it is no pserver program, or there are no values for it.
        PServerError: the job has failed; this is the cause.
        SystemExit: SIGTERM or SIGINT arrived before the job was done, with status 143 or 130.
    """
    deployment, connection = program.deployment, Connection.from_environment()
    if deployment is None or deployment.server_index is None:
        raise ValueError(
            "expected a pserver program with its deployment, as get_pserver_programs gives it"
        )
    held = values.of(program)
    config = connection.server_config(deployment.endpoints[deployment.server_index])
    serve_job(config, replace(program, storage=held))


# ---- pserver runtime ----


class PServerRuntime:
    """A trainer's connection to its servers, for all programs of one deployment (startup and main).

    Args:
        program: the first of them to run.
        storage: the live tensors, and the optimizer whose schedule moves; it knows those of the
            programs that step the job's other optimizers.
    """

    def __init__(self, program: Program, storage: Storage) -> None:
        assert program.deployment is not None, "a single-node program has no runtime"
        self._deployment = program.deployment
        self._lanes = range(len(program.deployment.plan.lanes))
        self._storages = storage.together
        self._tables: ServedTables | None = None
        for each in self._storages:
            _note_what_servers_hold(program.deployment.plan, each)
        if program.deployment.plan.tables:
            # imports numba
            from trainer.executor.tables import ServedTables

            self._tables = ServedTables(program.deployment.plan, storage, lambda: self.communicator)
        rows = None if self._tables is None else self._tables.start_rows()
        self._tensors = {
            name: tensor for each in self._storages for name, tensor in each.tensors.items()
        }
        warn_of_checkpoint(Connection.from_environment())
        self._communicator = Communicator(
            program.deployment,
            self._tensors,
            [each.optimizer for each in self._storages if each.optimizer is not None],
            start_rows=rows,
            options=SendOptions(
                program.deployment.runtime_split_send_recv, program.deployment.soft_wait_ms
            ),
        )
        self._started = False
        plan = program.deployment.plan
        self._compressed = CompressedGradients(plan, self._live, lambda: self.communicator.step)
        self._averages: ProgramAverages | None = None
        if plan.averaged:  # those of one program
            self._averages = ProgramAverages(plan, storage, lambda: self.communicator)
        self._committed = 0  # trainers in the last step that all trainers were to take
        self._overflow = False  # whether this trainer's gradients of this step are not finite
        self._refused = False  # whether some trainer's of the last finished step were not
        # the values whose step is being finished, and their steps with it
        self._counts: tuple[Storage, int] | None = None

    def serves(self, deployment: Deployment) -> bool:
        """Whether another program belongs to the same job."""
        one, other = (
            replace(each, wait_port=True, optimizer=0) for each in (deployment, self._deployment)
        )
        return one == other

    def trains(self, storage: Storage | None) -> bool:
        """Whether this job trains these tensors."""
        return any(storage is each for each in self._storages)

    def kernels_of(self, program: Program) -> Mapping[str, Kernel]:
        """The kernels of one program's communication ops."""
        if program.storage is not None:
            self._share(program.storage)
        return {
            **({} if self._tables is None else self._tables.kernels(not is_evaluation(program))),
            **(
                {}
                if self._averages is None
                else self._averages.kernels_of(program, lambda: self._committed)
            ),
            "send": partial(self._send, program),
            "dgc": self._compressed.kernel,
            "send_barrier": partial(self._send_barrier, _lanes(program)),
            "recv": partial(self._recv, program),
            "fetch_barrier": self._flush
            if is_evaluation(program)
            else partial(self._fetch_barrier, program),
            "concat": self._concat,
            CHECK: self._check_finite,
            UPDATE: self._update_scale,
        }

    def _share(self, storage: Storage) -> None:
        """Makes a program that was loaded separately share the values of the first one, which the
        communicator sends and receives.
        """
        if self.trains(storage) or storage.optimizer is not None:
            return
        for name, tensor in storage.tensors.items():
            if name in self._tensors:
                tensor.data = self._tensors[name].data
        storage.steps = self._storages[0].steps
        self._storages = (*self._storages, storage)

    @property
    def communicator(self) -> Communicator:
        """The connection, joined on first use."""
        if not self._started:
            self._communicator.start()
            self._started = True
            if self._communicator.step:
                self._go_on()
            if self._averages is not None:
                self._averages.connect(self._communicator)
            if self._tables is not None:
                self._tables.connect(self._communicator)
            trainer = self._communicator.trainer_id
            TRACING.joined(trainer, partial(meeting_of, self._communicator))
        return self._communicator

    @property
    def tables(self) -> Mapping[str, TableHandle]:
        """The values of the tables' variables, by name."""
        return {} if self._tables is None else self._tables.handles

    def ahead(
        self, program: Program, tensors: Mapping[str, Tensor], device: torch.device
    ) -> FeedsAhead:
        """The coming feeds of a program, whose rows are looked up ahead.

        Args:
            tensors: behind its persistent variables, by name.
            device: where it runs.
        """
        from trainer.executor.feeds_ahead import FeedsAhead

        look_ahead = self.communicator.look_ahead
        assert look_ahead is not None and self._tables is not None, "the plan looks rows up ahead"
        return FeedsAhead(program, tensors, self._tables, look_ahead, device)

    def refresh(self) -> None:
        """Ends, before a program runs, a run that was interrupted; and takes the values that a
        receiving thread has fetched.

        Raises:
            RuntimeError: the run was interrupted where its step cannot go on.
        """
        if not self._started:
            return
        self.communicator.settle()
        self.communicator.withdraw(self._lanes)
        lanes = self._deployment.plan.lanes
        if any(lane.independent_recv_thread for lane in lanes):
            self.communicator.refresh()

    def tear(self) -> None:
        """Notes that the program steps by itself, or merges gradients: a run that is interrupted
        from here on cannot be repeated.
        """
        if self._started:
            self.communicator.tear()

    def steps(self, storage: Storage) -> int:
        """The steps of some values, with one that was interrupted while its answers were awaited:
        the servers have it.
        """
        counts = self._counts
        return counts[1] if counts is not None and counts[0] is storage else storage.steps

    def counted(self) -> None:
        """Notes that the Executor has counted a step, or that a run makes none."""
        self._counts = None
        if self._started:
            self.communicator.counted()

    def end_step(self) -> None:
        """Leaves the job, at the end of a step, after SIGTERM, if there is a grace period.

        Raises:
            SystemExit: it has left.
        """
        if self._averages is not None:
            self._averages.counted()
        self.communicator.end_if_asked()

    def flush(self) -> None:
        """Waits until everything sent has been applied, and receives the servers' parameters."""
        if self._started:
            self.communicator.flush()

    def forget(self) -> None:
        """Drops copies of rows, and residuals: parameters and rows have been replaced."""
        self._compressed.forget()
        if self._started and self._tables is not None:
            self._tables.invalidate_caches()
            if (look_ahead := self._communicator.look_ahead) is not None:
                look_ahead.withdraw()

    def finish_row_lanes(self) -> None:
        """Ends, after a program has run, the step of every lane that has sent rows and receives no
        parameters: it has no ``recv`` that would end the step.
        """
        if self._started:
            self._close_received(self._lanes)
            if any(map(self.communicator.is_closed, self._lanes)):
                self._finish(self._storages[0])

    def _go_on(self) -> None:
        """Takes the step numbers of servers that continue an earlier job."""
        for number, storage in enumerate(self._storages):
            lanes = self._communicator.plan.lanes_of(number)
            steps = [self._communicator.lanes[lane].step for lane in lanes]
            storage.steps = max(steps, default=0)
            _mark_stepped(storage)

    def _pull_weights(self) -> None:
        """Copies the servers' rows back into the weights that they came from."""
        if self._tables is not None:
            self._tables.pull_weights(self._communicator)

    def close(self, failure: str = "") -> None:
        """Leaves the servers: when every trainer of the job has finished, with the servers' rows in
        the weights that they came from; or at once with a reason.
        """
        if self._started:
            TRACING.finish(failed=bool(failure))
        if self._started and failure:
            self._communicator.leave(failure)
        elif self._started:
            self._communicator.finish(self._pull_weights)

    def _hparams(self) -> Hparams:
        """The present hyper-parameters: the live optimizer's, or the plan's in a process that has
        none.
        """
        groups = self._deployment.plan.groups
        hparams: dict[int, Mapping[str, Hparam]] = {
            index: rule.hparams for index, rule in enumerate(groups)
        }
        for index, (optimizer, group) in enumerate(self._live_groups()):
            hparams[index] = _present(optimizer, groups[index].type, group)
        hparams = self._compressed.hparams(hparams)
        return hparams if self._tables is None else hparams | self._tables.hparams()

    def _live_groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [
            (each.optimizer, group)
            for each in self._storages
            if each.optimizer is not None
            for group in each.optimizer.param_groups
        ]

    def _live(self) -> Mapping[int, Mapping[str, Any]]:
        """The groups of the live optimizers, by number; none in a process that has none."""
        return {index: group for index, (_, group) in enumerate(self._live_groups())}

    def _send(self, program: Program, op: Op, x: Sequence[Any], **_: Any) -> tuple[()]:
        plan, first = self._deployment.plan, next(refs(op.arguments["x"]))
        if self._overflow and "delta" not in op.arguments:
            return ()  # no trainer takes this step
        if self._tables is not None and "table" in op.arguments:
            self._tables.send(str(op.arguments["table"]), x)
            return ()
        if "delta" in op.arguments:  # the optimizer ops before it have stepped
            held = plan.table(first) if first in self.tables else plan.placement(first)
            self._close([held.lane])
            if all(map(self.communicator.is_closed, _lanes(program))):
                self._finish(program.storage)  # nothing is received that would end the step
            return ()
        placement = plan.placement(program.main.variables[first].of or first)
        if len(x) < len(placement.slices):  # split here, at run time
            self.communicator.send_whole({placement.name: x[0]})
        else:
            for slice_, gradient in zip(placement.slices, x, strict=True):
                self.communicator.send(slice_.name, gradient)
        return ()

    def _kind(self, lane: int) -> Mode:
        return self._deployment.plan.lanes[lane].kind

    def _close(self, lanes: Iterable[int]) -> None:
        """Closes the step in these lanes."""
        if chosen := list(lanes):
            self.communicator.close_step(self._hparams(), self._overflow, chosen)

    def _close_received(self, lanes: Iterable[int]) -> None:
        """Closes the step in those lanes that have sent something and that end at a recv."""
        self._close(
            index
            for index in lanes
            if self._kind(index).ends_at_recv and self.communicator.has_sent(index)
        )

    def _send_barrier(self, lanes: Sequence[int], op: Op, **_: Any) -> tuple[()]:
        barrier = Barrier.LOCAL if op.arguments.get("half_async") else Barrier.ALL
        self._close(index for index in lanes if self._kind(index).send_barrier is barrier)
        return ()

    def _recv(self, program: Program, op: Op, param: str, **_: Any) -> Any:
        placement = self._deployment.plan.placement(param)
        if self._kind(placement.lane).ends_at_recv:
            self._close_received(_lanes(program))
            if self.communicator.is_closed(placement.lane):
                self._finish(program.storage)
        whole = self._tensors[param]
        if len(op.outputs) == 1:
            return [whole]
        flat = whole.detach().reshape(-1)
        return [flat[slice_.begin : slice_.end].view(slice_.shape) for slice_ in placement.slices]

    def _fetch_barrier(self, program: Program, op: Op, **_: Any) -> tuple[()]:
        self._close_received(_lanes(program))  # of rows alone: it has no recv, and the step is one
        self._finish(program.storage)
        return ()

    def _flush(self, op: Op, **_: Any) -> tuple[()]:
        """Receives the servers' values before an evaluation, in modes that do not wait for them."""
        self.communicator.flush()
        return ()

    def _finish(self, storage: Storage | None) -> None:
        """Finishes the step of a program with this storage."""
        again = None
        ends = any(map(self.communicator.is_closed, self._lanes))
        if ends and storage is not None and self._averages is None:
            self._counts = storage, storage.steps + 1
            again = partial(self._finish_again, storage, self._counts[1])
        reply = self.communicator.finish_step(again)
        if reply is not None:
            self._refused, self._committed = reply.overflow, reply.committed
            self._compressed.end(applied=not reply.overflow)
            _mark_stepped(storage)

    def _finish_again(self, storage: Storage, steps: int) -> None:
        """Finishes a step that was interrupted meanwhile, and counts it."""
        self._finish(storage)
        storage.steps = steps
        self.counted()

    def _check_finite(self, op: Op, **arguments: Any) -> Any:
        results = check_finite_and_unscale(op, **arguments)
        self._overflow, self._refused = bool(results[-1]), False
        return results

    def _update_scale(self, op: Op, found_infinite: torch.Tensor, **arguments: Any) -> Any:
        """Updates the loss scale by the overflows of all trainers, where they step together."""
        return update_loss_scaling(op, found_infinite | self._refused, **arguments)

    def _concat(self, op: Op, x: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return self._tensors[op.outputs[0]]


def _mark_stepped(storage: Storage | None) -> None:
    optimizer = None if storage is None else storage.optimizer
    if optimizer is not None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark, for schedulers


def _lanes(program: Program) -> tuple[int, ...]:
    """The lanes that a trainer's program steps."""
    assert program.deployment is not None, "a trainer's program"
    return program.deployment.plan.lanes_of(program.deployment.optimizer)


def _present(
    optimizer: torch.optim.Optimizer, op_type: str, group: Mapping[str, Any]
) -> Mapping[str, Hparam]:
    """The present hyper-parameters of a parameter group."""
    return (
        rule_of(optimizer, group).hparams
        if is_dense(op_type)
        else {name: group[name] for name in ROW_RULES[op_type].hparams}
    )


def _note_what_servers_hold(plan: Plan, storage: Storage) -> None:
    """Notes the optimizer states and rows that only servers hold, so that no file claims them.

    Raises:
        ValueError: a loaded program has states, which would be lost on the way to the servers.
    """
    for placement in plan.placements:
        if placement.group is None or plan.lane_of(placement).kind.steps_on_trainer:
            continue
        if storage.optimizer is None and storage.states.get(placement.name):
            raise ValueError(
                f"{placement.name!r} was loaded with optimizer state, and servers begin with that "
                "of a live optimizer only: train the loaded program in this process, or use "
                "fleet.save and fleet.load"
            )
        storage.unsaved[placement.name] = "its optimizer state is on the servers"
    for table in plan.tables:
        storage.unsaved[table.name] = "its rows are on the servers"
