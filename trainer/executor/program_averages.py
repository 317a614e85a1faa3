"""Gradients of a program that trainers average among themselves, beside servers: kernels, and what
a process that comes later gets.

See [Note: a step of both] in trainer/gradients/averaging.py; and
transpiler/passes/trainer.py for where the ops stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.collective.gradient_means import GradientMeans
from trainer.communicator.communicator import Communicator
from trainer.executor.ops_optimizer import StoredStates
from trainer.gradients.averaging import AveragedStep, AveragedValues, dense_means_of
from transpiler.ir.graph import Op, Storage
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.lower import Kernel
from transpiler.plan.plan import Plan
from transpiler.program import Program


class _Ops:
    """The optimizer ops of a program that has no live optimizer."""

    def __init__(self, storage: Storage) -> None:
        self.state = StoredStates(storage)


class _Steps:
    """How far a program's values are; see :class:`trainer.gradients.averaging.Stepper`.

    Args:
        storage: that holds them.

    Attributes:
        storage: as given.
        ahead: the averaged part of a step counts that the Executor has not counted yet.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self.ahead = storage, False

    @property
    def steps(self) -> int:
        """Taken by the job."""
        return self.storage.steps + self.ahead

    @steps.setter
    def steps(self, steps: int) -> None:
        self.storage.steps = steps

    @property
    def inner(self) -> torch.optim.Optimizer | _Ops:
        """What runs the optimizer ops."""
        found = self.storage.optimizer
        return _Ops(self.storage) if found is None else found

    def trained(self) -> Mapping[str, Tensor]:
        """Every tensor that the program may train, by name."""
        return self.storage.tensors


class ProgramAverages:
    """What the trainers of a job average of its programs' gradients.

    Args:
        plan: of the job, which leaves some to the trainers.
        storage: of the first program that runs.
        communicator: gives the connection, which is brought up when it is first asked for.
    """

    def __init__(
        self, plan: Plan, storage: Storage, communicator: Callable[[], Communicator]
    ) -> None:
        self._plan, self._communicator = plan, communicator
        self._steps = _Steps(storage)

    def connect(self, communicator: Communicator) -> None:
        """Meets the other trainers, once this one has joined the servers.

        Raises:
            PServerError: they have not come.
            ValueError: trainers are to leave when they are preempted, and cannot.
        """
        communicator.dense_allreduce = dense_means_of(communicator, [self._steps])

    def _move_to(self, storage: Storage) -> None:
        """A program that was loaded keeps states beside its startup program's: they go on from
        those that came with this trainer's first values.
        """
        if storage is not self._steps.storage and storage.optimizer is None:
            given = AveragedValues(self._plan, [self._steps]).give()
            AveragedValues(self._plan, [_Steps(storage)]).take(given)
        self._steps.storage = storage

    def kernels_of(self, program: Program, committed: Callable[[], int]) -> Mapping[str, Kernel]:
        """The kernels of a program's ops.

        Args:
            committed: gives how many trainers are in the step that servers have decided last.
        """
        of = {gradient_of(op): parameter_of(op) for op in optimizer_ops(program.main)}
        if of and program.storage is not None:
            self._move_to(program.storage)

        def parameters_of(op: Op) -> list[Tensor]:
            tensors = self._steps.trained()
            return [tensors[of[gradient]] for gradient in op.outputs]

        def average(op: Op, x: Sequence[Tensor], **_: Any) -> Any:
            parameters, step = parameters_of(op), self._step
            means = step.average(dict(zip(parameters, x, strict=True)), overflow=False)
            if step.decided:
                return _results(x)  # what the wait gives counts
            return self._count(means, parameters)

        def wait(op: Op, x: Sequence[Tensor], **_: Any) -> Any:
            if not self._step.decided:
                return _results(x)
            return self._count(self._step.settle(committed()), parameters_of(op))

        return {"c_allreduce_avg": average, "c_sync_comm_stream": wait}

    @property
    def _step(self) -> AveragedStep:
        lanes = range(len(self._plan.lanes))
        return AveragedStep(self._steps.trained, lanes, self._communicator())

    def _count(self, means: GradientMeans, parameters: Sequence[Tensor]) -> Any:
        """These means count: copies of them, as another trainer may have to be told them yet."""
        self._steps.ahead = True
        found = dict(zip(means.parameters, means.means, strict=True))
        return _results([_copied(found[parameter], parameter) for parameter in parameters])

    def counted(self) -> None:
        """The Executor has counted the step."""
        self._steps.ahead = False


def _results(tensors: Sequence[Tensor]) -> Any:
    """As generated code takes results."""
    return tensors[0] if len(tensors) == 1 else tensors


def _copied(mean: Tensor | None, parameter: Tensor) -> Tensor:
    """A mean where its parameter is: one that another trainer has told is on the host."""
    assert mean is not None, "every trainer of a program has all gradients"
    return mean.to(parameter.device, parameter.dtype, copy=True)
