"""Sums, lists and objects of all trainers of a job, and how they travel in each kind of job.

[Note: the same call]  Before its data travels a trainer tells the others which call it is in, with
dtype and shape.  If these differ every trainer raises the same error, which names the calls; a
process group would hang, or mix up the bytes.  So a call costs two rounds; and a third one in a job
that continues without lost trainers: see [Note: a group that outlives its members].
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pserver.errors import PServerError, TrainerLost
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.object_bytes import from_bytes, to_bytes
from trainer.collective.world import current_peers, naming_trainers, wait_on_cpu
from transpiler.files import bounded_json

# ---- trainer links ----
#
# How values travel between the trainers of a job: within one process, over torch's default process
# group, or over a group beside servers.
#
# A link does not check its calls.  :class:`~trainer.collective.values.TrainerValues` ensures that
# all trainers make the same call, by the descriptions that they exchange first.


OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
TOLD_BYTES = 512  # of a trainer's description of its call, over a process group
# For live trainers: one that evaluates may make the others wait.  Torch's own limit, half an hour,
# ends gloo's operations without naming a trainer.
MOST_SECONDS = 1500.0
CPU = torch.device("cpu")
RESULT_BYTES = 2**12  # of a result that server 0 keeps for trainers that join later
Found = TypeVar("Found")
WHAT = "a call that all trainers make"  # in messages


class TrainerLink(Protocol):
    """The connection to the other trainers.  All trainers call its methods in the same order.

    Attributes:
        rank, size: this trainer's rank, and the number of trainers.
    """

    rank: int
    size: int

    def gather_texts(self, text: str) -> dict[int, str]:
        """Exchanges texts: gives those of all live trainers, by trainer.  The operations that
        follow are among these trainers.

        Raises:
            PServerError: another trainer is lost or has left, and the job does not continue without
                it.
        """
        ...

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """Runs ``work``, which calls the methods below, and returns its result; None: a trainer was
        lost meanwhile, and all begin again with :meth:`gather_texts`.

        Args:
            work: the work of all live trainers.
            alone: the same work for this trainer alone, if the others made the call before it
                joined, and their result is not kept.

        Raises:
            PServerError: another trainer is lost or has left, and the job does not continue without
                it.
        """
        ...

    def on_gpus(self, device: torch.device) -> bool:
        """Whether tensors of a device travel directly; otherwise through main memory."""
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
        """Copies the tensor of one trainer into those of all.

        Raises:
            TrainerLost: that trainer is not live.
        """
        ...


class NoLink:
    """The link of a process that trains alone."""

    rank, size = 0, 1

    def gather_texts(self, text: str) -> dict[int, str]:
        """See :class:`TrainerLink`."""
        return {0: text}

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`TrainerLink`."""
        return work()

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`TrainerLink`."""
        return True

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`TrainerLink`."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`TrainerLink`."""
        return [tensor]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`TrainerLink`."""


class WorldLink:
    """The link of a job without servers: torch's default process group, NCCL for tensors on GPUs.

    Waits in main memory end when another trainer is lost, or after ``MOST_SECONDS``.
    """

    def __init__(self) -> None:
        peers = current_peers()
        self.rank, self.size = peers.rank, peers.size

    def gather_texts(self, text: str) -> dict[int, str]:
        """See :class:`TrainerLink`."""
        data = text.encode()
        if len(data) > TOLD_BYTES:
            raise ValueError(f"expected a call in {TOLD_BYTES} bytes, got {len(data)}: {text}")
        padded = torch.frombuffer(bytearray(data.ljust(TOLD_BYTES)), dtype=torch.uint8)
        texts = [bytes(each.numpy()).decode().rstrip() for each in self.gather(padded)]
        return dict(enumerate(texts))

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`TrainerLink`."""
        return work()

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`TrainerLink`."""
        return device.type == "cuda"

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`TrainerLink`."""
        self._do(tensor, lambda: dist.all_reduce(tensor, OPS[op], async_op=True))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`TrainerLink`."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._do(tensor, lambda: dist.all_gather(found, tensor, async_op=True))
        return found

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`TrainerLink`."""
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
        """The number of trainers in the group."""

    @abstractmethod
    def run(self, begin: Callable[[Any], dist.Work]) -> None:
        """Runs an operation of the group, and waits for it."""

    def on_gpus(self, device: torch.device) -> bool:
        """See :class:`TrainerLink`."""
        return False

    def reduce(self, tensor: Tensor, op: str) -> None:
        """See :class:`TrainerLink`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(OPS[op])
        self.run(lambda group: group.allreduce([tensor], options))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`TrainerLink`."""
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        self.run(lambda group: group.allgather([found], [tensor]))
        return found

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See :class:`TrainerLink`."""
        options = dist.BroadcastOptions()
        options.rootRank = self.place(root)
        self.run(lambda group: group.broadcast([tensor], options))


