"""ShardedOptimizer: the optimizer that ``group_sharded_parallel`` returns; it steps this rank's
shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.collective.world import naming_trainers
from trainer.sharding.places import Places
from trainer.sharding.shards import Shards, clip_gradients
from transpiler.clip import GradClip
from transpiler.ir.rules import Rule, rule_of
from transpiler.optim.dgc import LayerWiseOptimizer
from transpiler.param_attr import unclipped

if TYPE_CHECKING:
    from trainer.sharding.accumulation import Accumulation


# ---- host states ----
#
# An optimizer's states in main memory, while the parameters are on a GPU.
#
# States are copied to the GPU for each update and back after it, so that forward and backward have
# their memory.


def keep_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Moves an optimizer's states to pinned main memory after every step, and to their parameters'
    device before it.

    Args:
        optimizer: over parameters on a GPU.

    Raises:
        ValueError: a parameter is on the CPU, where the states are in main memory anyway.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cpu":
                raise ValueError(
                    "strategy.sharding_configs.optimize_offload: expected a model on a GPU, got "
                    "one on the CPU, where the optimizer's states are in main memory anyway; leave "
                    "it at its default"
                )
    optimizer.register_step_pre_hook(_fetch)
    optimizer.register_step_post_hook(_put_away)


def _fetch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _of_elements(value, parameter):
                state[key] = value.to(parameter.device, non_blocking=True)


def _put_away(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _of_elements(value, parameter):
                host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                state[key] = host.copy_(value)


def _of_elements(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state has an element for each of the parameter's; counts of steps stay."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


# ---- sharded rules ----
#
# The rules that may step shards: parts of parameters, on several ranks.


def sharded_rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update rule of a parameter group: an element-wise rule, or one whose norms ranks add up.

    Raises:
        ValueError: as of ``rule_of``; or the rule needs other numbers of whole tensors.
    """
    rule = rule_of(optimizer, group)
    if rule.whole and not isinstance(optimizer, LayerWiseOptimizer):
        raise ValueError(
            f"optimizer {type(optimizer).__qualname__} needs norms of whole tensors, so a slice "
            "cannot be updated alone"
        )
    return rule


