"""The passes, and the pipelines in which they run.

A pass is a function ``(program, plan) -> program``.  It does not change its arguments.  A pipeline
is a tuple of stages; a stage is a pass and the invariants that hold from then on.
``verify.run`` runs a pipeline and checks, after every pass, all invariants that hold by then.

This file lists every pipeline, in the order in which the passes run.  In reading order::

    trainer         a trainer's main and startup program; gradients that trainers average
    trainer_tables  the same for sparse tables
    pserver         a server's main program, with its tables
    collective      a trainer's programs in a job without servers, also with sharded updates

The room may import ir, plan, program.py and verify.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from transpiler.passes.collective import (
    average_parameters,
    broadcast_parameters,
    fuse_broadcasts,
    fuse_by_size,
    generate_ids,
    init_rings,
    leave_unchanged,
    reduce_to_owners,
    scale_loss_gradient,
    separate_gradients,
    sum_as_float16,
    sum_gradients,
    update_on_owners,
    wait_before_use,
)
from transpiler.passes.pserver import (
    append_optimize_blocks,
    append_table_blocks,
    define_slices,
    define_tables,
    listen,
)
from transpiler.passes.trainer import (
    average_gradients,
    clip_shares,
    drop_updates,
    leave_clipping_to_servers,
    receive_everything,
    receive_first,
    receive_parameters,
    send_changes,
    send_gradients,
    update_scale_last,
    update_when_decided,
)
from transpiler.passes.trainer_tables import pull_rows, send_row_gradients
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify import collective, evaluation, pserver, tables, trainer
from transpiler.verify import trainer as averaged
from transpiler.verify.verify import Pass, PassStage

Pipeline = tuple[PassStage, ...]


def trainer_passes(runtime_split_send_recv: bool = False) -> Pipeline:
    """The pipeline from the single-node main program to a trainer's.

    Args:
        runtime_split_send_recv: no split and concat ops; send and recv carry the sections.
    """

    def split(transform: Callable[[Program, Plan, bool], Program]) -> Pass:
        return lambda program, plan: transform(program, plan, runtime_split_send_recv)

    return (
        # where servers clip, the trainer's clip ops are dropped
        PassStage(leave_clipping_to_servers),
        # where gradients are compressed, the trainer clips its share
        PassStage(clip_shares),
        # lookups become pulls of rows from servers
        PassStage(split(pull_rows), (tables.rows_pulled_once,)),
        # each gradient is split and sent right after the op that produces it
        PassStage(split(send_gradients), (trainer.sent_exactly_once, trainer.sent_when_final)),
        # each gradient of rows likewise; the ops that update rows are dropped
        PassStage(
            split(send_row_gradients),
            (tables.row_gradients_sent_once, tables.rows_updated_in_one_place),
        ),
        # the optimizer ops of parameters that servers update are dropped
        PassStage(drop_updates, (trainer.updated_in_one_place,)),
        # gradients that trainers average are averaged, and waited for before the updates
        PassStage(average_gradients, (averaged.gradients_averaged_once,)),
        # in k-step lanes the deltas are sent after the updates
        PassStage(send_changes, (trainer.changes_sent_once,)),
        # barriers, then each parameter is received and its slices are concatenated
        PassStage(
            split(receive_parameters),
            (
                trainer.parameters_received_once,
                trainer.received_after_sending,
                trainer.barriers_exactly_where_due,
                trainer.concatenated_after_arrival,
            ),
        ),
        # where servers decide a step, averages count only after that
        PassStage(update_when_decided, (averaged.averaged_before_barriers,)),
        # a loss scale is updated when the step's outcome has arrived
        PassStage(update_scale_last),
    )


def forward_passes(runtime_split_send_recv: bool = False) -> Pipeline:
    """The pipeline from a forward program to a trainer's that evaluates.

    Args:
        runtime_split_send_recv: as in :func:`trainer_passes`.
    """

    def split(transform: Callable[[Program, Plan, bool], Program]) -> Pass:
        return lambda program, plan: transform(program, plan, runtime_split_send_recv)

    return (
        # lookups become pulls of rows from servers
        PassStage(split(pull_rows), (tables.rows_pulled_once, evaluation.changes_nothing)),
        # each parameter is received and its slices are concatenated
        PassStage(
            split(receive_first),
            (
                evaluation.received_before_computing,
                trainer.parameters_received_once,
                trainer.concatenated_after_arrival,
            ),
        ),
    )


def trainer_startup_passes(runtime_split_send_recv: bool = False) -> Pipeline:
    """The pipeline from the single-node startup program to a trainer's.

    Args:
        runtime_split_send_recv: as in :func:`trainer_passes`.
    """
    return (
        # every variable that servers hold is received; tables are declared
        PassStage(
            partial(receive_everything, runtime_split_send_recv=runtime_split_send_recv),
            (
                trainer.parameters_received_once,
                trainer.barriers_exactly_where_due,
                trainer.concatenated_after_arrival,
                tables.tables_declared,
            ),
        ),
    )


# From an empty program to a server's main program; the plan alone decides.
PSERVER_PASSES: Pipeline = (
    # block 0 defines the server's slices, with their gradients and states
    PassStage(define_slices, (pserver.slices_held, pserver.only_server_ops)),
    # one block updates each slice
    PassStage(append_optimize_blocks, (pserver.optimize_blocks_complete,)),
    # block 0 defines every table
    PassStage(define_tables, (tables.tables_held,)),
    # one block updates each table, one looks its rows up
    PassStage(append_table_blocks, (tables.table_blocks_complete,)),
    # block 0 ends in listen_and_serv
    PassStage(listen, (pserver.listens_once,)),
)

# A trainer's main program without servers: the mean gradients ("grad_allreduce").
GRADIENT_PASSES: Pipeline = (
    # the loss's gradient is scaled by 1 / trainers
    PassStage(scale_loss_gradient, (collective.loss_gradient_scaled,)),
    # a gradient that backward reads again gets a copy of its own to be summed
    PassStage(separate_gradients, (collective.updated_once,)),
    # each gradient is summed over the trainers as soon as it is final
    PassStage(sum_gradients, (collective.summed_exactly_once,)),
    # sums that follow one another share a bucket
    PassStage(fuse_by_size, (collective.buckets_in_bounds,)),
    # where the plan says so, gradients are cast before their sum, and back after it
    PassStage(sum_as_float16, (collective.cast_both_ways,)),
    # each sum is waited for right before its first use
    PassStage(wait_before_use, (collective.awaited_before_use,)),
)

# The same where each parameter is updated by one trainer.
SHARDED_PASSES: Pipeline = (
    PassStage(scale_loss_gradient, (collective.loss_gradient_scaled,)),
    PassStage(separate_gradients),
    # each gradient is summed on the trainer that updates its parameter
    PassStage(reduce_to_owners),
    # updates of other trainers' parameters are dropped; each parameter is broadcast
    PassStage(
        update_on_owners,
        (
            collective.reduced_to_its_owner,
            collective.updated_by_its_owner,
            collective.broadcast_by_its_owner,
        ),
    ),
    PassStage(wait_before_use, (collective.awaited_before_use,)),
)

# A trainer's main program without servers: the mean parameters ("local_sgd").
PARAMETER_PASSES: Pipeline = (
    # after the updates each parameter becomes its mean over the trainers
    PassStage(
        average_parameters,
        (collective.updated_once, collective.averaged_exactly_once, collective.adapted_once),
    ),
    PassStage(fuse_by_size, (collective.buckets_in_bounds,)),
    PassStage(wait_before_use, (collective.awaited_before_use,)),
)

# A trainer's startup program with "nccl2".
NCCL2_STARTUP_PASSES: Pipeline = (
    # trainer 0 generates the ids of the rings
    PassStage(generate_ids, (collective.ids_generated_once,)),
)

# A trainer's startup program in the other modes without servers.
COLLECTIVE_STARTUP_PASSES: Pipeline = (
    PassStage(generate_ids, (collective.ids_generated_once,)),
    # the process groups are initialised
    PassStage(init_rings, (collective.rings_initialized_once,)),
    # every parameter and buffer becomes trainer 0's
    PassStage(broadcast_parameters, (collective.parameters_broadcast,)),
    # those of a ring travel together, where the deployment asks for it
    PassStage(fuse_broadcasts, (collective.parameters_broadcast,)),
    PassStage(wait_before_use, (collective.awaited_before_use,)),
)

# A trainer's main program without servers, by mode.
MAIN_PASSES: Mapping[str, Pipeline] = MappingProxyType(
    {
        # the program stays as it is; ParallelExecutor runs GRADIENT_PASSES on it
        "nccl2": (
            PassStage(leave_unchanged, (collective.shares_nothing, collective.updated_once)),
        ),
        "grad_allreduce": GRADIENT_PASSES,
        "local_sgd": PARAMETER_PASSES,
    }
)
