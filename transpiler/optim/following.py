"""An optimizer of another rule that takes an optimizer's place: its groups' rates follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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

    _leaders: Sequence[tuple[Group, Group, tuple[str, ...]]] = ()  # a copy follows nobody

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
        """Takes up a state: the groups stay the same objects, which others may hold."""
        held = dict(state)
        groups = held.pop("param_groups")
        super().__setstate__(held)
        if "_groups" not in self.__dict__:  # of a copy
            self._groups = groups
        for mine, theirs in zip(self._groups, groups, strict=True):
            mine.update(theirs)
        self.lead()

    def lead(self) -> None:
        """Gives the groups that are followed the hparams of those that follow: a checkpoint was
        read into these.
        """
        for leader, group, keys in self._leaders:
            leader.update((key, group[key]) for key in keys)

    def follow(self, leaders: Sequence[Group], keys: Sequence[str]) -> None:
        """From now on these hparams of each group are those of its leader.

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
            What ``closure`` returned; None without one.
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