# ---- optimizer ----


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer of a sharded model; its groups hold this rank's shards of the parameters.

    Groups and state are those of the given optimizer, so a scheduler made for either moves both.
    ``state_dict()`` is whole and plain: as the given optimizer's would be after training on one
    process.  Clip with ``grad_clip``: no shard has a whole gradient.

    Args:
        optimizer: the user's optimizer, which steps shards from here on.
        shards: of its parameters.
        device: of the tensors by which the ranks communicate.
        grad_clip: clips the averaged gradient, as a single node would.
        names: gives the names of the model's parameters, for messages.
        after: called at the end of each step.
        accumulation: None: every step is an update.

    Raises:
        ValueError: there is clipping, and a group with ``need_clip=False``.
        RuntimeError: at a step, a parameter is trained that was frozen when the model was sharded,
            has been cast or given other memory since, or was added later: its gradient is not the
            mean over the ranks, or would step a tensor that is not the model's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        device: torch.device,
        grad_clip: GradClip | None,
        names: Callable[[], Mapping[nn.Parameter, str]],
        after: Callable[[], None] | None = None,
        accumulation: Accumulation | None = None,
    ) -> None:
        if grad_clip is not None and unclipped(optimizer.param_groups):
            raise ValueError(
                "grad_clip: need_clip=False: expected parameters that are whole, got sharded ones, "
                "whose gradients are clipped together"
            )
        self._inner, self.shards, self.grad_clip = optimizer, shards, grad_clip
        self._device, self._after, self._accumulation = device, after, accumulation
        self._names = names
        self._places: Places | None = None
        self._of = {shard: parameter for parameter, shard in shards.of.items()}
        self._frozen: list[nn.Parameter] = []
        self._take_shards()
        if isinstance(optimizer, LayerWiseOptimizer):
            optimizer.summed = self._summed
        self._made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made = True
        self._share()

    def _summed(self, shards: list[Tensor], squares: Tensor) -> Tensor:
        """Squares of norms of this rank's shards, added up over the ranks with the other shards."""
        parameters = [self._of[shard] for shard in shards]  # type: ignore[index]  # they are
        return self.shards.summed(parameters, squares.to(self._device)).to(squares.device)

    def _take_shards(self) -> None:
        """Replaces the optimizer's parameters by the shards, and frees the parameters' memory."""
        former, of = self.shards.former, self.shards.of
        states = {_get(former, parameter): state for parameter, state in self._inner.state.items()}
        for group in self._inner.param_groups:
            present = [_get(former, parameter) for parameter in group["params"]]
            self._frozen += [parameter for parameter in present if parameter not in of]
            group["params"] = [_get(of, parameter) for parameter in present]
        self._inner.state.clear()
        self._inner.state.update(
            {
                _get(of, parameter): self._cut(parameter, state)
                for parameter, state in states.items()
            }
        )
        for parameter in former:
            parameter.data = parameter.data.new_empty(0)  # the script may still hold it
        former.clear()

    def _share(self) -> None:
        self.param_groups, self.state, self.defaults = (
            self._inner.param_groups,
            self._inner.state,
            self._inner.defaults,
        )

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._inner

    # ---- steps ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; every rank calls it.  With accumulation every k-th step is an update.

        Returns:
            The result of ``closure``, or None.

        Raises:
            PServerError: another trainer is lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_divided()
        if self._accumulation is not None and not self._accumulation.ends():
            return loss
        with naming_trainers():
            self.shards.refresh()
            if self._accumulation is not None:
                self._accumulation.average(
                    shard.grad for shard in self.shards.of.values() if shard.grad is not None
                )
            if self.grad_clip is not None:
                clip_gradients(self.grad_clip, self.shards, self._device)
            self._inner.step()
            self.shards.publish()
            if self._after is not None:
                self._after()
        return loss

    def _check_divided(self) -> None:
        """Checks that the optimizer steps just the parameters that were divided.

        Raises:
            RuntimeError: it does not; the message names a parameter.
        """
        for parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise RuntimeError(
                    f"{self._named(parameter)} was frozen when the model was divided among the "
                    "trainers, and is trained now: expected all that is ever trained to be so "
                    "then; unfreeze it before group_sharded_parallel or fleet.distributed_model"
                )
        frozen = set(map(id, self._frozen))
        for group in self._inner.param_groups:
            for shard in group["params"]:
                if shard not in self._of and id(shard) not in frozen:
                    raise RuntimeError(
                        f"{self._named(shard)} came into the optimizer after the model was "
                        "divided among the trainers: give it to the optimizer before"
                    )
        self._check_moved()

    def watch(self, model: nn.Module) -> None:
        """Checks before each forward that the model still has the divided parameters.  A gradient
        of another dtype would end the backward with an error that names no parameter.
        """

        this = weakref.ref(self)  # it holds the model: both are freed when unused
        watched = weakref.ref(model)

        def look(module: nn.Module, args: Any) -> None:
            present = this()
            if present is not None and module is watched():  # a copy has this hook, too
                present._check_moved()

        model.register_forward_pre_hook(look, prepend=True)
        self._places = Places(model, self.shards.of)

    def _check_moved(self) -> None:
        for name in () if self._places is None else self._places.taken():
            raise RuntimeError(
                f"{name!r} is another parameter than the one that was divided among the trainers, "
                "and would be lost: tie or replace parameters before group_sharded_parallel or "
                "fleet.distributed_model"
            )
        for parameter in self.shards.moved():
            raise RuntimeError(
                f"{self._named(parameter)} was cast, or given other memory, after the model was "
                "divided among the trainers, and the optimizer steps what it was: cast the model "
                "before group_sharded_parallel or fleet.distributed_model"
            )

    def _named(self, parameter: nn.Parameter) -> str:
        """A parameter's name, for messages."""
        known = self._names().get(parameter)
        return f"a parameter of shape {tuple(parameter.shape)}" if known is None else repr(known)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the shards, and the model's own, unless they accumulate."""
        if self._accumulation is None or not self._accumulation.under_way:
            self.shards.drop_gradients(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error: groups are sharded once.

        Raises:
            ValueError: always, after construction.
        """
        if self._made:
            named = ", ".join(map(self._named, _listed(param_group.get("params", ()))))
            raise ValueError(
                f"add_param_group: expected all groups before the model was divided among the "
                f"trainers, got {named} later: make the optimizer with this group, too"
            )
        super().add_param_group(param_group)

    # ---- state ----

    def _cut(self, parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a whole parameter, cut to its shard."""
        if parameter not in self.shards.of:
            return state
        return {
            key: self.shards.part(parameter, value)
            if _shaped(key, value, parameter.shape)
            else value
            for key, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The whole, plain state on every rank, for the unsharded optimizer to load.

        All ranks call this.
        """
        kept = super().state_dict()
        ordered = [shard for group in self.param_groups for shard in group["params"]]
        whole: dict[int, dict[str, Any]] = {
            index: dict(state) for index, state in kept["state"].items()
        }
        for key in sorted({key for state in whole.values() for key in state}):
            values = {
                self._of[shard]: whole[index][key]
                for index, shard in enumerate(ordered)
                if shard in self._of
                and index in whole
                and _shaped(key, whole[index].get(key), shard.shape)
            }
            joined = self.shards.joined(values)
            for index, shard in enumerate(ordered):
                if (value := joined.get(self._of.get(shard, shard))) is not None:
                    whole[index][key] = value
        return {**kept, "state": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` or the unsharded optimizer gave; every rank keeps
        its part.
        """
        ordered = [shard for group in self.param_groups for shard in group["params"]]
        states = {
            index: self._cut(self._of.get(ordered[int(index)]), state)
            if int(index) < len(ordered)
            else state
            for index, state in state_dict["state"].items()
        }
        self._inner.load_state_dict({**state_dict, "state": states})
        self._share()

    def __repr__(self) -> str:
        return f"ShardedOptimizer of {self._inner!r}"


def _listed(params: Any) -> list[Any]:
    """The parameters of a group, as a list."""
    return [params] if isinstance(params, Tensor) else [*params]


def _get(of: Mapping[nn.Parameter, nn.Parameter], parameter: Any) -> nn.Parameter:
    shard: nn.Parameter = of.get(parameter, parameter)
    return shard


def _shaped(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state has an element for each of the parameter's; a count of steps has none,
    whatever its shape.
    """
    return key != "step" and isinstance(value, Tensor) and value.shape == shape
