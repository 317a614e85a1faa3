"""The shards of one rank: the parts of a model's trainable parameters that its optimizer steps, one
flat or local tensor for each.

The sharding is hidden from the optimizer: its groups hold shards, plain parameters whose memory is
part of the model's own (or a copy on the host, with ``offload``), and its state has the shards'
size.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pserver.errors import FingerprintMismatch
from trainer.collective.world import current_peers
from transpiler.clip import (
    ClipGradByGlobalNorm,
    ClipGradByValue,
    GradClip,
    clip_value,
    coefficient_of_norm,
)
from transpiler.files import bounded_json
from transpiler.plan.plan import differences

# ---- agreement ----
#
# Agreement of a group's ranks: a difference is reported before a collective would block.


# agreements made so far, by group: each has a topic of its own
_made: Counter[str] = Counter()


def metadata_of(model: nn.Module) -> dict[str, str]:
    """A model's tensors, by name, as text."""

    def form(tensor: torch.Tensor) -> str:
        gradient = "" if tensor.requires_grad else " without gradient"
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{gradient}"

    return {
        name: form(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def agree(what: str, metadata: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compares metadata over a group; all its ranks call this.

    Args:
        what: the compared thing, for messages.

    Raises:
        FingerprintMismatch: a rank's metadata differ from those of the group's first rank; the
            message names the rank and the difference.
        TimedOut: a rank does not call this.
    """
    ranks = dist.get_process_group_ranks(group)
    _made[group.group_name] += 1
    topic = f"{what} {_made[group.group_name]} of group {group.group_name}"
    said = current_peers().meet(topic, json.dumps(dict(metadata)), ranks)
    first = bounded_json.loads(said[0])
    for rank, text in zip(ranks, said, strict=True):
        if text != said[0]:
            found = (
                differences(bounded_json.loads(text), first, f"trainer {ranks[0]}")
                or "the same in another order"
            )
            raise FingerprintMismatch(
                f"{what}: expected the same on all trainers, got on trainer {rank}: {found}"
            )


# ---- buckets ----
#
# A bucket: parameters whose gradients travel together, laid out one after the other in a flat block
# of memory.
#
# ::
#
#   | weight ............ | bias | weight2 .................. | pad |    bucket.size elements
#   | rank 0's                   | rank 1's                         |    bucket.share elements each
#
# A bucket's length is a multiple of the ranks, so that all ranks' shares are equal, however large
# the tensors: a model of one large matrix is shared as evenly as one of many.


ALIGN = 16  # elements: every share begins at an address that suits vector loads


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The layout of some parameters of one dtype on one device, for ``ranks`` ranks."""

    parameters: tuple[nn.Parameter, ...]
    ranks: int

    @property
    def size(self) -> int:
        """The number of elements, including the pad."""
        unit = self.ranks * ALIGN
        return -(-sum(parameter.numel() for parameter in self.parameters) // unit) * unit

    @property
    def share(self) -> int:
        """The number of elements of one rank."""
        return self.size // self.ranks

    def spans(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Each parameter with its first element and the end after its last one."""
        at = 0
        for parameter in self.parameters:
            yield parameter, at, at + parameter.numel()
            at += parameter.numel()

    def shares(self, rank: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Each parameter's part in a rank's share: its first element there and the end after its
        last one; the two are equal for an empty part.
        """
        low = rank * self.share
        for parameter, begin, end in self.spans():
            first, last = (min(max(at - low, 0), self.share) for at in (begin, end))
            yield parameter, first, last

    def memory(self, device: torch.device | None = None) -> Tensor:
        """New memory for the whole bucket, on its parameters' device unless another is given; only
        the pad is initialized, to 0.
        """
        first = self.parameters[0]
        flat = torch.empty(self.size, dtype=first.dtype, device=device or first.device)
        flat[sum(parameter.numel() for parameter in self.parameters) :].zero_()
        return flat


def after_gradient(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Calls a method after each gradient of a parameter, for as long as its object lives.  The hook
    holds a weak reference, as the garbage collector does not see through hooks.
    """
    known = WeakMethod(method)

    def call(parameter: Tensor) -> None:
        present = known()
        if present is not None:
            present(parameter)

    parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]  # torch's own


def buckets_of(parameters: Sequence[nn.Parameter], ranks: int, most: int) -> list[Bucket]:
    """Buckets of at most ``most`` elements, in the order in which backward is likely to finish: the
    last parameters first.

    A tensor of more elements has a bucket of its own; dtypes and devices are never mixed.
    """
    filled: list[Bucket] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = kinds.setdefault((parameter.dtype, parameter.device), [])
        if kind and sum(other.numel() for other in kind) + parameter.numel() > most:
            filled.append(Bucket(tuple(kind), ranks))
            kind.clear()
        kind.append(parameter)
    return filled + [Bucket(tuple(kind), ranks) for kind in kinds.values() if kind]


# ---- collectives ----
#
# torch's collectives over flat memory, under the names of the installed torch.


Collective = Callable[..., Any]

# (output, input, group=, async_op=); torch 2.13 renamed them.
all_gather: Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Collective = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


# ---- reducer ----
#
# The means of gradients over a group, bucket by bucket, while backward is still running.
#
# ::
#
#   backward:   ... gradient, gradient | gradient ...              | end
#   bucket 0:                          | reduce ...........|       |
#   bucket 1:                                     | reduce .|.......| wait, deliver
#
# Buckets are sent in one order everywhere, whichever is full first: ranks would otherwise reduce
# different buckets with one another.  At most two are on their way, so that the memory of whole
# gradients stays bounded if each rank keeps its share only.  At the end of backward a missing
# gradient counts as zero; a parameter without a gradient on any rank gets none, as on a single
# node.
#
# A backward that runs within another (a reentrant checkpoint's) is a pass of its own, which ends
# before the other does; their means add up.


# Takes a bucket, its mean (all of it, or this rank's share), and the parameters that have a
# gradient on some rank.
Deliver = Callable[[Bucket, Tensor, set[nn.Parameter]], None]
_IN_FLIGHT = 2


@dataclass(slots=True)
class _Pass:
    """One backward pass: the gradients that have arrived, and the buckets that have been sent."""

    arrived: set[nn.Parameter] = field(default_factory=set)
    left: int = 0  # buckets
    # the operation, and the memory that must live as long
    flying: list[tuple[Any, Tensor]] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)


class Reducer:
    """Averages gradients over a group, in every backward.

    Args:
        buckets: of parameters that require gradients.
        group: of the ranks, which all run the same number of backward passes.
        scatter: whether each rank gets only its share of a bucket, and no ``p.grad`` is left;
            otherwise all get the whole bucket.
        at_once: whether to wait for a bucket when it is sent, so that nothing overlaps.
        deliver: takes the results at the end of backward.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        scatter: bool,
        at_once: bool,
        deliver: Deliver,
    ) -> None:
        self.buckets, self._group, self._scatter, self._at_once, self._deliver = (
            tuple(buckets),
            group,
            scatter,
            at_once,
            deliver,
        )
        self.reductions = 0  # collectives that carried gradients
        self._passes: dict[int, _Pass] = {}  # by number; a later one runs within an earlier one
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                after_gradient(parameter, self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            # as torch's own reducers do
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, task))
        now = self._passes[task]
        assert isinstance(parameter, nn.Parameter)
        now.arrived.add(parameter)
        while now.left < len(self.buckets) and now.arrived.issuperset(
            self.buckets[now.left].parameters
        ):
            self._send(now)

    @torch.no_grad()
    def _send(self, now: _Pass) -> None:
        bucket = self.buckets[now.left]
        now.left += 1
        whole = bucket.memory()
        for parameter, begin, end in bucket.spans():
            if parameter.grad is None:
                whole[begin:end].zero_()
            else:  # divided before it is summed, as DDP does
                now.arrived.add(parameter)  # its gradient may be from an earlier backward
                torch.mul(parameter.grad.reshape(-1), 1.0 / bucket.ranks, out=whole[begin:end])
                parameter.grad = None
        if self._scatter:
            result = whole.new_empty(bucket.share)
            work = reduce_scatter(result, whole, group=self._group, async_op=True)
        else:
            result = whole
            work = dist.all_reduce(whole, group=self._group, async_op=True)
        self.reductions += 1
        now.results.append(result)
        now.flying.append((work, whole))
        self._wait(now, 0 if self._at_once else _IN_FLIGHT)

    @staticmethod
    def _wait(now: _Pass, most: int) -> None:
        """Waits until at most ``most`` buckets are on their way."""
        while len(now.flying) > most:
            work, _ = now.flying.pop(0)
            work.wait()

    def forget(self) -> None:
        """Drops the passes of backwards that have failed."""
        self._passes.clear()

    def _finish(self, task: int) -> None:
        now = self._passes.pop(task)
        while now.left < len(self.buckets):
            self._send(now)
        anywhere = self._anywhere(now.arrived)
        self._wait(now, 0)
        for bucket, result in zip(self.buckets, now.results, strict=True):
            if not self._scatter:
                _add_later(bucket, result)
            self._deliver(bucket, result, anywhere)

    def _anywhere(self, arrived: set[nn.Parameter]) -> set[nn.Parameter]:
        """The parameters with a gradient on some rank."""
        ours = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        if dist.get_world_size(self._group) == 1:
            return arrived
        marks = torch.tensor(
            [parameter in arrived for parameter in ours], dtype=torch.int32, device=ours[0].device
        )
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        return {parameter for parameter, mark in zip(ours, marks.tolist(), strict=True) if mark}


@torch.no_grad()
def _add_later(bucket: Bucket, result: Tensor) -> None:
    """Adds the gradients that a backward within this one delivered after the bucket was sent."""
    for parameter, begin, end in bucket.spans():
        if parameter.grad is not None:
            result[begin:end].add_(parameter.grad.reshape(-1))


# ---- shards ----


Values = dict[nn.Parameter, Tensor]
_NOTHING: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)


class Shards(ABC):
    """The shards of one rank.  The script's thread uses them; gradients may arrive in autograd's.

    Attributes:
        group: the ranks that share the model.
        of: the shard of each of the model's parameters; it may be empty.
        whole: the parameters in ``of`` that every rank has whole.
        former: maps the parameters that the optimizer had before to the parameters that sharding
            has put in their place.
    """

    group: dist.ProcessGroup
    of: dict[nn.Parameter, nn.Parameter]
    whole: set[nn.Parameter]
    former: dict[nn.Parameter, nn.Parameter]

    @abstractmethod
    def refresh(self) -> None:
        """Updates the shards' gradients before a step: a gradient that the script has dropped is
        dropped here too.
        """

    @abstractmethod
    def moved(self) -> Iterator[nn.Parameter]:
        """The parameters whose shard is no longer a part of them: they have been cast, or have
        other memory.
        """

    @abstractmethod
    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiplies the model's gradients by a factor, where the optimizer has copies that were
        multiplied already.
        """

    @abstractmethod
    def publish(self) -> None:
        """Gives every rank the new parameters after a step."""

    @abstractmethod
    def drop_gradients(self, to_none: bool) -> None:
        """Drops gradients, as ``zero_grad`` of the whole model does."""

    @abstractmethod
    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's copy of its part of a tensor of the parameter's shape; it has the shard's
        shape.
        """

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor of the model's ``state_dict()``, whole.  All ranks call this."""
        return tensor

    def summed(self, parameters: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        """Sums numbers of this rank's shards (1-D, one for each parameter) over the ranks with
        other shards of the parameters.
        """
        shared = torch.tensor(
            [parameter not in self.whole for parameter in parameters], device=squares.device
        )
        total = squares * shared
        dist.all_reduce(total, group=self.group)
        return torch.where(shared, total, squares)

    def everywhere(self, total: Tensor) -> Tensor:
        """Sums a number of all of this rank's parameters over ranks with other parameters; in this
        class there are none.
        """
        return total

    @abstractmethod
    def joined(self, values: Mapping[nn.Parameter, Tensor]) -> Values:
        """Joins every rank's parts to tensors of the parameters' shapes.

        All ranks call this with the same keys.
        """


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, and begin at the same memory."""
    return one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


def _own_memory(bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
    """Makes the bucket's parameters views of one flat block of memory, with the values of the
    group's first rank.
    """
    flat = bucket.memory()
    for parameter, begin, end in bucket.spans():
        flat[begin:end].copy_(parameter.detach().reshape(-1))
        parameter.data = flat[begin:end].view(parameter.shape)
    dist.broadcast(flat, group=group, group_src=0)
    return flat


class FlatShards(Shards):
    """Shards of parameters that every rank has whole: each rank's optimizer has its share of every
    bucket (levels "os" and "os_g").

    torch's ZeroRedundancyOptimizer does not fit: it gives whole tensors to ranks, so one large
    matrix belongs to one rank, and it keeps the class and defaults of an optimizer, not its groups
    and state.

    Args:
        parameters: that require gradients.
        scatter: whether gradients are divided, too ("os_g").
        most: the most elements of a bucket.
        at_once: whether reductions are waited for at once, so that nothing overlaps with backward.
        apart: whether shards are copies on the host, and so the optimizer's state.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        scatter: bool,
        most: int,
        at_once: bool,
        apart: bool,
    ) -> None:
        self.group, self._scatter, self._apart = group, scatter, apart
        self._rank = dist.get_rank(group)
        self.reducer = Reducer(
            buckets_of(parameters, dist.get_world_size(group), most),
            group,
            scatter,
            at_once,
            self._take_gradients,
        )
        self.of, self.whole, self.former = {}, set(), {}
        self._memory = [_own_memory(bucket, group) for bucket in self.reducer.buckets]
        self._shares = [
            self._share(bucket, flat)
            for bucket, flat in zip(self.reducer.buckets, self._memory, strict=True)
        ]
        self._held = [share.to("cpu", copy=True) if apart else share for share in self._shares]
        # the gradients that the shards have copies of, and their versions then
        self._copied: dict[nn.Parameter, tuple[Callable[[], Tensor | None], int]] = {}
        for bucket, held in zip(self.reducer.buckets, self._held, strict=True):
            for parameter, begin, end in bucket.shares(self._rank):
                self.of[parameter] = nn.Parameter(held[begin:end])
        self._first = {  # the offset of each shard in its parameter
            parameter: max(self._rank * bucket.share - begin, 0)
            for bucket in self.reducer.buckets
            for parameter, begin, _ in bucket.spans()
        }

    def _share(self, bucket: Bucket, flat: Tensor) -> Tensor:
        return flat[self._rank * bucket.share : (self._rank + 1) * bucket.share]

    def _take_gradients(self, bucket: Bucket, result: Tensor, anywhere: set[nn.Parameter]) -> None:
        share = result if self._scatter else self._share(bucket, result)
        share = share.to("cpu", copy=True) if self._apart else share
        for parameter, begin, end in bucket.shares(self._rank):
            if parameter not in anywhere:
                continue
            shard = self.of[parameter]
            if self._scatter and shard.grad is not None:
                shard.grad.add_(share[begin:end])
            else:
                shard.grad = share[begin:end]
        if not self._scatter:
            for parameter, begin, end in bucket.spans():
                if parameter in anywhere:
                    parameter.grad = result[begin:end].view(parameter.shape)
            self._note_copies(parameter for parameter, *_ in bucket.spans())

    def _note_copies(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes that the shards' gradients of these parameters are present copies, if shards are
        apart.
        """
        for parameter in parameters if self._apart else ():
            if (gradient := parameter.grad) is not None:
                self._copied[parameter] = weakref.ref(gradient), gradient._version

    def refresh(self) -> None:
        """See :class:`Shards`.  A gradient of the model that the script has changed since it was
        copied to the host is copied again.
        """
        self.reducer.forget()
        if self._scatter:
            return
        for parameter, shard in self.of.items():
            gradient, (copied, version) = parameter.grad, self._copied.get(parameter, _NOTHING)
            if gradient is None:
                shard.grad = None
            elif self._apart and (gradient is not copied() or gradient._version != version):
                shard.grad = self.part(parameter, gradient)
        self._note_copies(self.of)

    def moved(self) -> Iterator[nn.Parameter]:
        """See :class:`Shards`."""
        for bucket, flat in zip(self.reducer.buckets, self._memory, strict=True):
            base, size = flat.data_ptr(), flat.element_size()
            for parameter, begin, _ in bucket.spans():
                if parameter.dtype != flat.dtype or parameter.data_ptr() != base + begin * size:
                    yield parameter

    def multiply_gradients(self, factor: Tensor) -> None:
        if self._scatter:
            return
        for parameter in self.of if self._apart else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
        self._note_copies(self.of)

    def publish(self) -> None:
        for share, held in zip(self._shares, self._held, strict=True):
            if self._apart:
                share.copy_(held)
        works = [
            all_gather(flat, share, group=self.group, async_op=True)
            for flat, share in zip(self._memory, self._shares, strict=True)
        ]
        for work in works:
            work.wait()

    def drop_gradients(self, to_none: bool) -> None:
        for parameter, shard in self.of.items():
            for tensor in (parameter, shard):
                if to_none:
                    tensor.grad = None
                elif tensor.grad is not None:
                    tensor.grad.zero_()
        self._note_copies(self.of)

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        shard = self.of[parameter]
        begin = self._first[parameter]
        return value.detach().reshape(-1)[begin:][: shard.numel()].to(shard.device, copy=True)

    def joined(self, values: Mapping[nn.Parameter, Tensor]) -> Values:
        found: Values = {}
        for bucket, flat in zip(self.reducer.buckets, self._memory, strict=True):
            here = [
                value
                for parameter in bucket.parameters
                if (value := values.get(parameter)) is not None
            ]
            for dtype in dict.fromkeys(value.dtype for value in here):
                gathered = torch.empty(bucket.size, dtype=dtype, device=flat.device)
                share = self._share(bucket, gathered)
                for parameter, begin, end in bucket.shares(self._rank):
                    if parameter in values and values[parameter].dtype == dtype:
                        share[begin:end].copy_(values[parameter])
                all_gather(gathered, share.clone(), group=self.group)
                for parameter, begin, end in bucket.spans():
                    if parameter in values and values[parameter].dtype == dtype:
                        found[parameter] = gathered[begin:end].view(parameter.shape).clone()
        return found


# ---- norms ----
#
# Clipping of gradients in shards on several ranks: the norms are those of the whole tensors.


def clip_gradients(clip: GradClip, shards: Shards, device: torch.device) -> None:
    """Clips every shard's gradient in place, as a single node would clip the whole gradients; all
    ranks call this.

    Args:
        device: of the tensors by which the group communicates.
    """
    present = [
        (parameter, shard) for parameter, shard in shards.of.items() if shard.grad is not None
    ]
    if not present:
        return
    with torch.no_grad():
        if isinstance(clip, ClipGradByValue):
            for _, shard in present:
                _gradient(shard).copy_(clip_value(_gradient(shard), clip.min, clip.max))
            return
        norms = _squares(shards, [parameter for parameter, _ in present], device)
        if isinstance(clip, ClipGradByGlobalNorm):
            norms = shards.everywhere(norms.sum()).expand_as(norms)
        factors = coefficient_of_norm(norms.sqrt(), clip.clip_norm)
        for (_, shard), factor in zip(present, factors, strict=True):
            _gradient(shard).mul_(factor.to(shard.device, shard.dtype))


def _gradient(shard: nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad


def _squares(shards: Shards, parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    """The square of each whole gradient's 2-norm: 1-D, float32, or float64 if a gradient is."""
    grads = [_gradient(shards.of[parameter]) for parameter in parameters]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    squares = torch.stack(
        [torch.linalg.vector_norm(grad, dtype=dtype).to(device) for grad in grads]
    ).square()
    return shards.summed(parameters, squares)


# ---- replica mean ----
#
# The mean of gradients over replicas, in the update instead of in backward.


@torch.no_grad()
def average_over(shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gives each shard the mean of its gradients over a group, in one all-reduce for each dtype.

    A gradient that is missing on some ranks counts as zero there; one that is missing on all stays
    so.  All ranks of the group call this.

    Args:
        shards: the same on all ranks.
        group: the replicas.
    """
    ranks = dist.get_world_size(group)
    if not shards or ranks == 1:
        return
    device = shards[0].device
    have = torch.tensor([shard.grad is not None for shard in shards], device=device).int()
    dist.all_reduce(have, op=dist.ReduceOp.MAX, group=group)
    present = [shard for shard, found in zip(shards, have.tolist(), strict=True) if found]
    for shard in present:
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
    for dtype in dict.fromkeys(shard.dtype for shard in present):
        gradients = [s.grad for s in present if s.dtype == dtype and s.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / ranks
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(
            gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(mean.view(gradient.shape))
