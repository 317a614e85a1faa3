"""The rewrites of a single-node program, and the pair of programs that they take and make."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from transpiler.ir.aten_ops import aten_overload
from transpiler.ir.close_names import close_names
from transpiler.ir.effects import Aliases, changed
from transpiler.ir.fusion import fusion_of
from transpiler.ir.graph import (
    PERSISTENT,
    Argument,
    Block,
    Op,
    Ref,
    Role,
    Storage,
    Variable,
    freeze,
)
from transpiler.ir.ops import is_optimizer
from transpiler.ir.renamed import renamed
from transpiler.ir.rules import RULES
from transpiler.ir.scaling_ops import CHECK, unscaled_from
from transpiler.ir.table_ops import updates_rows
from transpiler.ir.two_of_four import mask_of
from transpiler.ir.updates import (
    gradient_of,
    group_of,
    optimizer_ops,
    parameter_of,
    row_updates,
    rules_of_ops,
)
from transpiler.program import Program
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import REPLACEMENTS, replaced
from transpiler.tracing.programs import update_op

# ---- programs ----
#
# A single-node main program with its startup program, and a rewrite of the two.


class Programs(NamedTuple):
    """A main program and the startup program of its variables.

    Attributes:
        main: forward, backward, clipping and updates.
        startup: gives every variable that ``main`` keeps its first value.
    """

    main: Program
    startup: Program


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a single-node program.

    Attributes:
        asked: whether a strategy asks for it.
        apply: the rewrite.
    """

    asked: Callable[[DistributedStrategy], bool]
    apply: Callable[[Programs, DistributedStrategy], Programs]


# ---- fused updates ----
#
# Updates of many parameters by few kernels: ``build_strategy["fuse_all_optimizer_ops"]``.
#
# torch has them twice: one kernel for a parameter's whole update ("fused"), or one for each
# operation on all parameters ("foreach").  An op's flag says which; rows of tables are updated by
# kernels of their own anyway.


def fuse_updates(programs: Programs) -> Programs:
    """The programs with the flag in each optimizer op.

    Raises:
        ValueError: torch has no such kernels for an update rule.
    """
    block = programs.main.main
    ops = tuple(_fused(op) if is_optimizer(op.type) else op for op in block.ops)
    return programs._replace(
        main=programs.main.with_blocks(replace(block, ops=ops), *programs.main.blocks[1:])
    )


def _fused(op: Op) -> Op:
    if updates_rows(op):
        return op
    flag = fusion_of(op.type)
    others = {key: value for key, value in op.arguments.items() if key not in ("foreach", "fused")}
    return replace(op, arguments={**others, flag: True})


FUSED_UPDATES = Rewrite(
    lambda strategy: bool(strategy.build_strategy["fuse_all_optimizer_ops"]),
    lambda programs, strategy: fuse_updates(programs),
)


# ---- gradient merge ----
#
# Gradient merge: the gradients of k runs make one update.
#
# One op stands between backward and the ops that take gradients::
#
#   w@GRAD.merged, b@GRAD.merged = gradient_merge(w@GRAD, b@GRAD, k_steps=4, avg=True)
#
# It adds to sums that stay from run to run.  In every k-th run its results are these sums, or
# means, and the ops behind it run: clipping, sends, sums over trainers, updates, receives.  In the
# other runs the program ends at this op.


MERGED_SUFFIX = ".merged"
_OF_GRADIENTS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})


