"""The plan of a job, from what the script has asked for: one optimizer, or several.

[Note: several optimizers]  A script may train with several optimizers over different parameters: a
GAN's two networks step in turn.  Each has lanes of its own in the plan, and a lane counts its own
steps, sends its own messages and has its own sync round.  So a step of one optimizer closes its
lanes only: the servers update, and the trainer receives, its parameters and no others, and trainers
wait for one another optimizer by optimizer.  Update rules are numbered through: those of the second
optimizer's groups come after the first one's.  What travels beside parameters, the buffers of all
models, goes with the first lane of gradients, as ever.

Servers are installed once with a plan.  A second optimizer is another plan: before the first step
the trainers leave together, saying that they come back, and join with it.

[Note: further optimizers of a job under way]  A trainer that joins while others train has made its
first optimizer only, and asks with the plan of that one, which is not the job's any more.  Servers
tell it so by ``PartialPlan``, and it asks again with each further optimizer.  Until then it has
nothing that it could train with: a step, a joint call or an iteration raises that error.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.embedding.proxy import ProxyParameter
from trainer.environment.environment import RoleMaker
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Clip, Rule, rule_of
from transpiler.param_attr import unclipped
from transpiler.plan.plan import Plan
from transpiler.plan.planner import Asked
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainer.communicator.tables import Tables
    from trainer.optimizer import DistributedOptimizer


@dataclass(frozen=True, slots=True)
class Distributed:
    """An optimizer of the job, and how the script wants its steps taken.

    Attributes:
        optimizer: the script's, distributed.
        strategy: the modes of its parameters; None: sync.
        compression: how its gradients travel, by pattern of parameter names; None: as they are.
    """

    optimizer: DistributedOptimizer
    strategy: DistributedStrategy | None
    compression: Mapping[str, str] | None


def first_groups(distributed: Sequence[Distributed]) -> list[int]:
    """The number in the plan of each optimizer's first group."""
    sizes = [len(each.optimizer.param_groups) for each in distributed]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def joint_plan(
    role: RoleMaker,
    tensors: Mapping[str, torch.Tensor],
    distributed: Sequence[Distributed],
    tables: Tables | None,
) -> Plan:
    """The plan for these optimizers as they are now.

    Args:
        role: of this process: how many take part.
        tensors: parameters and buffers of all models, by name.
        distributed: the optimizers, in the order in which they came.
        tables: of the job's embeddings, if there are any.

    Raises:
        ValueError: a parameter is in no registered model, or in two optimizers; or optimizers want
            their gradients clipped differently where servers clip them.
    """
    groups = [group for each in distributed for group in each.optimizer.param_groups]
    owners = [n for n, each in enumerate(distributed) for _ in each.optimizer.param_groups]
    rules = [
        rule_of(each.optimizer.inner, group)
        for each in distributed
        for group in each.optimizer.param_groups
    ]
    described, added = ([], []) if tables is None else tables.described(groups, owners)
    rules += [rule for rule, _ in added]
    owners += [owner for _, owner in added]
    of_name = _groups(distributed)
    sent_as = [_sent_as(each, n, of_name, rules, owners) for n, each in enumerate(distributed)]
    listed = [
        (
            name,
            tuple(tensors[name].shape),
            str(tensors[name].dtype).removeprefix("torch."),
            of_name.get(name),
        )
        for name in (*of_name, *(name for name in tensors if name not in of_name))
    ]
    plan = plan_parameters(
        listed,
        rules,
        trainers=role.trainers,
        servers=max(1, len(role.server_endpoints)),
        tables=described,
        optimizers=[
            Asked(
                [group for group, owner in enumerate(owners) if owner == number],
                lanes_of(each.strategy),
                sent_as[number],
                _clip(each.optimizer),
            )
            for number, each in enumerate(distributed)
        ],
    )
    if plan.clips_on_servers and unclipped(groups):
        raise ValueError(
            "grad_clip: need_clip=False: expected a mode in which trainers clip, got sync with "
            f"{plan.trainers} trainers, where servers clip all merged gradients"
        )
    return plan


def _clip(optimizer: DistributedOptimizer) -> Clip | None:
    """How merged gradients are clipped; with dgc trainers clip, before it."""
    clip = optimizer.grad_clip
    return None if clip is None or optimizer.dgc is not None else clip.to_clip()


def _sent_as(
    each: Distributed, number: int, of_name: dict[str, int], rules: list[Rule], owners: list[int]
) -> Mapping[str, str] | None:
    """How an optimizer's gradients travel.  With dgc its large parameters have update rules of
    their own, which are added: plain SGD.

    Args:
        number: of the optimizer.
        of_name: the group of each parameter, which changes.
        rules, owners: of all groups, with each one's optimizer; these grow.

    Raises:
        ValueError: dgc and ``compression`` are both given.
    """
    dgc = each.optimizer.dgc
    if dgc is None:
        return each.compression
    if each.compression is not None:
        raise ValueError(
            "compression: excludes strategy.dgc, which says itself how gradients travel; give one "
            "of the two"
        )
    dgc.check()  # groups may have been added
    added: dict[int, int] = {}  # group of the script -> group of the plan
    patterns: dict[str, str] = {}
    for parameter, index in dgc.groups().items():
        if index not in added:
            added[index] = len(rules)
            rules.append(dgc.rule(index))
            owners.append(number)
        name = each.optimizer.names[parameter]
        of_name[name] = added[index]
        patterns[glob.escape(name)] = "sparse"
    return patterns or None


def _groups(distributed: Sequence[Distributed]) -> dict[str, int]:
    """The number of each parameter's group, by name, in the order of the optimizers.

    Raises:
        ValueError: a parameter is in no registered model, or in two optimizers.
    """
    found: dict[str, int] = {}
    seen: dict[torch.Tensor, int] = {}
    for number, (each, first) in enumerate(
        zip(distributed, first_groups(distributed), strict=True)
    ):
        for parameter, group in groups_of(each.optimizer).items():
            if seen.setdefault(parameter, number) != number:
                name = each.optimizer.names.get(parameter, "the proxy parameter of a table")
                raise ValueError(
                    f"parameter {name!r}: expected in one optimizer of the job, got it in "
                    f"optimizer {seen[parameter]} and in optimizer {number}: servers hold one "
                    "state of it; give each optimizer parameters of its own"
                )
            if not isinstance(parameter, ProxyParameter):
                found[each.optimizer.names[parameter]] = first + group
    return found


def groups_of(
    optimizer: DistributedOptimizer, former: Collection[torch.Tensor] = ()
) -> dict[torch.Tensor, int]:
    """The index of each parameter's group, in the optimizer's order.

    Args:
        former: parameters that a model had until others took their places.

    Raises:
        ValueError: a parameter is in no registered model.
    """
    groups: dict[torch.Tensor, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            known = parameter in optimizer.names or parameter in former
            if not known and not isinstance(parameter, ProxyParameter):
                raise ValueError(
                    f"parameter {number} of group {index}, of shape {list(parameter.shape)}, "
                    "is in no registered model "
                    "(where an embedding has moved, make the optimizer after "
                    "fleet.distributed_model): "
                    "pass every model to fleet.distributed_model first"
                )
            groups[parameter] = index
    return groups
