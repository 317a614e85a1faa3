"""A program's training state, and its checkpoints: those of ``fleet``, which either side reads.

A trainer's program asks its servers for states and rows; other programs have them in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pserver.checkpoint.checkpoint import Claims
from trainer.checkpoint import resume
from trainer.checkpoint.resume import jointly
from trainer.executor.loaded_program import OpsOptimizer
from transpiler.ir.graph import Storage
from transpiler.ir.table_ops import is_sparse
from transpiler.optim.dgc import FollowingOptimizer
from transpiler.program import Program

if TYPE_CHECKING:
    from trainer.checkpoint.tables import TableStore
    from trainer.communicator.communicator import Communicator
    from trainer.modules.loss_scaling import LossScaling


class ProgramTraining:
    """A program's training state: its tensors, its optimizer's groups and states, its tables.

    Args:
        program: single-node, or a trainer's.
        communicator: to the servers; None where the program has none.

    Attributes:
        names, param_groups, state: see :class:`~trainer.checkpoint.resume.Trained`.
        sharded: whether this process has the states of some parameters only.

    Raises:
        ValueError: the process holds no values for the program, or a table or a state that it could
            not write.
    """

    def __init__(self, program: Program, communicator: Communicator | None) -> None:
        storage = program.storage
        if storage is None:
            raise ValueError("expected a program that holds values, got one without")
        lost = [name for name, why in storage.unsaved.items() if why.endswith("on the servers")]
        if lost and communicator is None:
            raise ValueError(
                f"{lost[0]!r}: {storage.unsaved[lost[0]]}, and this Executor does not run their "
                "job: save before it is closed"
            )
        self._storage: Storage = storage
        self._optimizer: torch.optim.Optimizer | OpsOptimizer = (
            OpsOptimizer(program) if storage.optimizer is None else storage.optimizer
        )
        self._communicator = communicator
        plan = None if program.deployment is None else program.deployment.plan
        shared = None if plan is None else plan.collective
        self.sharded = shared is not None and shared.sharded
        self.loss_scaling: LossScaling | None = None  # a program has its scale in a variable
        self.tables = self._store()
        self.names: Mapping[Tensor, str] = {
            tensor: name for name, tensor in storage.tensors.items()
        }
        self.param_groups = self._optimizer.param_groups
        self.state: Any = self._optimizer.state

    @property
    def first(self) -> bool:
        """Whether this trainer writes, and sends the servers what it has read."""
        return self._communicator is None or self._communicator.live.is_leader

    @property
    def together(self) -> tuple[Storage, ...]:
        """The storages of the programs that were transpiled together, including this one's."""
        return self._storage.together

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by name, the live ones."""
        return self._storage.tensors

    @property
    def steps(self) -> int:
        """The steps of the job, including those before a loaded checkpoint."""
        return self._storage.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._storage.steps = steps

    def _store(self) -> TableStore | None:
        """The rows of the program's tables, on servers or here; None where it has none."""
        if not self._storage.tables:
            return None
        from trainer.checkpoint.tables import store_of  # imports numba
        from trainer.communicator.tables import Tables

        if self._communicator is not None:
            return store_of(None, self._communicator)
        found = [(name, each) for name, held in self._storage.tables.items() for each in held]
        for name, module in found:
            if is_sparse(module):
                raise ValueError(
                    f"table {name!r}: expected a DistributedEmbedding, got nn.Embedding("
                    "sparse=True) in a job without servers, whose rows no checkpoint holds"
                )
        return store_of(Tables(found), None)

    def state_dict(self) -> dict[str, Any]:
        """The groups and states, whole and current: the servers send theirs."""
        held = {} if self._communicator is None else self._communicator.states()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            states = held.get(self.names.get(parameter, ""))  # not those of other optimizers
            if states is not None:
                self.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in states.items()
                }
        return self._optimizer.state_dict()

    def restart(self) -> None:
        """Continues from a loaded checkpoint: drops merged gradients, and, where a strategy has
        replaced the script's optimizer, gives the script's groups the loaded hyper-parameters, from
        which its scheduler continues.
        """
        self._storage.summed = 0
        if isinstance(self._optimizer, FollowingOptimizer):
            self._optimizer.lead()

    def check(self, groups: Sequence[Mapping[str, Any]], scheduler: Any | None) -> None:
        """Checks that the program can take a checkpoint's groups, and a scheduler's state.

        Raises:
            ValueError: it was loaded, so that its ops hold other hyper-parameters, or no schedule.
        """
        if isinstance(self._optimizer, OpsOptimizer):
            if scheduler is not None:
                raise ValueError(
                    "scheduler: expected none for a loaded program, whose hyper-parameters are "
                    "those of its ops"
                )
            self._optimizer.check(groups)

    def served(self) -> Mapping[str, Tensor]:
        """The servers' values of parameters that trainers step by themselves, by name."""
        return {} if self._communicator is None else self._communicator.served()

    def flush(self) -> None:
        """Waits until everything sent has been applied."""
        if self._communicator is not None:
            self._communicator.flush()

    def push(self) -> None:
        """Sends what trainer 0 has read to the servers, and from there to every trainer."""
        if self._communicator is not None:
            self._communicator.push()

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits for every trainer that has not left; returns the text of each, by trainer."""
        if self._communicator is not None:
            return self._communicator.barrier(name, text)
        return {0: text} if text else {}


def trainings_of(
    programs: Sequence[Program], communicators: Sequence[Communicator | None]
) -> list[ProgramTraining]:
    """The training states of these programs, each of which steps one optimizer of a job.

    Raises:
        ValueError: as :class:`ProgramTraining`; or the programs are not all that were transpiled
            together, in their order.
    """
    found = [
        ProgramTraining(program, communicator)
        for program, communicator in zip(programs, communicators, strict=True)
    ]
    storages = [program.storage for program in programs]
    together = list(found[0].together)
    if len(storages) != len(together) or any(
        one is not other for one, other in zip(storages, together, strict=True)
    ):
        raise ValueError(
            f"expected the programs of all {len(together)} optimizers of the job, as a list in the "
            f"order in which they were transpiled, got {len(programs)} of them or another order"
        )
    return found


def save(
    trainings: Sequence[ProgramTraining], path: str, scheduler: Any | None, claims: Claims
) -> None:
    """Writes a checkpoint; every trainer calls this.  See :meth:`Executor.save`."""
    first = trainings[0]
    if first.sharded:
        raise ValueError(
            "Executor.save: expected an optimizer whose whole state this process holds, got one "
            "with sharding=True, whose state is divided over the trainers: save the parameters "
            "alone, which every trainer has, as by torch.save of the model's state_dict"
        )
    first.flush()
    with jointly(first, "Executor.save", "save") as part:
        part.fact = f"the path {str(path)!r}"
    with jointly(first, "Executor.save", "saved"):
        if first.first:
            first.flush()  # the others' last steps too
            tensors = {**_tensors(trainings), **first.served()}
            resume.save(path, tensors, trainings, scheduler, first.tables, claims=claims)


def load(
    trainings: Sequence[ProgramTraining],
    path: str,
    scheduler: Any | None,
    forget: Callable[[], None],
) -> int:
    """Reads a checkpoint; every trainer calls this.  See :meth:`Executor.load`.

    Args:
        forget: drops the copies of rows and the residuals that this process keeps.
    """
    first, tensors = trainings[0], _tensors(trainings)
    first.flush()
    with jointly(first, "Executor.load", "opened") as part:
        found = resume.opened(path, tensors, trainings, scheduler, first.tables)
        groups = iter(found.meta["groups"])
        for each in trainings:
            each.check(list(islice(groups, len(each.param_groups))), scheduler)
        part.fact = f"the checkpoint {found.reader.saved.identity}"
    with jointly(first, "Executor.load", "taken"):
        store = first.tables if first.first else None
        resume.load(found, tensors, trainings, scheduler, store)
        for each in trainings:
            each.restart()
    first.push()
    forget()
    with jointly(first, "Executor.load", "loaded"):
        resume.load_stepped(found, first.tables)
        if first.first and first.tables is not None:
            for name in first.tables.names():
                first.tables.mark_saved(name)
    return first.steps


def _tensors(trainings: Sequence[ProgramTraining]) -> dict[str, Tensor]:
    return {name: tensor for each in trainings for name, tensor in each.tensors.items()}
