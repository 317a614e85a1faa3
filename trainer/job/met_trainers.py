"""What the trainers of a job with servers do among themselves: means of dense gradients, and sums
of batch norms.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.communicator.communicator import Communicator
from trainer.environment.environment import Connection
from trainer.gradients.averaging import dense_means_of
from trainer.modules.sync_batch_norm import connect_batch_norms
from trainer.optimizer import DistributedOptimizer
from transpiler.strategy.strategy import DistributedStrategy


def connect_trainers(
    communicator: Communicator,
    models: Sequence[nn.Module],
    optimizers: Sequence[DistributedOptimizer],
    strategy: DistributedStrategy | None,
) -> None:
    """Brings up what the trainers of a job do among themselves; all have come when it returns.

    Batch norms that sum over trainers need all of the plan in each forward, so that a job with such
    ends with a trainer.

    Args:
        communicator: of a trainer that has joined.
        models, optimizers: of the script.
        strategy: says how gradients travel; None: all of one dtype at once.

    Raises:
        PServerError: other trainers have not come.
        ValueError: the trainers do not divide into rows; or they are to leave when they are
            preempted, and cannot.
    """
    found = connect_batch_norms(models, None, 1)
    means = communicator.dense_allreduce = dense_means_of(communicator, optimizers, strategy, found)
    if isinstance(means, DenseAllreduce) and found:
        connect_batch_norms(
            models,
            lambda vector, seconds: means.total([vector], "a batch norm", seconds)[0],
            communicator.plan.trainers,
            Connection.from_environment().start_timeout_seconds,
        )