def gradient_merge(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """Puts the op in front of clipping and updates, which read its results.

    Raises:
        ValueError: the program has tables, or gradients are to leave during backward; or another
            setting of the strategy needs an update in every run.
    """
    if strategy.dgc:
        raise ValueError(
            "gradient_merge, dgc: a program compresses the gradients of every run, and merged ones "
            "leave in every k-th alone; leave one of the two off, or train with fleet"
        )
    if strategy.amp and not strategy.amp_configs["use_pure_bf16"]:
        raise ValueError(
            "gradient_merge, amp: a program checks each run for an overflow in float16, and merged "
            "gradients are of several runs; set amp_configs['use_pure_bf16'], or train with fleet"
        )
    block, configs = programs.main.main, strategy.gradient_merge_configs
    if row_updates(block):
        raise ValueError(
            "gradient_merge: expected a program without tables, whose rows no op merges over "
            "runs; train with fleet, which does"
        )
    if strategy.a_sync_configs["overlap"]:
        raise ValueError(
            "overlap with gradient_merge: gradients cannot leave early where several runs make "
            "one update; leave one of the two off"
        )
    numbers = [i for i, op in enumerate(block.ops) if _takes_gradients(op)]
    taking = [block.ops[number] for number in numbers]
    made = {name for op in taking for name in op.outputs}
    params = {ref.name for op in taking if isinstance(ref := op.arguments.get("param"), Ref)}
    read = dict.fromkeys(name for op in taking for name in _gradients(op) if name not in made)
    names = {name: name + MERGED_SUFFIX for name in read if name not in params}
    merge = Op(
        "gradient_merge",
        {"x": tuple(map(Ref, names)), "k_steps": configs["k_steps"], "avg": configs["avg"]},
        tuple(names.values()),
    )
    ops = [renamed(op, names) if _takes_gradients(op) else op for op in block.ops]
    ops.insert(numbers[0], merge)
    merged = {new: replace(block.variables[old], name=new) for old, new in names.items()}
    variables = freeze({**block.variables, **merged})
    block = replace(block, ops=tuple(ops), variables=variables)
    return programs._replace(main=programs.main.with_blocks(block, *programs.main.blocks[1:]))


def _takes_gradients(op: Op) -> bool:
    return op.type in _OF_GRADIENTS or is_optimizer(op.type)


def _gradients(op: Op) -> tuple[str, ...]:
    """The inputs of an op that may be gradients."""
    if is_optimizer(op.type):
        return tuple(ref.name for ref in [op.arguments["grad"]] if isinstance(ref, Ref))
    return op.inputs


# ---- recompute ----
#
# Recomputation: backward computes again the variables that it reads, segment by segment.
#
# The checkpoints divide the forward part into segments.  Checkpoints are kept, and so is all of the
# last segment, which backward begins with.  Of every other segment the ops that backward needs are
# copied in front of the first op of backward that reads one of their results::
#
#   h1 = aten.tanh(addmm)                     # a checkpoint: kept
#   relu = aten.relu(addmm_1)                 # freed after its last use in the forward part
#   ...
#   addmm_1@RECOMPUTE = aten.addmm(b.bias, h1, t_1)
#   relu@RECOMPUTE = aten.relu(addmm_1@RECOMPUTE)
#   ... = aten.threshold_backward(..., relu@RECOMPUTE, 0)
#
# Variables that might differ the second time are kept: results of random ops, variables that an op
# changes in place, results of ops whose inputs are changed afterwards, and results of ops that are
# not torch's.  A copy runs the same op on the same values, so the results are equal to the bit.


RECOMPUTED_SUFFIX = "@RECOMPUTE"
_KEPT_ROLES = PERSISTENT | {Role.INPUT, Role.OUTPUT, Role.SIZE, Role.TABLE}


def recompute(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """Makes backward compute the variables between the checkpoints again.

    Raises:
        ValueError: a checkpoint is no variable of the forward part, or there is no backward part.
    """
    configs = strategy.recompute_configs
    block = _Recomputation(programs.main.main, configs["checkpoints"]).block()
    return programs._replace(main=programs.main.with_blocks(block, *programs.main.blocks[1:]))


class _Recomputation:
    """One block, as it recomputes.

    Args:
        block: forward, backward, updates.
        checkpoints: names of variables.
    """

    def __init__(self, block: Block, checkpoints: Sequence[str]) -> None:
        self._block = block
        self._seed = _seed(block)
        self._memory = Aliases(block.ops)
        self._maker = {
            name: index
            for index, op in enumerate(block.ops[: self._seed])
            for name in op.outputs
            if name
        }
        for name in checkpoints:
            if name not in self._maker:
                raise ValueError(
                    "recompute_configs['checkpoints']: expected variables of the forward part, "
                    f"which transpiler.name(tensor, ...) names, got {name!r}; close names: "
                    f"{close_names(name, self._maker)}"
                )
        self._ends = sorted(self._maker[name] for name in set(checkpoints))
        kept = [v.name for v in block.variables.values() if v.role in _KEPT_ROLES]
        self._kept = {self._memory.of(name) for name in (*kept, *checkpoints)}
        # the last op that changes some memory
        self._changed = {
            self._memory.of(name): index
            for index, op in enumerate(block.ops[: self._seed])
            for name in changed(op)
        }

    def block(self) -> Block:
        """The block with the copies in it."""
        needed = self._needed()
        names = {name: name + RECOMPUTED_SUFFIX for name in needed}
        written: set[int] = set()
        ops = list(self._block.ops[: self._seed])
        for op in self._block.ops[self._seed :]:
            for name in op.inputs:
                if name in needed:
                    ops += self._copies(self._segment(name), needed, names, written)
            ops.append(renamed(op, names))
        made = {
            new: replace(self._block.variables[old], name=new, role=Role.TEMPORARY, of="")
            for old, new in names.items()
        }
        variables: dict[str, Variable] = {**self._block.variables, **made}
        return replace(self._block, ops=tuple(ops), variables=freeze(variables))

    def _segment(self, name: str) -> int:
        """The number of checkpoints before the op that makes a variable."""
        return sum(end < self._maker[name] for end in self._ends)

    def _again(self, name: str) -> bool:
        """Whether a variable may be computed again, and is not kept."""
        index, memory = self._maker.get(name, -1), self._memory.of(name)
        if index < 0 or memory in self._kept or self._segment(name) == len(self._ends):
            return False
        op = self._block.ops[index]
        if op.type != "assign" and (not op.type.startswith("aten.") or _is_random(op)):
            return False
        later = (self._changed.get(self._memory.of(each), -1) for each in op.inputs)
        return memory not in self._changed and all(index > change for change in later)

    def _needed(self) -> Mapping[str, None]:
        """The variables to compute again: those that backward reads, and their inputs; in an order
        that is the same in every process.
        """
        found: dict[str, None] = {}
        waiting = [name for op in self._block.ops[self._seed :] for name in op.inputs]
        while waiting:
            name = waiting.pop()
            if name not in found and self._again(name):
                found[name] = None
                waiting += self._block.ops[self._maker[name]].inputs
        return found

    def _copies(
        self, segment: int, needed: Collection[str], names: Mapping[str, str], written: set[int]
    ) -> Iterator[Op]:
        """The copies of a segment's ops, once; before them those of earlier segments that they
        read.
        """
        if segment in written:
            return
        written.add(segment)
        own = {self._maker[name] for name in needed if self._segment(name) == segment}
        for index in sorted(own):
            op = self._block.ops[index]
            for name in op.inputs:
                if name in needed:
                    yield from self._copies(self._segment(name), needed, names, written)
            outputs = tuple(names.get(name, "") for name in op.outputs)
            yield replace(renamed(op, names), outputs=outputs)


def _seed(block: Block) -> int:
    """The number of the op with which backward begins: ones in the shape of the loss."""
    for index, op in reversed(list(enumerate(block.ops))):
        if op.type == "aten.ones_like" and op.arguments.get("self") == Ref("loss"):
            return index
    raise ValueError(
        "strategy.recompute: expected a program whose backward begins with aten.ones_like(loss), "
        "got one without"
    )


def _is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in aten_overload(op.type).tags


# ---- sparsity ----
#
# 2:4 sparsity of a program (``asp``): a mask for each weight, and an op that masks its gradient.
#
# The mask is a buffer of the program, so that all trainers have trainer 0's.  The weights
# themselves are the module's tensors; they are masked here, once: elements without gradient stay 0.
#  See [Note: zeros that stay] in trainer/modules/sparsity.py.


_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the weights that were masked, by weight


def _apply_sparsity(programs: Programs, strategy: DistributedStrategy) -> Programs:
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
    """Masks a weight in place; returns the mask, one tensor for all programs that train it."""
    mask: Tensor | None = _masks.get(weight)  # type: ignore[no-untyped-call]  # torch's own
    if mask is None or weight.detach()[~mask].any():
        mask = mask_of(weight)
        _masks[weight] = mask
    with torch.no_grad():
        weight.mul_(mask)
    return mask


def _with_mask(block: Block, name: str) -> Block:
    """The block in which the gradient of a weight is masked as soon as it is complete: its name
    then means the masked one.  A scaled gradient is masked before it is checked, and so before
    trainers sum it.
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


SPARSITY = Rewrite(lambda strategy: bool(strategy.asp), _apply_sparsity)


# ---- update rules ----
#
# LARS, LAMB or adam_d2sum in the place of a program's optimizer: the optimizer ops change.


def _asked(strategy: DistributedStrategy) -> bool:
    return any(getattr(strategy, name) for name in REPLACEMENTS)


def _apply_update_rules(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """The programs with the other optimizer's ops and states.

    Raises:
        ValueError: the switch does not replace this optimizer, or it updates rows of a table.
    """
    block, storage = programs.main.main, programs.main.storage
    ops = optimizer_ops(block)
    if not ops:
        return programs
    live = None if storage is None else storage.optimizer
    if live is not None and storage is not None:
        former, names = live, {tensor: name for name, tensor in storage.tensors.items()}
    else:
        former, names = _optimizer_of(block, ops)
    groups = len(former.param_groups)
    _check_tables(block, groups, strategy)
    types: Mapping[str, str] = {} if storage is None else storage.module_types
    made = replaced(former, strategy, names, types, apart=True)
    changed = _changed(block, made, names, len(made.param_groups) - groups)
    kept = None if storage is None else _stepped_by(storage, made if live is not None else None)
    startup = replace(programs.startup, storage=kept)
    return Programs(replace(programs.main.with_blocks(changed), storage=kept), startup)


def _stepped_by(storage: Storage, optimizer: torch.optim.Optimizer | None) -> Storage:
    """The same live tensors, which another optimizer steps."""
    made = copy.copy(storage)
    made.optimizer, made.together = optimizer, (made,)
    return made


def _optimizer_of(block: Block, ops: list[Op]) -> tuple[torch.optim.Optimizer, dict[Tensor, str]]:
    """An optimizer with the groups of a program's ops, over stand-ins for its parameters: of a
    program that this process did not capture.
    """
    rules = rules_of_ops(block, None)
    of_op = {parameter_of(op): torch.empty(0) for op in ops}
    groups = [
        {
            "params": [of_op[parameter_of(op)] for op in ops if group_of(op) == index],
            **rule.hparams,
            **rule.flags,
        }
        for index, rule in enumerate(rules)
        if rule.type in RULES
    ]
    cls = RULES[ops[0].type].cls if ops[0].type in RULES else torch.optim.Optimizer
    return cls(groups), {tensor: name for name, tensor in of_op.items()}  # type: ignore[call-arg]


def _check_tables(block: Block, groups: int, strategy: DistributedStrategy) -> None:
    """Raises ValueError if the replaced optimizer updates a table's rows."""
    for op in row_updates(block):
        if group_of(op) < groups:
            switch = next(name for name in REPLACEMENTS if getattr(strategy, name))
            raise ValueError(
                f"strategy.{switch}: table {parameter_of(op)!r} follows the optimizer that "
                f"{REPLACEMENTS[switch].cls.__name__} replaces, and rows have no such rule: give "
                "the table an optimizer of its own"
            )


def _changed(
    block: Block, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], added: int
) -> Block:
    """The block with the optimizer's ops and states.

    Args:
        added: the number of groups that the optimizer has more than the former one; the groups of
            tables' own optimizers follow them.
    """
    index_of = {
        names[parameter]: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names
    }
    variables: dict[str, Variable] = {
        name: variable
        for name, variable in block.variables.items()
        if variable.role is not Role.STATE or variable.of not in index_of
    }
    made: list[Op] = []
    for op in block.ops:
        if updates_rows(op):
            arguments = {**op.arguments, "group": group_of(op) + added}
            made.append(replace(op, arguments=arguments))
        elif is_optimizer(op.type):
            name = parameter_of(op)
            changed = update_op(optimizer, name, index_of[name], gradient_of(op), variables)
            made.append(replace(changed, location=op.location))
        else:
            made.append(op)
    return replace(block, variables=freeze(variables), ops=tuple(made))


UPDATE_RULES = Rewrite(_asked, _apply_update_rules)
