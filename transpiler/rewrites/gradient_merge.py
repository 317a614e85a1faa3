"""Gradient merge: the gradients of k runs make one update.

One op stands between backward and what is done to gradients::

    w@GRAD.merged, b@GRAD.merged = gradient_merge(w@GRAD, b@GRAD, k_steps=4, avg=True)

It adds to sums that stay from run to run.  In every k-th run its results are these sums, or means,
and what follows acts: clipping, sends, sums over trainers, updates, receives.  In the other runs
the program ends at this op.
"""

from __future__ import annotations

from dataclasses import replace

from transpiler.ir.graph import Op, Ref, freeze
from transpiler.ir.ops import is_optimizer
from transpiler.ir.renamed import renamed
from transpiler.ir.updates import row_updates
from transpiler.rewrites.programs import Programs
from transpiler.strategy.strategy import DistributedStrategy

SUFFIX = ".merged"
_OF_GRADIENTS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})


def gradient_merge(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """Puts the op in front of clipping and updates, which read its results.

    Raises:
        ValueError: the program has tables, or gradients are to leave during backward; or what else
            the strategy asks for takes every run for an update.
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
    names = {name: name + SUFFIX for name in read if name not in params}
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
    """What an op reads that may be a gradient."""
    if is_optimizer(op.type):
        return tuple(ref.name for ref in [op.arguments["grad"]] if isinstance(ref, Ref))
    return op.inputs
