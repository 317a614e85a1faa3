"""What the optimizers of one job must have alike."""

from __future__ import annotations

from transpiler.strategy.strategy import DistributedStrategy

# keys of a_sync_configs that say something of the whole job
ALIKE = ("buffers", "launch_barrier", "runtime_split_send_recv", "soft_wait_ms")
_SYNC = DistributedStrategy()


def check_further(
    first: DistributedStrategy | None,
    strategy: DistributedStrategy | None,
    number: int,
    steps: int | None,
) -> None:
    """Returns if a further optimizer may join a job.

    Args:
        first: of the job's first optimizer.
        strategy: of the further one.
        number: of the further one.
        steps: that the job has taken; None: it has not begun.

    Raises:
        RuntimeError: it comes too late.
        ValueError: it does not go with the others.
    """
    if steps is not None:
        raise RuntimeError(
            "fleet.distributed_optimizer: expected every optimizer before the first step, got "
            f"a further one after step {steps}: the servers' plan is made for all of them"
        )
    if overlaps(strategy) or overlaps(first):
        raise ValueError(
            "overlap: expected one optimizer, got a further one: a backward of its loss may "
            "pass through the other's parameters, and their gradients would leave as those of "
            "the other's step; leave overlap off"
        )
    for key in ALIKE:
        one, other = ((s or _SYNC).a_sync_configs[key] for s in (first, strategy))
        if one != other:
            raise ValueError(
                f"a_sync_configs[{key!r}]: expected the same for every optimizer of a job, got "
                f"{one!r} for optimizer 0 and {other!r} for optimizer {number}"
            )


def overlaps(strategy: DistributedStrategy | None) -> bool:
    """Whether gradients leave while a backward runs."""
    return strategy is not None and bool(strategy.a_sync_configs["overlap"])