class ServedLink(GlooLink):
    """The link of a job with servers that ends if a trainer is lost.

    Texts are exchanged over a barrier on server 0, which knows the lost trainers and which trainers
    wait for others; so the trainers enter the group together.

    Args:
        rank, size: this trainer's rank, and the number of trainers.
        barrier: takes this trainer's text, and gives the texts of the trainers that have not left.
        meet: gives the trainers' group, which the first call makes; called when all have passed
            the barrier.
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

    def gather_texts(self, text: str) -> dict[int, str]:
        """See :class:`TrainerLink`."""
        texts = self._barrier(text)
        check_missing(set(range(self.size)) - texts.keys(), self.rank)
        return dict(sorted(texts.items()))

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`TrainerLink`."""
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
    """The link of a job with servers that continues without a lost trainer: over a group of the
    live trainers.

    Args:
        rank, size: this trainer's rank, and the plan's number of trainers.
        group: of the live trainers.
        absent: gives the trainers without which the job continues.
    """

    def __init__(
        self, rank: int, size: int, group: ElasticGroup, absent: Callable[[], Collection[int]]
    ) -> None:
        self.rank, self.size = rank, size
        self._group, self._absent = group, absent

    def gather_texts(self, text: str) -> dict[int, str]:
        """See :class:`TrainerLink`."""
        texts = self._group.gather_texts(text)
        if not self._group.is_past:
            check_missing(set(range(self.size)) - texts.keys() - set(self._absent()), self.rank)
        return texts

    def attempted(self, work: Callable[[], Found], alone: Callable[[], Found]) -> Found | None:
        """See :class:`TrainerLink`."""
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
        """See :class:`TrainerLink`."""
        return [tensor] if self._group.is_past else super().gather(tensor)

    def run(self, begin: Callable[[Any], dist.Work]) -> None:
        """See :class:`GlooLink`."""
        if not self._group.is_past:
            self._group.run(begin, WHAT)


def _text(found: Any) -> str:
    """A result as text, for trainers that make the call later; "" if it is large."""
    parts = found if isinstance(found, list) else [found]
    if sum(each.nbytes for each in parts) > RESULT_BYTES:
        return ""
    return base64.b64encode(to_bytes(found)).decode()


def check_missing(missing: Collection[int], own: int) -> None:
    """Checks that no trainer is missing in a joint call.

    Raises:
        TrainerLost: a trainer is missing.
    """
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise TrainerLost(f"trainer {names} has left the job, and trainer {own} is in {WHAT}")


# ---- trainer values ----
#
# Values of all trainers of a job: sums, lists of tensors, and objects.


KINDS = ("sum", "mean", "max", "min", "prod")
MOST_NAMED = 4  # calls in a message
# Reduced as int64: exact, and a result that the tensor's own dtype cannot hold is detected.
NARROW = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}
WIDE = {torch.float32, torch.float64, torch.int64}


