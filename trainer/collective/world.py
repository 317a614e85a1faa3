"""The collective mode over torch's own process group: its start, its end, and errors that name a
trainer.

::

    init_parallel_env()             # one of torchrun's, launch's or spawn's processes; or alone
    model = DataParallel(Net())

Tensors on GPUs travel by NCCL, those in main memory by gloo.
"""

from __future__ import annotations

import atexit
import logging
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from pserver.errors import PServerError, TimedOut, TrainerLost, Unreachable
from pserver.running_clock import RUNNING
from pserver.telemetry.memory import freeze_at_exit
from trainer.collective.rendezvous import (
    Peers,
    connect_store,
    never_destroy,
    rendezvous,
    wait_for_rest,
)
from trainer.environment import environment
from trainer.environment.environment import Connection, World

# between checks for lost trainers, during the wait for a reduction
LOOK_SECONDS = timedelta(seconds=1)
LEFT_SECONDS = 2.0  # for so long a sum may still arrive from a trainer that has left
# in the texts of torch's communication errors
_COMMUNICATION = re.compile("gloo|NCCL|TCPStore|Connection|timed out", re.IGNORECASE)

log = logging.getLogger(__name__)

_peers: Peers | None = None
_rendezvous = 0  # begun by this process: each has its own prefix in the store


def init_parallel_env() -> None:
    """Brings up torch's default process group over all trainers; a second call has no effect.

    Reads torchrun's variables, which ``pserver launch --nccl2``, ``torchrun`` and
    :func:`trainer.spawn` set; without them this is a world of one, with a warning if another
    launcher's variables name several.  With GPUs, the one with the number LOCAL_RANK becomes the
    current device.

    Example::

        init_parallel_env()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)    # the number of trainers

    Raises:
        ValueError: a variable is missing, or has a wrong value; or trainers are on several hosts,
            without PSERVER_INSECURE_COLLECTIVE.
        TimedOut: a trainer has not come up within PSERVER_START_TIMEOUT; the message names it.
        Unreachable: trainer 0, which serves the store, cannot be reached, or cannot listen.
        TrainerLost: trainer 0 ended while the others waited.
        Refused: another process has this trainer's number.
    """
    global _peers, _rendezvous
    if dist.is_initialized():
        return
    world = World.from_environment()
    if world.size == 1 and not environment.is_ours():
        environment.warn_of_other_launchers("none of torchrun's variables is set")
    _rendezvous += 1
    peers = _meet(world, Connection.from_environment(), _rendezvous)
    has_gpus = torch.cuda.is_available()
    if has_gpus and world.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(world.local_rank)
    elif has_gpus:
        log.warning(
            "trainer %d: LOCAL_RANK is %d and there are %d GPUs: none is its own",
            world.rank,
            world.local_rank,
            torch.cuda.device_count(),
        )
    _peers = peers
    with naming_trainers():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpus and dist.is_nccl_available() else "gloo",
            store=PrefixStore("group", peers.store),
            rank=world.rank,
            world_size=world.size,
        )
    sys.excepthook = _Hook(sys.excepthook)
    freeze_at_exit()
    atexit.register(leave_parallel_env)


def _meet(world: World, connection: Connection, number: int) -> Peers:
    """The rendezvous of the processes that torchrun's variables describe.

    Args:
        number: of this rendezvous among those of this process, from 1.
    """
    if world.size > 1 and not world.all_here:
        connection.check_collective(world.address)
    end = RUNNING() + connection.start_timeout_seconds
    while True:
        store: Store = HashStore()
        try:
            if world.size > 1:
                address = world.address, world.port
                store = connect_store(*address, world.rank, connection, served=world.served)
            return rendezvous(
                store,
                world.rank,
                [""] * world.size,
                connection,
                host=world.address,
                number=f"{world.attempt}/{number}",
            )
        except (TrainerLost, Unreachable):
            # trainer 0 was about to end the store of the earlier job, and serves another one
            if number == 1 or world.rank == 0 or RUNNING() > end:
                raise


def leave_parallel_env(text: str = "its script has ended") -> None:
    """Takes the process group down, and tells the others that this trainer has left; also called at
    exit.  Trainer 0, which serves the store, leaves last, unless it ends with an error.

    Args:
        text: sent to trainers that still need this one.
    """
    global _peers
    peers, _peers = _peers, None
    if peers is None:
        return
    environment.forget_other_launchers()
    atexit.unregister(leave_parallel_env)
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before
    peers.leave(text)
    if dist.is_initialized():
        wait_for_rest()  # see [Note: a group that has just worked]
        dist.destroy_process_group()
    if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
        peers.wait_for_all()
    peers.close(text)


def current_peers() -> Peers:
    """The trainers of :func:`init_parallel_env`, which is called now in a world of one.

    Raises:
        RuntimeError: there are other trainers, and it has not been called.
    """
    if _peers is not None:
        return _peers
    if dist.is_initialized():  # by the script itself: its trainers are not watched
        store = dist.distributed_c10d._get_default_store()
        return Peers(dist.get_rank(), ("",) * dist.get_world_size(), store)
    if World.from_environment().size > 1:
        raise RuntimeError("call init_parallel_env() or fleet.init(is_collective=True) first")
    init_parallel_env()
    return current_peers()


