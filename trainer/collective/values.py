"""How values travel between the trainers of a job: alone, over torch's default process group, or
over a group beside servers.

A link does what it is told.  That all trainers ask for the same is for
:class:`~trainer.collective.trainer_values.TrainerValues` to see, by what they tell first.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.errors import PServerError, TrainerLost
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.object_bytes import from_bytes, to_bytes
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
RESULT_BYTES = 2**12  # of a result that server 0 keeps for trainers that come later
Found = TypeVar("Found")
WHAT = "a call that all trainers make"  # in messages


class Link(Protocol):
    """The way to the other trainers.  All trainers call its methods in the same order.

    Attributes:
        rank, size: which trainer this is, and of how many.
    """

    rank: int
    size: int

    def told(self, text: str) -> dict[int, str]:
        """What every trainer tells that is there, by trainer; from here on the others take part.

        Raises:
            PServerError: another trainer is gone, and the job does not go on without it.
        """
        ...

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """What ``work`` returns, which calls the methods below; None: a trainer was lost meanwhile,
        and all begin again with :meth:`told`.

        Args:
            work: of all that are there.
            alone: the same of this trainer by itself, where the others have made the call before
                it came, and nobody knows their result any more.

        Raises:
            PServerError: another trainer is gone, and the job does not go on without it.
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
        """Every trainer's tensor, all of one shape and dtype, in the order of the trainers."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Gives all trainers the tensor of one, in place.

        Raises:
            TrainerLost: that one is not there.
        """
        ...


class NoLink:
    """The link of a process that trains alone."""

    rank, size = 0, 1

    def told(self, text: str) -> dict[int, str]:
        """See :class:`Link`."""
        return {0: text}

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`Link`."""
        return work()

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

    def told(self, text: str) -> dict[int, str]:
        """See :class:`Link`."""
        data = text.encode()
        if len(data) > TOLD_BYTES:
            raise ValueError(f"expected a call in {TOLD_BYTES} bytes, got {len(data)}: {text}")
        padded = torch.frombuffer(bytearray(data.ljust(TOLD_BYTES)), dtype=torch.uint8)
        texts = [bytes(each.numpy()).decode().rstrip() for each in self.gather(padded)]
        return dict(enumerate(texts))

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`Link`."""
        return work()

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


class GlooLink(ABC):
    """A link of a job with servers: a group of trainers in main memory, by gloo."""

    @abstractmethod
    def place(self, trainer: int) -> int:
        """A trainer's place in the group."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many are in the group."""

    @abstractmethod
    def run(self, begin: Callable[[Any], dist.Work]) -> None:
        """Waits for an operation of the group."""

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`Link`."""
        return False

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`Link`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(OPS[op])
        self.run(lambda group: group.allreduce([tensor], options))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Link`."""
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        self.run(lambda group: group.allgather([found], [tensor]))
        return found

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`Link`."""
        options = dist.BroadcastOptions()
        options.rootRank = self.place(root)
        self.run(lambda group: group.broadcast([tensor], options))


class ServedLink(GlooLink):
    """The link of a job with servers that ends with a trainer that is lost.

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

    def told(self, text: str) -> dict[int, str]:
        """See :class:`Link`."""
        texts = self._barrier(text)
        check_missing(set(range(self.size)) - texts.keys(), self.rank)
        return dict(sorted(texts.items()))

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`Link`."""
        return work()

    def place(self, trainer: int) -> int:
        """See :class:`GlooLink`."""
        return trainer

    @property
    def count(self) -> int:
        """See :class:`GlooLink`."""
        return self.size

    def run(self, begin: Callable[[Any], dist.Work]) -> None:
        """See :class:`GlooLink`."""
        groups = self._meet().groups
        assert groups is not None, "there are other trainers"
        group = groups.group("values", range(self.size), CPU)
        groups.wait(groups.begin(lambda: begin(group), WHAT), WHAT, CPU)


class ElasticLink(GlooLink):
    """The link of a job with servers that goes on without a trainer that is lost: over a group of
    those that are there.

    Args:
        rank, size: which trainer this is, and of how many the plan is.
        group: of those that are there.
        absent: gives the trainers without which the job goes on.
    """

    def __init__(
        self, rank: int, size: int, group: ElasticGroup, absent: Callable[[], Collection[int]]
    ) -> None:
        self.rank, self.size = rank, size
        self._group, self._absent = group, absent

    def told(self, text: str) -> dict[int, str]:
        """See :class:`Link`."""
        texts = self._group.told(text)
        if not self._group.is_past:
            check_missing(set(range(self.size)) - texts.keys() - set(self._absent()), self.rank)
        return texts

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`Link`."""
        found, failure = None, ""
        if not self._group.is_past:
            try:
                found = work()
            except PServerError as error:
                failure = f"{type(error).__name__}: {error}"
        if not self._group.confirmed(failure, "" if found is None else _text(found)):
            return None
        if found is None and self._group.result:
            kept = from_bytes(base64.b64decode(self._group.result))
            return cast(Found, kept)
        return alone() if found is None else found

    def place(self, trainer: int) -> int:
        """See :class:`GlooLink`."""
        return self._group.place(trainer)

    @property
    def count(self) -> int:
        """See :class:`GlooLink`."""
        return 1 if self._group.is_past else len(self._group.members)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Link`."""
        return [tensor] if self._group.is_past else super().gather(tensor)

    def run(self, begin: Callable[[Any], dist.Work]) -> None:
        """See :class:`GlooLink`."""
        if not self._group.is_past:
            self._group.run(begin, WHAT)


def _text(found: Any) -> str:
    """A result, for trainers that come by there later; "" where it is large."""
    parts = found if isinstance(found, list) else [found]
    if sum(each.nbytes for each in parts) > RESULT_BYTES:
        return ""
    return base64.b64encode(to_bytes(found)).decode()


def check_missing(missing: Collection[int], own: int) -> None:
    """Returns if nobody is missing in a call that all trainers make.

    Raises:
        TrainerLost: somebody is.
    """
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise TrainerLost(f"trainer {names} has left the job, and trainer {own} is in {WHAT}")
