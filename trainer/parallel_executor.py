"""The collective programs' Executor, with the original's signature."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from trainer.executor.executor import Executor, check_numbers
from trainer.executor.loaded_program import CompiledProgram, check_loss, check_without_servers
from transpiler.plan.settings import check_flag
from transpiler.program import Program
from transpiler.strategy.run_strategies import BuildStrategy, ExecutionStrategy
from transpiler.tracing.default_programs import default_trainer_program


class ParallelExecutor:
    """Runs the program of one trainer of a job without servers; gradients are averaged over all
    trainers.

    The trainer program of mode "nccl2" is the single-node one: this class puts the sums over all
    trainers between its backward and its updates (a plain ``Executor`` trains alone on it).
    Programs of mode "collective" have them already.  A program that was not transpiled runs alone,
    with ``num_trainers`` 1.

    Its construction waits for the rendezvous of the trainers, up to the start timeout, and every
    trainer takes trainer 0's parameters and buffers.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3, 4),)
        main, _ = capture(model, lambda model, x: model(x).sum(), optimizer, batch)
        with ParallelExecutor(False, "loss", main) as executor:
            (loss,) = executor.run(["loss"], batch)

    Args:
        use_cuda: compute on the GPU whose number is this trainer's place among those of its host,
            and sum by NCCL.  Otherwise on the CPU, by gloo.
        loss_name: the loss; checked.
        main_program: of ``get_trainer_program``.  None: the program that ``transpile`` made of the
            default main program.
        num_trainers, trainer_id: must be those of the program.
        exec_strategy, build_strategy: settings of the program's runs, and changes of it: objects,
            or dicts; docs/execution.md.

    Raises:
        TypeError: an argument has another type.
        ValueError: the numbers are not the program's, it has no such loss, or there is no such GPU.
        PServerError: the rendezvous fails; the message names the trainer that is missing, or runs
            another program.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
    ) -> None:
        check_flag("ParallelExecutor: use_cuda", use_cuda)
        program = default_trainer_program() if main_program is None else main_program
        if not isinstance(program, Program):
            raise TypeError(
                f"ParallelExecutor: main_program: expected a Program, got {type(program).__name__}"
            )
        check_without_servers("ParallelExecutor", program)
        check_numbers("ParallelExecutor", program, num_trainers, trainer_id)
        check_loss("ParallelExecutor", program, loss_name)
        self._program = CompiledProgram(program).with_data_parallel(
            loss_name, build_strategy, exec_strategy
        )
        self._executor = Executor(_device(program) if use_cuda else "cpu")
        if self._program.first is not None:
            try:
                self._executor.run(self._program.first)
            except BaseException as error:
                self._executor.__exit__(type(error), error, None)
                raise

    def run(self, fetch_list: Sequence[str] | None = None, feed: Any = None) -> list[Tensor]:
        """Runs one step on this trainer's batch; with ``num_iteration_per_run`` n, n steps on a
        list of n batches.

        Returns:
            The values of ``fetch_list``: this trainer's own loss, the mean gradients, the common
            parameters.

        Raises:
            TypeError, ValueError: the feed or a name in ``fetch_list`` does not fit the program.
            PServerError: another trainer was lost, or has left.
        """
        return self._executor.run(self._program, feed, fetch_list)

    @property
    def transport(self) -> str:
        """The transport of sums: "gloo", "nccl", or "local" alone."""
        return self._executor.transport

    def close(self) -> None:
        """Leaves the job."""
        self._executor.close()

    def __enter__(self) -> ParallelExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.__exit__(kind, error, trace)


def _device(program: Program) -> torch.device:
    """The GPU of this trainer."""
    deployment, count = program.deployment, torch.cuda.device_count()
    place = 0
    if deployment is not None and deployment.trainer_id is not None:
        hosts = [endpoint.rpartition(":")[0] for endpoint in deployment.endpoints]
        place = hosts[: deployment.trainer_id].count(hosts[deployment.trainer_id])
    if place >= count:
        raise ValueError(
            f"ParallelExecutor: use_cuda=True: expected GPU {place} on this host, got {count} GPUs"
        )
    return torch.device("cuda", place)
