"""The single-node main and startup program of an emitted step: clipping and updates are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from transpiler.clip import GradClip
from transpiler.ir import rules
from transpiler.ir.graph import Argument, Block, HasRule, Op, Ref, Role, Storage, Variable, freeze
from transpiler.ir.module_types import module_types
from transpiler.ir.rules import Clip
from transpiler.ir.two_of_four import sparse_weights
from transpiler.param_attr import unclipped
from transpiler.program import Program
from transpiler.tracing.tables import CapturedTable

if TYPE_CHECKING:  # emit loads torch's compiler front end, which capture loads only when called
    from transpiler.tracing.emit import Emitted


def single_node_programs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    emitted: Emitted,
    groups: Mapping[str, int],
    grad_clip: GradClip | None,
    tables: Sequence[CapturedTable],
    own: Sequence[HasRule],
) -> tuple[Program, Program]:
    """The main and the startup program.

    Args:
        emitted: forward and backward of the step.
        groups: the index of each trained parameter's group; none without an optimizer.
        grad_clip: how gradients are clipped; None: they are not.
        tables: of the model.
        own: the optimizers that belong to single tables.
    """
    variables, ops = dict(emitted.variables), list(emitted.ops)
    proxies = {table.proxy: table for table in tables}
    named = {
        name: proxies[name].name if name in proxies else name
        for name, _ in model.named_parameters()
    }
    present = [name for name in named.values() if f"{name}@GRAD" in variables]
    final = {name: f"{name}@GRAD" for name in present}
    if grad_clip is not None:
        spared = set() if optimizer is None else unclipped(optimizer.param_groups)
        own_way = {named[name] for name, each in model.named_parameters() if each in spared}
        clipped = [name for name in present if name not in own_way]
        final |= _clip(grad_clip.to_clip(), clipped, variables, ops) if clipped else {}
    for name, index in groups.items():
        if named[name] not in final:
            continue
        if name in proxies:
            ops += proxies[name].updates(final[named[name]])
        elif optimizer is not None:
            ops.append(update_op(optimizer, name, index, final[name], variables))
    dense = {name: each for name, each in model.named_parameters() if name not in proxies}
    storage = Storage(
        {**dense, **dict(model.named_buffers())},
        optimizer,
        {table.name: table.modules for table in tables},
        own,
    )
    storage.module_types = module_types(model)
    names = {tensor: name for name, tensor in storage.tensors.items()}  # a tied weight has one
    sparse = (names.get(model.get_parameter(name)) for name in sparse_weights(model))
    storage.sparse_weights = tuple(dict.fromkeys(name for name in sparse if name is not None))
    held = {
        v.name: v for v in variables.values() if v.role in (Role.PARAMETER, Role.BUFFER, Role.TABLE)
    }
    startup = tuple(Op("init", {}, (name,)) for name in held)
    return (
        Program((Block(0, freeze(variables), tuple(ops)),), storage=storage),
        Program((Block(0, freeze(held), startup),), storage=storage),
    )


def _clip(
    clip: Clip, names: Sequence[str], variables: dict[str, Variable], ops: list[Op]
) -> dict[str, str]:
    """Adds the clip ops, and returns the name of each clipped gradient by parameter.

    They stand in the order of the module's parameters, in which
    ``clip_grad_norm_(model.parameters())`` sums the norms.
    """
    clipped = {name: f"{name}@GRAD@CLIP" for name in names}
    shared: dict[str, Argument] = {}
    op_type = {"value": "clip", "norm": "clip_by_norm", "global_norm": "scale_by"}[clip.kind]
    if clip.kind == "global_norm":
        variables["global_norm@SCALE"] = Variable("global_norm@SCALE", (), "float32")
        grads = tuple(Ref(f"{name}@GRAD") for name in names)
        ops.append(
            Op("global_norm_scale", {"x": grads, "max_norm": clip.high}, ("global_norm@SCALE",))
        )
        shared = {"coefficient": Ref("global_norm@SCALE")}
    elif clip.kind == "value":
        shared = {"min": clip.low, "max": clip.high}
    else:
        shared = {"max_norm": clip.high}
    for name in names:
        grad = variables[f"{name}@GRAD"]
        variables[clipped[name]] = Variable(
            clipped[name], grad.shape, grad.dtype, Role.GRADIENT, name
        )
        ops.append(Op(op_type, {"x": Ref(grad.name), **shared}, (clipped[name],)))
    return clipped


def update_op(
    optimizer: torch.optim.Optimizer,
    name: str,
    index: int,
    grad: str,
    variables: dict[str, Variable],
) -> Op:
    """The optimizer op of a parameter, whose states become variables."""
    rule = rules.rule_of(optimizer, optimizer.param_groups[index])
    arguments: dict[str, Argument] = {"param": Ref(name), "grad": Ref(grad)}
    param = variables[name]
    for state, like in rules.state_of(rule).items():
        full = f"{name}@{state}"
        variables[full] = Variable(
            full, param.shape if like else (), param.dtype if like else "float32", Role.STATE, name
        )
        arguments[state] = Ref(full)
    return Op(rule.type, {**arguments, "group": index, **rule.arguments}, (name,))
