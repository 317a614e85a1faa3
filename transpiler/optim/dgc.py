"""Deep gradient compression: a step sends few elements of a large gradient and keeps the others.
Pure arithmetic.

[Note: deep gradient compression]  Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, 2018
(arXiv 1712.01887).  A trainer keeps two tensors of each large parameter.  ``velocity`` (the paper's
u) is the momentum of its own gradients.  ``residual`` (v) is what it has not sent yet.  In a step::

    velocity = momentum * velocity + gradient
    residual = residual + velocity          (nesterov: + gradient + momentum * velocity)
    sent     = the k elements of residual that are largest by magnitude
    velocity, residual = 0 where something was sent

and all trainers step by plain SGD with the mean of what was sent.

*Momentum correction.*  Momentum comes before the choice of elements, on the trainer, and nowhere
else.  A server that applied it to sparse gradients would forget, at an element that is sent every
thousandth step, what momentum is; one that applied it again would square it.  So the rule of these
parameters is ``sgd`` in the plan and in the servers' blocks, from the first step on, and no server
has a velocity of them.

*Before the ramp* nothing waits: velocity is sent whole.  Momentum is linear, so the mean of the
trainers' velocities is the velocity of the mean gradient: the update is the momentum SGD that the
script wrote, up to rounding, and to the bit with one trainer.  That is why the change to sparse
steps needs no message and loses no velocity.  Each trainer continues with its own.

*Momentum factor masking.*  Velocity is cleared with the residual: momentum would carry an element
that has waited long on in a stale direction.

*Warm-up.*  The sparsities of the list hold for equally many steps each, ``rampup_step`` of them
together; then the last one stays.

*Weight decay* is a part of the gradient, added before momentum, as torch's SGD does.  It uses the
parameter as this trainer has it.

*Local gradient clipping.*  A merged sparse gradient, whose elements are sums of many steps, says
nothing about this step's norm, so each trainer clips before momentum.  The paper clips
a trainer's share of the sum of gradients to N^(-1/2) of the bound, N trainers: shares that are
independent add up to the bound.  Here the sum is a mean, and a trainer's share of it is its
gradient divided by N.  So the gradient itself is clipped to N^(1/2) times the bound.  In
modes that merge nothing it is clipped to the bound.

*How many.*  k is the whole part of (1 - sparsity) * n, at least 1, of the decimal number that was
written: 0.9 leaves 100 of 1000 elements, though the float 1 - 0.9 is below 0.1.  An element takes 8
bytes in float32, position and value, so a step takes 2 (1 - sparsity) of a whole gradient's bytes.
Fewer leave only where fewer are not 0.  The choice is over the whole tensor, wherever servers cut
it.  A tensor below ``LEAST`` elements
stays whole: it costs little, and its few elements are worth much.

*What is lost.*  Velocity and residual are a trainer's own.  They are in no checkpoint: after a
restart they begin at zero.  A step that is refused (an overflow on another trainer) leaves both as
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ---- optimizers that follow another ----
#
# An optimizer of another rule that takes an optimizer's place: its groups have that one's rates.


Group = dict[str, Any]
Summed = Callable[[list[Tensor], Tensor], Tensor]


def _as_they_are(weights: list[Tensor], squares: Tensor) -> Tensor:
    return squares


class FollowingOptimizer(torch.optim.Optimizer):
    """Steps groups of parameters, and may follow the groups of the optimizer that it replaces.

    A scheduler keeps the optimizer that it was made for, and moves that one's groups.  A group that
    follows another takes over its hparams whenever groups are read.

    Args:
        params: float tensors of any shape, or parameter groups.
        defaults: hparams of groups that give no others.
    """

    _leaders: Sequence[tuple[Group, Group, tuple[str, ...]]] = ()  # a copy has none

    def __init__(self, params: Any, defaults: Mapping[str, Any]) -> None:
        super().__init__(params, dict(defaults))

    @property
    def param_groups(self) -> list[Group]:
        """The groups, with the present hparams of those that they follow."""
        for leader, group, keys in self._leaders:
            group.update((key, leader[key]) for key in keys)
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self._groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads a state: the groups stay the same objects, which others may hold."""
        held = dict(state)
        groups = held.pop("param_groups")
        super().__setstate__(held)
        if "_groups" not in self.__dict__:  # of a copy
            self._groups = groups
        for mine, theirs in zip(self._groups, groups, strict=True):
            mine.update(theirs)
        self.lead()

    def lead(self) -> None:
        """Copies the hparams of the following groups, into which a checkpoint was read, to their
        leaders.
        """
        for leader, group, keys in self._leaders:
            leader.update((key, group[key]) for key in keys)

    def follow(self, leaders: Sequence[Group], keys: Sequence[str]) -> None:
        """Makes these hparams of each group follow those of its leader.

        Args:
            leaders: a group for each of this optimizer's; a group may lead itself.
            keys: hparams that both have.
        """
        pairs = zip(leaders, self._groups, strict=True)
        self._leaders = tuple(
            (leader, group, tuple(keys)) for leader, group in pairs if leader is not group
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew; called first.

        Returns:
            The loss that ``closure`` returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            present = [each for each in group["params"] if each.grad is not None]
            if present:
                self._update(present, [each.grad for each in present], group)
        return loss

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Steps the parameters of one group that have a gradient, in place."""
        raise NotImplementedError

    def _held(self, weight: Tensor, *shaped: str, scalar: str = "") -> dict[str, Tensor]:
        """A parameter's states, which begin as 0."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state.update({name: torch.zeros_like(weight) for name in shaped})
            if scalar:
                state[scalar] = torch.zeros(())
        return state


class LayerWiseOptimizer(FollowingOptimizer):
    """An optimizer whose rates depend on norms of whole tensors.

    Attributes:
        summed: adds the squares of norms up over ranks that have other parts of the parameters:
            from the parameters and a 1-D tensor with a number for each.  A process that has whole
            parameters has nothing to add.
    """

    summed: Summed = staticmethod(_as_they_are)

    def _norms(self, weights: list[Tensor], *tensors: list[Tensor]) -> list[list[Tensor]]:
        """The 2-norms of whole tensors, list by list; each list has one for each parameter."""
        squares = [_square(each) for listed in tensors for each in listed]
        wide = torch.float64 if any(s.dtype == torch.float64 for s in squares) else torch.float32
        joined = torch.stack([each.to(squares[0].device, wide) for each in squares])
        norms = self.summed(weights * len(tensors), joined).sqrt().view(len(tensors), -1)
        return [
            [norm.to(weight.device) for norm, weight in zip(part, weights, strict=True)]
            for part in norms
        ]


def _square(tensor: Tensor) -> Tensor:
    """The square of a tensor's norm, in float32 or better."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(tensor.flatten(), dtype=dtype)
    return norm.square()


# ---- dgc ----


LEAST = 16384  # elements of a tensor that is compressed


@dataclass(frozen=True, slots=True)
class Ramp:
    """The sparsity of a job's steps.

    Attributes:
        begin: the first compressed step, counted from 0.
        steps: until the last sparsity holds, counted from ``begin``.
        sparsity: the part of a gradient that is not sent, stage by stage.

    Example:
        >>> ramp = Ramp(2, 4, (0.75, 0.999))
        >>> [ramp.sent_count(100_000, step) for step in (0, 2, 3, 4, 500)]
        [None, 25000, 25000, 100, 100]
    """

    begin: int
    steps: int
    sparsity: tuple[float, ...]

    def stage(self, step: int) -> float | None:
        """The sparsity of a step; None before the ramp."""
        if step < self.begin:
            return None
        number = (step - self.begin) * len(self.sparsity) // self.steps
        return self.sparsity[min(number, len(self.sparsity) - 1)]

    def sent_count(self, elements: int, step: int) -> int | None:
        """The number of a tensor's elements that a step sends; None: all, uncompressed."""
        stage = self.stage(step)
        if stage is None:
            return None
        return max(1, int((1 - Fraction(repr(stage))) * elements))


class Compressed(NamedTuple):
    """The result of compressing a gradient in one step.

    Attributes:
        indices: of the elements to send, int64 [k], in the flattened gradient; None: all of them.
        values: of these elements, [k]; without ``indices`` the whole tensor, in its shape.
        velocity, residual: the new ones, in the gradient's shape.
    """

    indices: Tensor | None
    values: Tensor
    velocity: Tensor
    residual: Tensor

    def dense(self) -> Tensor:
        """The elements to send as a tensor of the gradient's shape, with zeros for the rest."""
        if self.indices is None:
            return self.values
        whole = torch.zeros_like(self.residual)
        whole.view(-1)[self.indices] = self.values
        return whole


def compress(
    gradient: Tensor,
    velocity: Tensor,
    residual: Tensor,
    kept: int | None,
    momentum: float,
    nesterov: bool = False,
) -> Compressed:
    """One step of one tensor; see [Note: deep gradient compression].

    Args:
        gradient: of this trainer, clipped, with weight decay; any shape and floating dtype.
        velocity, residual: of the step before, zeros at first; contiguous; not changed.
        kept: the number of elements to send; None: all, before the ramp.
        momentum, nesterov: as of torch's SGD.

    Example:
        >>> gradient, zeros = torch.tensor([3.0, -4.0, 1.0]), torch.zeros(3)
        >>> sent = compress(gradient, zeros, zeros, 1, momentum=0.9)
        >>> sent.dense(), sent.residual
        (tensor([ 0., -4.,  0.]), tensor([3., 0., 1.]))
    """
    gradient = gradient.contiguous()
    velocity = (velocity * momentum).add_(gradient)
    moved = gradient.add(velocity, alpha=momentum) if nesterov else velocity
    if kept is None:
        return Compressed(None, moved, velocity, residual)
    residual = residual + moved
    flat = residual.view(-1)
    indices = flat.abs().topk(kept, sorted=False).indices
    values = flat[indices]
    flat[indices] = 0.0
    velocity.view(-1)[indices] = 0.0
    return Compressed(indices, values, velocity, residual)