@dataclass(frozen=True, slots=True)
class CallDescription:
    """A trainer's description of its call, for the others.

    Attributes:
        same: the part of the call that must be equal on all trainers, as text.
        words: the call, for messages.
        shape: of its tensor.
        bytes: of its object.
        device: the type of its tensor's device.
    """

    same: str
    words: str
    shape: Sequence[int] = ()
    bytes: int = 0
    device: str = "cpu"


class TrainerValues:
    """One trainer's part in the collective calls of a job.  Not thread-safe.

    All trainers make the same calls in the same order; see [Note: the same call].  Results are
    equal to the bit on all trainers.

    Args:
        link: the connection to the others.

    Attributes:
        rank, size: this trainer's rank, and the number of trainers.
    """

    def __init__(self, link: TrainerLink) -> None:
        self._link = link
        self.rank, self.size = link.rank, link.size

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See :func:`trainer.job.shared_values.all_reduce`."""
        _check_tensor("all_reduce", tensor)
        _check_kind(tensor, op)
        dtype, shape = _spelled(tensor.dtype), list(tensor.shape)
        words = f"all_reduce({dtype} {shape}, {op!r})"
        call = CallDescription(words, words, shape, device=tensor.device.type)

        def reduced(calls: Mapping[int, CallDescription]) -> Tensor:
            if self.size == 1:
                return tensor.detach().clone()
            total = _wide(tensor.detach()).to(self._device(tensor, calls))
            # a copy, also where nothing had to change
            total = total.clone(memory_format=torch.contiguous_format)
            if total.numel():
                self._reduce(total, op)
            return total.div_(len(calls)) if op == "mean" else total

        total = self._together(call, reduced)
        if total.is_complex() != tensor.is_complex():
            total = torch.view_as_complex(total)
        return _narrowed(total, tensor.dtype, op).to(tensor.device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See :func:`trainer.job.shared_values.all_gather`."""
        _check_tensor("all_gather", tensor)
        dtype, shape = _spelled(tensor.dtype), list(tensor.shape)
        rest = ["any", *shape[1:]] if shape else []
        words = f"all_gather({dtype} {shape})"
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        size = tensor.element_size()

        def gathered(calls: Mapping[int, CallDescription]) -> list[Tensor]:
            flat = own.reshape(-1).view(torch.uint8).to(self._device(tensor, calls))
            lengths = [size * torch.Size(each.shape).numel() for each in calls.values()]
            return [
                part.to(tensor.device).view(tensor.dtype).reshape(tuple(call.shape))
                for part, call in zip(self._gathered(flat, lengths), calls.values(), strict=True)
            ]

        call = CallDescription(f"{dtype} {rest}", words, shape, device=tensor.device.type)
        return self._together(call, gathered)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """See :func:`trainer.job.shared_values.broadcast_object`."""
        if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < self.size:
            raise ValueError(
                f"broadcast_object: src: expected a trainer, 0 to {self.size - 1}, got {src!r}"
            )
        data = to_bytes(value) if self.rank == src else b""
        words = f"broadcast_object(src={src})"

        def given(calls: Mapping[int, CallDescription]) -> Tensor:
            if self.rank == src:
                travels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            else:
                if src not in calls:
                    raise TrainerLost(
                        f"{words}: trainer {self.rank} joined later, and the object is not kept"
                    )
                travels = torch.empty(calls[src].bytes, dtype=torch.uint8)
            self._link.broadcast(travels, src)
            return travels

        travels = self._together(CallDescription(words, words, bytes=len(data)), given, needed=src)
        return value if self.rank == src else from_bytes(bytes(travels.numpy()))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :func:`trainer.job.shared_values.all_gather_object`."""
        data = to_bytes(value)
        words = "all_gather_object()"
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def gathered(calls: Mapping[int, CallDescription]) -> list[Tensor]:
            return self._gathered(flat, [each.bytes for each in calls.values()])

        parts = self._together(CallDescription(words, words, bytes=len(data)), gathered)
        return [value] if self.size == 1 else [from_bytes(bytes(each.numpy())) for each in parts]

    def _together(
        self,
        call: CallDescription,
        travel: Callable[[Mapping[int, CallDescription]], Found],
        needed: int | None = None,
    ) -> Found:
        """Runs ``travel`` with the calls of all live trainers, and returns its result; begins again
        if a trainer is lost meanwhile.

        Args:
            needed: the trainer without which there is no result.

        Raises:
            TrainerLost: that trainer is not live.
        """
        while True:
            calls = self._agreed(call)
            if needed is not None and needed not in calls:
                raise TrainerLost(
                    f"{call.words}: trainer {needed} is not among the live trainers: "
                    f"{', '.join(map(str, calls))}"
                )
            alone = partial(travel, {self.rank: call})
            found = self._link.attempted(partial(travel, calls), alone)
            if found is not None:
                return found

    def _agreed(self, call: CallDescription) -> dict[int, CallDescription]:
        """The calls of all live trainers, by trainer.

        Raises:
            ValueError: the calls are not the same.
        """
        told = self._link.gather_texts(json.dumps(asdict(call)))
        calls = {
            trainer: CallDescription(**bounded_json.loads(text)) for trainer, text in told.items()
        }
        first = next(iter(calls))
        others = [trainer for trainer, each in calls.items() if each.same != calls[first].same]
        if others:
            said = [f"trainer {t}: {calls[t].words}" for t in [first, *others[:MOST_NAMED]]]
            more = f"; and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            raise ValueError(
                f"expected the same call on all {len(calls)} trainers, got {'; '.join(said)}{more}"
            )
        return calls

    def _device(self, tensor: Tensor, calls: Mapping[int, CallDescription]) -> torch.device:
        """The device that tensors travel from: the GPUs, if all trainers have theirs there."""
        from_gpus = all(each.device == tensor.device.type for each in calls.values())
        if from_gpus and self._link.on_gpus(tensor.device):
            return tensor.device
        return torch.device("cpu")

    def _gathered(self, flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The bytes of all trainers, which may have different lengths."""
        most = max(lengths)
        if not most:
            return [flat for _ in lengths]
        padded = torch.zeros(most, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)] = flat
        found = self._link.gather(padded)
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def _reduce(self, total: Tensor, op: str) -> None:
        if op not in ("max", "min") or not total.is_floating_point():
            self._link.reduce(total, "sum" if op == "mean" else op)
            return
        # A NaN of any trainer stays one; a backend's comparison may lose it.
        nan = total.isnan()
        anywhere = nan.to(torch.int64)
        self._link.reduce(anywhere, "max")
        total.masked_fill_(nan, 0.0)
        self._link.reduce(total, op)
        total.masked_fill_(anywhere.bool(), torch.nan)


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")


