"""2:4 sparsity of a program (``asp``): a mask for each weight, and an op that masks its gradient.

The mask is a buffer of the program, so that all trainers have trainer 0's.  The weights themselves
are the module's tensors; they are masked here, once: what has no gradient stays 0.  See [Note:
zeros that stay] in trainer/modules/sparsity.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.scaling_ops import CHECK, unscaled_from
from transpiler.ir.two_of_four import mask_of
from transpiler.rewrites.programs import Programs, Rewrite
from transpiler.strategy.strategy import DistributedStrategy

_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the weights that were masked, by weight


def _apply(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """The programs with masks.

    Raises:
        ValueError: this process did not capture the program, or it has no weight that fits.
    """
    block, storage = programs.main.main, programs.main.storage
    if storage is None or storage.optimizer is None:
        raise ValueError(
            "strategy.asp: expected a program that this process has captured with an optimizer, "
            "which knows its layers, got another: transpile where it was captured"
        )
    written = {name for op in block.ops for name in op.outputs}
    # of other programs' weights too: programs that are transpiled together have the same variables
    names = storage.sparse_weights
    trained = [name for name in names if f"{name}@GRAD" in written]
    if not trained:
        raise ValueError(
            "strategy.asp: expected a linear or convolution layer that trains, is not excluded and "
            "has a number of inputs divisible by 4, got a program with none"
        )
    masks = {f"{name}@MASK": _masked(storage.tensors[name]) for name in names}
    kept = copy.copy(storage)
    kept.tensors, kept.together = {**storage.tensors, **masks}, (kept,)
    held = {
        name: Variable(name, tuple(mask.shape), "bool", Role.BUFFER) for name, mask in masks.items()
    }
    for name in trained:
        block = _with_mask(block, name)
    block = replace(block, variables=freeze({**block.variables, **held}))
    first = programs.startup.main
    inits = tuple(Op("init", {}, (name,)) for name in held)
    startup = replace(
        first, variables=freeze({**first.variables, **held}), ops=(*first.ops, *inits)
    )
    return Programs(
        replace(programs.main.with_blocks(block), storage=kept),
        replace(programs.startup.with_blocks(startup), storage=kept),
    )


def _masked(weight: Tensor) -> Tensor:
    """Masks a weight in place; gives the mask, one tensor for all programs that train it."""
    mask: Tensor | None = _masks.get(weight)  # type: ignore[no-untyped-call]  # torch's own
    if mask is None or weight.detach()[~mask].any():
        mask = mask_of(weight)
        _masks[weight] = mask
    with torch.no_grad():
        weight.mul_(mask)
    return mask


def _with_mask(block: Block, name: str) -> Block:
    """The block in which the gradient of a weight is masked as soon as it is complete: what has its
    name is the masked one.  A scaled one is masked before it is checked, and so before trainers sum
    it.
    """
    grad, dense = f"{name}@GRAD", f"{name}@DENSE"
    last = _last(block, grad)
    check = block.ops[last]
    if check.type == CHECK:
        grad = unscaled_from(check)[grad]
        last = _last(block, grad)
    before = [
        replace(
            op,
            arguments={key: _renamed(value, grad, dense) for key, value in op.arguments.items()},
            outputs=tuple(dense if each == grad else each for each in op.outputs),
        )
        for op in block.ops[: last + 1]
    ]
    arguments = {"self": Ref(dense), "other": Ref(f"{name}@MASK")}
    masking = Op("aten.mul.Tensor", arguments, (grad,), block.ops[last].location)
    made = replace(block.variables[grad], name=dense, role=Role.TEMPORARY, of="")
    return replace(
        block,
        variables=freeze({**block.variables, dense: made}),
        ops=(*before, masking, *block.ops[last + 1 :]),
    )


def _last(block: Block, name: str) -> int:
    """The number of the last op that writes a variable."""
    return max(index for index, op in enumerate(block.ops) if name in op.outputs)


def _renamed(argument: Argument, old: str, new: str) -> Argument:
    if isinstance(argument, Ref):
        return Ref(new) if argument.name == old else argument
    if isinstance(argument, tuple):
        return tuple(_renamed(each, old, new) for each in argument)
    return argument


SPARSITY = Rewrite(lambda strategy: bool(strategy.asp), _apply)
