"""The shards of one rank: the parts of a model's trainable parameters that its optimizer steps, one
flat or local tensor of each.

An optimizer never sees that it is sharded: its groups hold shards, plain parameters whose memory is
part of the model's own (or a copy on the host, with ``offload``), and its state is as large as they
are.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.sharding.bucket import Bucket, buckets_of
from trainer.sharding.collectives import all_gather
from trainer.sharding.reducer import Reducer

Values = dict[nn.Parameter, Tensor]
_NOTHING: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)


class Shards(ABC):
    """The shards of one rank.  The script's thread uses them; gradients may arrive in autograd's.

    Attributes:
        group: the ranks that share the model.
        of: each of the model's parameters with its shard, which may have no elements.
        whole: those among the keys of ``of`` that every rank has whole.
        former: the parameters that the optimizer knew before, where sharding has put others in
            their place: those others.
    """

    group: dist.ProcessGroup
    of: dict[nn.Parameter, nn.Parameter]
    whole: set[nn.Parameter]
    former: dict[nn.Parameter, nn.Parameter]

    @abstractmethod
    def refresh(self) -> None:
        """Before a step: a gradient that the script has dropped is dropped here too."""

    @abstractmethod
    def moved(self) -> Iterator[nn.Parameter]:
        """The parameters whose shard is no part of them any more: they have been cast, or have
        other memory.
        """

    @abstractmethod
    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiplies those gradients of the model's of which the optimizer has copies, as the
        copies were.
        """

    @abstractmethod
    def publish(self) -> None:
        """After a step: every rank sees the new parameters."""

    @abstractmethod
    def drop_gradients(self, to_none: bool) -> None:
        """As ``zero_grad`` of the whole model does."""

    @abstractmethod
    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's copy of its part of a tensor of the parameter's shape; it has the shard's
        shape.
        """

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor of the model's ``state_dict()``, whole.  All ranks call this."""
        return tensor

    def summed(self, parameters: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        """Numbers of this rank's shards (1-D, one for each parameter), added up over the ranks that
        have other shards of the parameters.
        """
        shared = torch.tensor(
            [parameter not in self.whole for parameter in parameters], device=squares.device
        )
        total = squares * shared
        dist.all_reduce(total, group=self.group)
        return torch.where(shared, total, squares)

    def everywhere(self, total: Tensor) -> Tensor:
        """A number of all of this rank's parameters, added up over ranks that have others; here
        there are none such.
        """
        return total

    @abstractmethod
    def joined(self, values: Mapping[nn.Parameter, Tensor]) -> Values:
        """Tensors of the parameters' shapes from every rank's parts.

        All ranks call this with the same keys.
        """


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype, and of the same place."""
    return one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


def _own_memory(bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
    """The bucket's parameters as views of one flat block of memory, with the values of the group's
    first rank.
    """
    flat = bucket.memory()
    for parameter, begin, end in bucket.spans():
        flat[begin:end].copy_(parameter.detach().reshape(-1))
        parameter.data = flat[begin:end].view(parameter.shape)
    dist.broadcast(flat, group=group, group_src=0)
    return flat


class FlatShards(Shards):
    """Parameters whole on every rank, each rank's optimizer with its share of every bucket: levels
    "os" and "os_g".

    Why not torch's ZeroRedundancyOptimizer: it gives whole tensors to ranks, so one large matrix is
    all one rank's, and it keeps the class and defaults of an optimizer, not its groups and state.

    Args:
        parameters: that require gradients.
        scatter: gradients too are divided ("os_g").
        most: elements of a bucket.
        at_once: nothing overlaps with backward.
        apart: shards are copies on the host, and so is the optimizer's state.
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
        # the gradients of which the shards have copies, and their versions then
        self._copied: dict[nn.Parameter, tuple[Callable[[], Tensor | None], int]] = {}
        for bucket, held in zip(self.reducer.buckets, self._held, strict=True):
            for parameter, begin, end in bucket.shares(self._rank):
                self.of[parameter] = nn.Parameter(held[begin:end])
        self._first = {  # where in its parameter each shard begins
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
        """The shards' gradients of these are copies as of now, where they are apart."""
        for parameter in parameters if self._apart else ():
            if (gradient := parameter.grad) is not None:
                self._copied[parameter] = weakref.ref(gradient), gradient._version

    def refresh(self) -> None:
        """See :class:`Shards`.  What the script has done to a gradient of the model's, since it was
        copied to the host, is done to the copy.
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
