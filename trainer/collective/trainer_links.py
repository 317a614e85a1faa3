"""How values travel between the trainers of a job: alone, over torch's default process group, or
over a group beside servers.

A link does what it is told.  That all trainers ask for the same is for
:class:`~trainer.collective.trainer_values.TrainerValues` to see, by what they tell first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.errors import TrainerLost
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.parallel_env import current_peers, naming_trainers, wait_on_cpu

OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
TOLD_BYTES = 512  # of what a trainer tells over a process group
# For trainers that are there: one that evaluates may let the others wait.  Torch's own limit, half
# an hour, ends gloo's operations without naming anybody.
MOST_SECONDS = 1500.0
CPU = torch.device("cpu")
WHAT = "a call that all trainers make"  # in messages


class Link(Protocol):
    """The way to the other trainers.  All trainers call its methods in the same order.

    Attributes:
        rank, size: which trainer this is, and of how many.
    """

    rank: int
    size: int

    def told(self, text: str) -> list[str]:
        """What every trainer tells, by trainer.

        Raises:
            PServerError: another trainer is gone.
        """
        ...

    def on_gpus(self, device: torch.device) -> bool:
        """Whether tensors of a device travel from there; otherwise through main memory."""
        ...

    def reduce(self, tensor: Tensor, op: str) -> None:
        """Reduces tensors of one shape and dtype over all trainers, in place.

        Args:
            tensor: contiguous, of a dtype that every backend reduces.
            op: one of ``OPS``.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every trainer's tensor, all of one shape and dtype, by trainer."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Gives all trainers the tensor of one, in place."""
        ...


class NoLink:
    """The link of a process that trains alone."""

    rank, size = 0, 1

    def told(self, text: str) -> list[str]:
        """See :class:`Link`."""
        return [text]

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`Link`."""
        return True

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`Link`."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Link`."""
        return [tensor]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`Link`."""


class WorldLink:
    """The link of a job without servers: torch's default process group, NCCL for tensors on GPUs.

    Waits in main memory end when another trainer is lost, or after ``MOST_SECONDS``.
    """

    def __init__(self) -> None:
        peers = current_peers()
        self.rank, self.size = peers.rank, peers.size

    def told(self, text: str) -> list[str]:
        """See :class:`Link`."""
        data = text.encode()
        if len(data) > TOLD_BYTES:
            raise ValueError(f"expected a call in {TOLD_BYTES} bytes, got {len(data)}: {text}")
        padded = torch.frombuffer(bytearray(data.ljust(TOLD_BYTES)), dtype=torch.uint8)
        return [bytes(each.numpy()).decode().rstrip() for each in self.gather(padded)]

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`Link`."""
        return device.type == "cuda"

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`Link`."""
        self._do(tensor, lambda: dist.all_reduce(tensor, OPS[op], async_op=True))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Link`."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._do(tensor, lambda: dist.all_gather(found, tensor, async_op=True))
        return found

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`Link`."""
        self._do(tensor, lambda: dist.broadcast(tensor, root, async_op=True))

    def _do(self, tensor: Tensor, begin: Callable[[], Any]) -> None:
        with naming_trainers():
            work = begin()
            if tensor.device.type != "cpu":
                work.wait()  # its stream waits, not this thread
                return
            group = dist.distributed_c10d._get_default_group()
            wait_on_cpu(work, current_peers(), group, MOST_SECONDS, "make the same calls")


class ServedLink:
    """The link of a job with servers: a group of the trainers in main memory, by gloo.

    What trainers tell goes over a barrier on server 0, which knows who is lost and who waits for
    whom; so the trainers come to the group together.

    Args:
        rank, size: which trainer this is, and of how many.
        barrier: takes this trainer's text, and gives those of the trainers that have not left.
        meet: brings the trainers together; called once, when all are there.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        barrier: Callable[[str], dict[int, str]],
        meet: Callable[[], DenseAllreduce],
    ) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._meet = barrier, meet

    def told(self, text: str) -> list[str]:
        """See :class:`Link`."""
        texts = self._barrier(text)
        missing = sorted(set(range(self.size)) - texts.keys())
        if missing:
            names = ", ".join(map(str, missing))
            raise TrainerLost(
                f"trainer {names} has left the job, and trainer {self.rank} is in {WHAT}"
            )
        return [texts[rank] for rank in range(self.size)]

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`Link`."""
        return False

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`Link`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(OPS[op])
        self._do(lambda group: group.allreduce([tensor], options))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Link`."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._do(lambda group: group.allgather([found], [tensor]))
        return found

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`Link`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._do(lambda group: group.broadcast([tensor], options))

    def _do(self, begin: Callable[[Any], dist.Work]) -> None:
        groups = self._meet().groups
        assert groups is not None, "there are other trainers"
        group = groups.group("values", range(self.size), CPU)
        groups.wait(groups.begin(lambda: begin(group), WHAT), WHAT, CPU)
