"""All-reduces among trainers: the sums by which gradients and parameters are averaged.

A :class:`Group` is a number of trainers: :class:`WorldGroup`, of torch's default process group or a
group of it, or :class:`~trainer.collective.process_groups.ProcessGroups`, of a job whose groups are
its own.  A :class:`Ring` has operations over a group, one after another.  An :class:`AllReduce` has
several rings, and sums as a strategy says.

Operations are started at once, and waited for when a result is needed.

[Note: rows]  In rows (see ``transpiler/plan/plan.py``) a sum is three operations, one after
another.  Each needs the result of the one before, so a thread of the ring's own waits between them;
backward continues meanwhile.

[Note: float16 between trainers]  A gradient is divided by the number of trainers before it becomes
float16, so that no partial sum is larger than the largest gradient of one trainer.  So only a
gradient above 65504, float16's largest number, can overflow, and then it arrives as an infinity on
all trainers, as a scaler expects.  A part below 6e-8 is lost.  Gradients of 16 bits travel as they
are.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainer.collective.rendezvous import Peers
from trainer.collective.world import current_peers, wait_on_cpu
from transpiler.plan.plan import flat_id, heads, heads_id, row_id, row_of, row_or_all
from transpiler.strategy.exchange import GradientExchange


class Group(Protocol):
    """Some trainers, and operations among them.

    Attributes:
        rank, size: this trainer's place in the group, and the number of its trainers.
    """

    @property
    def rank(self) -> int:
        """See the class."""

    @property
    def size(self) -> int:
        """See the class."""

    def split(
        self, name: str, parts: Sequence[Collection[int]], device: torch.device
    ) -> dist.ProcessGroup | None:
        """The process group of the part that this trainer is in; None if it is in none.

        All trainers of the group call this, in the same order.

        Args:
            name: of the division.
            parts: places in the group; no trainer is in two of them.
            device: of the tensors.

        Raises:
            PServerError: a process group does not come up.
        """

    def begin(self, operation: Callable[[], dist.Work], what: str) -> dist.Work:
        """Starts an operation; ``what`` names it in messages.

        Raises:
            PServerError: another trainer is lost.
        """

    def wait(
        self, work: dist.Work, what: str, device: torch.device, seconds: float = math.inf
    ) -> None:
        """Waits for an operation; on a GPU its stream waits, and this returns at once.

        Raises:
            TimedOut: it has not ended after ``seconds``.
            PServerError: another trainer is lost, or has left.
        """


class WorldGroup:
    """The trainers of torch's default process group, or of a group of it: a :class:`Group`.

    Its waits in main memory find lost trainers.

    Args:
        group: None: all trainers.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        whole: Any = dist.group.WORLD
        self._group: dist.ProcessGroup = whole if group is None else group
        self._peers = current_peers()
        self.ranks = dist.get_process_group_ranks(self._group)
        self.rank, self.size = self.ranks.index(self._peers.rank), len(self.ranks)

    def split(
        self, name: str, parts: Sequence[Collection[int]], device: torch.device
    ) -> dist.ProcessGroup | None:
        """See :meth:`Group.split`."""
        if name == flat_id(0):
            return self._group
        # torch makes a group on all trainers, also on those that are not in it
        made = [(part, dist.new_group([self.ranks[place] for place in part])) for part in parts]
        return next((group for part, group in made if self.rank in part), None)

    def begin(self, operation: Callable[[], dist.Work], what: str) -> dist.Work:
        """See :meth:`Group.begin`."""
        return operation()

    def wait(
        self, work: dist.Work, what: str, device: torch.device, seconds: float = math.inf
    ) -> None:
        """See :meth:`Group.wait`."""
        if device.type == "cpu":
            wait_on_cpu(work, self._peers, self._group, seconds)
        else:
            work.wait()


def trainers_in_a_row(
    exchange: GradientExchange, peers: Peers, ranks: Sequence[int], topic: str = "hosts"
) -> int:
    """The number of trainers in a row; 0: no rows.

    Args:
        peers: all trainers of the job.
        ranks: of the group's trainers, each of which calls this.
        topic: under which they exchange their hosts' names; used once.

    Raises:
        ValueError: the trainers do not divide into rows.
    """
    if exchange.row is None:
        return 0
    return row_or_all(exchange.row, peers.meet(topic, platform.node(), ranks))


# ---- rings ----


class PendingTensors:
    """The results of an operation that has begun.

    Args:
        finish: waits for the tensors and returns them; called once.
    """

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish = finish
        self._results: list[Tensor] | None = None

    def result(self, index: int) -> Tensor:
        """Waits for all results, and returns one of them."""
        if self._results is None:
            self._results = self._finish()
        return self._results[index]


