"""Deep gradient compression in a program: a ``dgc`` op between each large gradient and its update.

::

    w@GRAD        = ...                                        w@GRAD     = ...
    w@GRAD@CLIP   = scale_by(w@GRAD, ...)              ->      w@GRAD@CLIP = scale_by(w@GRAD, ...)
    w             = momentum(w@GRAD@CLIP, lr, 0.9)             w@GRAD@DGC = dgc(w@GRAD@CLIP, w, 0.9)
                                                               w          = sgd(w@GRAD@DGC, lr)

The op keeps velocity and residual in the process that runs it: see [Note: deep gradient
compression] in transpiler/optim/dgc.py.  The updates by plain SGD are groups of their own.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from transpiler.ir.graph import Op, Ref, Role, Variable, freeze
from transpiler.ir.updates import (
    compressed_parameters,
    gradient_of,
    group_of,
    optimizer_ops,
    parameter_of,
    rules_of_ops,
)
from transpiler.optim.dgc import LEAST
from transpiler.program import Program
from transpiler.rewrites.rewrites import Programs, Rewrite
from transpiler.strategy.strategy import DistributedStrategy

DTYPES = ("float32", "float64")


def compress_gradients(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """The programs with a ``dgc`` op for each large gradient.

    Raises:
        ValueError: an update is not momentum SGD, or the program clips values, or checks gradients
            for an overflow.
    """
    if strategy.amp and not strategy.amp_configs["use_pure_bf16"]:
        raise ValueError(
            "dgc, amp: a program checks whole gradients for an overflow in float16, and compressed "
            "ones leave before that; set amp_configs['use_pure_bf16'], or train with fleet"
        )
    main = programs.main
    updates = optimizer_ops(main.main)
    _check(main, updates)
    large = {parameter_of(op): op for op in updates if _is_large(main, parameter_of(op))}
    groups = _groups(main, list(large.values()))
    final = {name: number for number, op in enumerate(main.main.ops) for name in op.outputs}
    added = {final[gradient_of(op)]: _compressing(op, strategy) for op in large.values()}
    ops: list[Op] = []
    for number, op in enumerate(main.main.ops):
        ops.append(_plain(op, groups) if op in large.values() else op)
        if number in added:
            ops.append(added[number])
    kept = {
        name: variable
        for name, variable in main.main.variables.items()
        if not (variable.role is Role.STATE and variable.of in large)
    }
    kept |= {variable.name: variable for variable in _results(main, large)}
    block = replace(main.main, ops=tuple(ops), variables=freeze(kept))
    return programs._replace(main=main.with_blocks(block, *main.blocks[1:]))


DGC = Rewrite(lambda strategy: strategy.dgc, compress_gradients)


def _check(program: Program, updates: list[Op]) -> None:
    if any(op.type == "clip" for op in program.main.ops):
        raise ValueError(
            "strategy.dgc: expected grad_clip=ClipGradByNorm(...) or ClipGradByGlobalNorm(...), "
            "whose bound trainers can divide among themselves, got ClipGradByValue"
        )
    for op in updates:
        if op.type != "momentum" or op.arguments["dampening"]:
            raise ValueError(
                "strategy.dgc: expected torch.optim.SGD with a momentum above 0 and no dampening, "
                "because trainers apply the momentum before they choose what to send; "
                f"{parameter_of(op)} is updated by {op.type}"
            )


def _is_large(program: Program, name: str) -> bool:
    variable = program.main.variables[name]
    extents = [extent for extent in variable.shape if isinstance(extent, int)]
    return variable.dtype in DTYPES and math.prod(extents) >= LEAST


def _groups(program: Program, large: list[Op]) -> dict[int, int]:
    """The number of the new group of the large parameters of each group."""
    optimizer = program.storage.optimizer if program.storage else None
    count = len(rules_of_ops(program.main, optimizer))
    sources = dict.fromkeys(map(group_of, large))
    return {source: count + place for place, source in enumerate(sources)}


def _compressing(op: Op, strategy: DistributedStrategy) -> Op:
    configs, own = strategy.dgc_configs, op.arguments
    arguments = {
        "grad": own["grad"],
        "param": own["param"],
        "group": own["group"],
        "momentum": own["momentum"],
        "weight_decay": own["weight_decay"],
        "nesterov": own.get("nesterov", False),
        "maximize": own.get("maximize", False),
        "rampup_begin_step": configs["rampup_begin_step"],
        "rampup_step": configs["rampup_step"],
        "sparsity": tuple(configs["sparsity"]),
    }
    return Op("dgc", arguments, (f"{parameter_of(op)}@GRAD@DGC",), op.location)


def _plain(op: Op, groups: dict[int, int]) -> Op:
    """The update of a large parameter: plain SGD."""
    own = {key: value for key, value in op.arguments.items() if key != "momentum_buffer"}
    plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    if "nesterov" in own:
        plain["nesterov"] = False
    grad, group = Ref(f"{parameter_of(op)}@GRAD@DGC"), groups[group_of(op)]
    return replace(op, type="sgd", arguments={**own, **plain, "grad": grad, "group": group})


def _results(program: Program, large: dict[str, Op]) -> Iterator[Variable]:
    for name in large:
        held = program.main.variables[name]
        yield Variable(f"{name}@GRAD@DGC", held.shape, held.dtype, Role.GRADIENT, name)


def compression_of(programs: Sequence[Program], configured: Mapping[str, str]) -> Mapping[str, str]:
    """The compression of gradients, by pattern of parameter names: sparse for those of ``dgc`` ops.

    Args:
        configured: that of a configuration.

    Raises:
        ValueError: both choose a compression, or one of several programs compresses.
    """
    names = [name for program in programs for name in compressed_parameters(program.main)]
    if names and (configured or len(programs) > 1):
        other = "compression" if configured else "a list of programs"
        raise ValueError(f"{other}: excludes strategy.dgc; give one of the two")
    return {glob.escape(name): "sparse" for name in names} or configured