def new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A group of some of the trainers.  Every trainer of the job calls this, in the same order,
    with the same ranks.

    Example::

        first = new_group([0])
        model = DataParallel(Net(), group=new_group())

    Args:
        ranks: of the trainers in the group; None: all.

    Returns:
        The group; on other trainers, an object that collectives refuse.

    Raises:
        ValueError: there is no such trainer, or one is named twice.
    """
    size = current_peers().size
    chosen = list(range(size)) if ranks is None else list(ranks)
    once = len(set(chosen)) == len(chosen)
    if not chosen or not once or not all(rank in range(size) for rank in chosen):
        raise ValueError(f"ranks: expected some of 0 to {size - 1}, each once, got {chosen}")
    with naming_trainers():
        group: dist.ProcessGroup = dist.new_group(sorted(chosen))
    return group


# ---- waits ----


def wait_on_cpu(
    work: dist.Work,
    peers: Peers,
    group: dist.ProcessGroup,
    seconds: float = math.inf,
    alike: str = "call the model equally often",
) -> None:
    """Waits for an operation on tensors in main memory, and checks meanwhile that no trainer is
    lost.

    Args:
        group: the operation's group.
        alike: what all trainers must do, for the message of a timeout.

    Raises:
        TimedOut: it has not ended after ``seconds``.
        PServerError: another trainer is lost, or has left without its part.
    """
    try:
        _wait(work, peers, dist.get_process_group_ranks(group), seconds, alike)
    except PServerError:
        never_destroy(group)
        raise


def _wait(
    work: dist.Work, peers: Peers, needed: Collection[int], seconds: float, alike: str
) -> None:
    began = RUNNING()
    while (waited := RUNNING() - began) <= seconds:
        try:
            work.wait(LOOK_SECONDS)
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                raise
        # a trainer that has given its part may leave, with its data still on the way
        peers.check(needed if waited > LEFT_SECONDS else ())
    late = TimedOut(
        f"{peers.spell(peers.rank)} has waited {seconds:g} s for a sum over all trainers, and no "
        f"trainer is lost: all trainers must {alike}"
    )
    fail(late)  # a trainer that waits elsewhere for this one ends too
    raise late


def world_total(tensor: torch.Tensor, seconds: float = math.inf) -> torch.Tensor:
    """The sum over all trainers, in place.

    Raises:
        TimedOut: in main memory, after ``seconds``.
        PServerError: another trainer is lost.
    """
    with naming_trainers():
        work = dist.all_reduce(tensor, async_op=True)
        if tensor.device.type == "cpu":
            wait_on_cpu(work, current_peers(), dist.distributed_c10d._get_default_group(), seconds)
        else:
            work.wait()
    return tensor


def copy_to_group(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, rank: int) -> None:
    """Copies one trainer's values into the tensors of all, in main memory; tensors of one dtype
    travel as one.

    Args:
        group: of the trainers.
        rank: the trainer with the values, by its number in the group.

    Raises:
        PServerError: another trainer is lost, or one of the group has left.
    """
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    flat = [torch.cat([each.reshape(-1) for each in own]) for own in alike.values()]
    works = [dist.broadcast(each, group=group, async_op=True, group_src=rank) for each in flat]
    for own, values, work in zip(alike.values(), flat, works, strict=True):
        assert work is not None, "it is asynchronous"
        wait_on_cpu(work, current_peers(), group)
        parts = torch.split(values, [each.numel() for each in own])
        for tensor, part in zip(own, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


# ---- errors ----


@contextmanager
def naming_trainers() -> Iterator[None]:
    """Raises errors of communication inside anew, under the name of the trainer that caused them.

    Raises:
        PServerError: that trainer is lost, has failed or has left.
    """
    try:
        yield
    except RuntimeError as error:
        found = cause_of(error)
        if found is None:
            raise
        raise found from error


def cause_of(error: BaseException) -> PServerError | None:
    """The end of the trainer that caused an error of communication; None for another error, and if
    no trainer is known to have ended.
    """
    membership = _peers.membership if _peers is not None else None
    foreign = isinstance(error, PServerError) or not _COMMUNICATION.search(str(error))
    event = None if membership is None or foreign else membership.cause()
    return None if event is None else event.error()


class _Hook:
    """sys.excepthook: tells the others the error that ends this trainer, and prints the name of the
    trainer that caused it, if another did.

    Args:
        before: the previous hook, which is called first.
    """

    def __init__(
        self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]
    ) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.before(kind, error, trace)
        found = cause_of(error)
        if found is not None:
            name = f"{type(found).__module__}.{type(found).__name__}"
            print(f"{name}: {found}", file=sys.stderr, flush=True)
        elif not isinstance(error, PServerError):
            fail(error)


def fail(error: BaseException) -> None:
    """Tells the others that this trainer ends with an error of its own."""
    if _peers is not None and _peers.membership is not None:
        _peers.membership.announce("failed", f"{type(error).__name__}: {error}")