class Ring:
    """Operations over a group.  All its trainers create their rings in the same order.

    A bucket of tensors travels as one flat copy, so the tensors that backward still reads are never
    written to.

    Args:
        group: the trainers.
        inner: the number of trainers in a row; 0: no rows.
        number: of the ring.
        device: of the tensors that it takes.
        programs: whether it has broadcasts and reductions to one trainer, too.

    Raises:
        PServerError: a process group does not come up.
    """

    def __init__(
        self, group: Group, inner: int, number: int, device: torch.device, programs: bool = False
    ) -> None:
        self._group, self._device = group, device
        self._flat = self._row = self._heads = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        if programs or not inner:
            self._flat = group.split(flat_id(number), [range(group.size)], device)
        if not inner:
            return
        first = heads(group.size, inner)
        rows = [row_of(place, inner) for place in first]
        self._row = group.split(row_id(number), rows, device)
        if len(first) > 1:
            self._heads = group.split(heads_id(number), [first], device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ring {number}")
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, flat: Tensor, what: str, seconds: float = math.inf) -> Callable[[], None]:
        """Begins a sum over all trainers, in place.

        Args:
            flat: overwritten.
            what: the operation, for messages.
            seconds: the longest wait; in rows, the limit does not apply.

        Returns:
            A function that waits for the sum.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        if self._thread is not None:
            return self._in_rows(self._thread, flat, what)
        all_trainers: Any = self._flat
        work = self._group.begin(lambda: all_trainers.allreduce([flat]), what)
        return lambda: self._group.wait(work, what, flat.device, seconds)

    def _in_rows(self, thread: ThreadPoolExecutor, flat: Tensor, what: str) -> Callable[[], None]:
        """See [Note: rows]."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()
            flat.record_stream(self._stream)
        done: Future[torch.cuda.Event | None] = thread.submit(self._three_parts, flat, ready, what)

        def wait() -> None:
            event = done.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

        return wait

    def _three_parts(
        self, flat: Tensor, ready: torch.cuda.Event | None, what: str
    ) -> torch.cuda.Event | None:
        if self._stream is None or ready is None:
            self._parts(flat, what)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            self._parts(flat, what)
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def _parts(self, flat: Tensor, what: str) -> None:
        row: Any = self._row
        between: Any = self._heads
        self._do(lambda: row.reduce([flat], dist.ReduceOptions()), f"{what}, within the row")
        if between is not None:
            self._do(
                lambda: between.allreduce([flat], dist.AllreduceOptions()), f"{what}, between rows"
            )
        self._do(
            lambda: row.broadcast([flat], dist.BroadcastOptions()),
            f"{what}, broadcast within the row",
        )

    def sum(
        self, tensors: Sequence[Tensor], what: str, seconds: float = math.inf
    ) -> PendingTensors:
        """Begins the sum over all trainers of tensors of one dtype; see :meth:`begin`.

        Returns:
            New tensors of the same shapes.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        arrived = self.begin(flat, what, seconds)

        def finish() -> list[Tensor]:
            arrived()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            return [
                self._like(part.view(tensor.shape), tensor)
                for part, tensor in zip(parts, tensors, strict=True)
            ]

        return PendingTensors(finish)

    def _like(self, value: Tensor, tensor: Tensor) -> Tensor:
        """The value, with the tensor's strides if there is one trainer: norms add up in the order
        of memory, and with one trainer every bit must be the same.
        """
        return torch.empty_like(tensor).copy_(value) if self._group.size == 1 else value

    def broadcast(self, tensors: Sequence[Tensor], root: int, what: str) -> PendingTensors:
        """Begins to send one trainer's values, of any dtypes, to all, in one message.

        Args:
            what: the operation, for messages.

        Returns:
            New tensors.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        all_trainers: Any = self._flat
        options = dist.BroadcastOptions()
        options.rootRank = root
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
        work = self._group.begin(lambda: all_trainers.broadcast([flat], options), what)

        def finish() -> list[Tensor]:
            self._group.wait(work, what, self._device)
            parts = torch.split(flat, [tensor.nbytes for tensor in tensors])
            return [
                # a copy: its memory is aligned for the dtype
                part.clone().view(tensor.dtype).view(tensor.shape)
                for part, tensor in zip(parts, tensors, strict=True)
            ]

        return PendingTensors(finish)

    def reduce(self, tensor: Tensor, root: int, what: str) -> PendingTensors:
        """Begins the sum of a tensor over all trainers, for one of them.

        Args:
            root: the trainer that gets the sum; the others' results have no meaning.
            what: the operation, for messages.

        Returns:
            A new tensor.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        all_trainers: Any = self._flat
        options = dist.ReduceOptions()
        options.rootRank = root
        copy = tensor.detach().reshape(-1).clone()
        work = self._group.begin(lambda: all_trainers.reduce([copy], options), what)

        def finish() -> list[Tensor]:
            self._group.wait(work, what, self._device)
            return [self._like(copy.view(tensor.shape), tensor)]

        return PendingTensors(finish)

    def _do(self, operation: Callable[[], dist.Work], what: str) -> None:
        self._group.wait(self._group.begin(operation, what), what, self._device)

    def close(self) -> None:
        """Ends the ring's thread, if it has one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