def _check_kind(tensor: Tensor, op: str) -> None:
    if op not in KINDS:
        raise ValueError(f"all_reduce: op: expected one of {', '.join(KINDS)}, got {op!r}")
    dtype: torch.dtype = tensor.dtype
    kinds: Sequence[str] = KINDS
    if dtype is torch.bool:
        kinds = ("max", "min")
    elif tensor.is_complex():
        kinds = ("sum", "mean")
    elif not dtype.is_floating_point:
        kinds = () if dtype is torch.uint64 else ("sum", "max", "min", "prod")
    if op not in kinds:
        has = f"has {', '.join(kinds)}" if kinds else "cannot be reduced"
        raise TypeError(
            f"all_reduce: {_spelled(dtype)} {has}, got op {op!r}: convert the tensor first"
        )


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that every backend reduces."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in WIDE:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _narrowed(total: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """The result in the tensor's own dtype.

    Raises:
        OverflowError: an integer is out of its range, on all trainers alike.
    """
    if dtype in NARROW and total.numel():
        least, most = int(total.min()), int(total.max())
        info = torch.iinfo(dtype)
        if least < info.min or most > info.max:
            found = least if least < info.min else most
            raise OverflowError(
                f"all_reduce: expected a {op} that {_spelled(dtype)} holds, got {found}: convert "
                "the tensor to int64 first"
            )
    return total.to(dtype)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