# ---- sums as a strategy says ----


class AllReduce:
    """Sums of flat tensors over a group, as a strategy says.

    All trainers create theirs in the same order, and begin the same sums in the same order.

    Args:
        group: the trainers.
        exchange: how gradients travel.
        device: of the tensors.
        inner: the number of trainers in a row: see :func:`trainers_in_a_row`.

    Raises:
        PServerError: a process group does not come up.
    """

    def __init__(
        self, group: Group, exchange: GradientExchange, device: torch.device, inner: int = 0
    ) -> None:
        self._exchange, self._device = exchange, device
        self._rings = [Ring(group, inner, number, device) for number in range(exchange.rings)]

    def begin(
        self, flat: Tensor, bucket: int, what: str = "", seconds: float = math.inf
    ) -> Callable[[], None]:
        """Begins a sum, in place.

        Args:
            flat: overwritten.
            bucket: its number; buckets take the rings in turn.
            what: the operation, for messages.
            seconds: the longest wait; in rows, the limit does not apply.

        Returns:
            A function that waits for the sum, which ``flat`` then holds.

        Raises:
            PServerError: another trainer is lost, or has left.
        """
        ring = self._rings[bucket % len(self._rings)]
        arrived = ring.begin(flat, what or f"the sum of bucket {bucket}", seconds)
        if not self._exchange.waits:
            return arrived
        arrived()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return lambda: None

    def begin_gradients(self, flat: Tensor, bucket: int) -> Callable[[], None]:
        """Begins a sum of gradients, which have been divided already, as :meth:`begin` does; they
        travel as float16 where the strategy says so.
        """
        sent = as_sent(flat, self._exchange)
        arrived = self.begin(sent, bucket)
        if sent is flat:
            return arrived

        def finish() -> None:
            arrived()
            flat.copy_(sent)

        return finish

    def scale_and_sum(
        self, tensors: Sequence[Tensor], order: Sequence[Sequence[int]], factor: float
    ) -> None:
        """Sums gradients or parameters over the trainers, times a factor, in flat buckets.

        Args:
            tensors: overwritten.
            order: the numbers of each bucket's tensors, of one dtype and device.
            factor: multiplies each tensor before it is summed.

        Raises:
            PServerError: another trainer is lost, or has left.
        """
        for place, bucket in enumerate(order):
            own = [tensors[number] for number in bucket]
            flat = _flatten_dense_tensors(own).mul_(factor)  # type: ignore[no-untyped-call]  # torch's own
            self.begin_gradients(flat, place)()
            sums = _unflatten_dense_tensors(flat, own)  # type: ignore[no-untyped-call]  # torch's own
            for tensor, total in zip(own, sums, strict=True):
                tensor.copy_(total)

    def close(self) -> None:
        """Ends its threads, if it has some."""
        for ring in self._rings:
            ring.close()


def all_reduce_over(
    group: dist.ProcessGroup | None, exchange: GradientExchange, device: torch.device, topic: str
) -> AllReduce:
    """The sums over a group of torch's default one, or over all trainers.

    Args:
        topic: under which the trainers exchange their hosts' names, for rows; used once.

    Raises:
        ValueError: the trainers do not divide into rows.
        PServerError: a process group does not come up.
    """
    over = WorldGroup(group)
    inner = trainers_in_a_row(exchange, current_peers(), over.ranks, f"{topic}, hosts")
    return AllReduce(over, exchange, device, inner)


def as_sent(gradients: Tensor, exchange: GradientExchange) -> Tensor:
    """The tensor that is sent: another one if gradients travel as float16."""
    wide = gradients.is_floating_point() and gradients.element_size() > 2
    return gradients.to(torch.float16) if exchange.dtype and wide else gradients
