"""The phase of a step that each op of a block belongs to, for text and pictures."""

from __future__ import annotations

from transpiler.ir.graph import Block, Op, Role
from transpiler.ir.ops import COMMUNICATION, is_optimizer

FORWARD = "forward"
BACKWARD = "backward"
EXCHANGE = "exchange"  # communication with servers or trainers
MERGE = "merge"  # sum, scale, clip of gradients
UPDATE = "update"

_EXCHANGE = COMMUNICATION | {"split", "concat", "split_ids", "merge_ids"}
_MERGE = frozenset(
    {
        "sum",
        "scale",
        "clip",
        "clip_by_norm",
        "global_norm_scale",
        "scale_by",
        "norm_scale",
        "dgc",
        "dc_compensate",
        "check_finite_and_unscale",
        "update_loss_scaling",
    }
)


def _own(op: Op) -> str | None:
    if op.type in _EXCHANGE:
        return EXCHANGE
    if op.type in _MERGE:
        return MERGE
    return UPDATE if is_optimizer(op.type) else None


def _last_output(block: Block) -> int:
    """The number of the op that computes the loss: the first that defines an output."""
    outputs = {variable.name for variable in block.variables_of(Role.OUTPUT)}
    loss = outputs & {"loss"} or outputs
    return next(
        (number for number, op in enumerate(block.ops) if loss & set(op.outputs)), len(block.ops)
    )


_COMPUTE = frozenset(
    {"assign", "assign_value", "lookup_table", "py_func", "recurrent", "sparse_table"}
)


def computes(op: Op) -> bool:
    """Whether an op is one of compute: it neither updates, clips nor communicates."""
    return op.type.startswith(("aten.", "sym.")) or op.type in _COMPUTE


def kind_of(main: Block) -> str:
    """What a program without a deployment is: a forward program computes, and neither
    differentiates nor updates anything.
    """
    forward = bool(main.ops) and all(map(computes, main.ops))
    trains = bool(main.variables_of(Role.GRADIENT))
    return "forward program" if forward and not trains else "single-node program"


def phases(block: Block) -> list[str]:
    """The phase of every op of a block.

    Compute is forward up to the loss and backward after it, if there are gradients.
    """
    trains = bool(block.variables_of(Role.GRADIENT))
    end = _last_output(block) if trains else len(block.ops)
    return [
        _own(op) or (FORWARD if number <= end else BACKWARD) for number, op in enumerate(block.ops)
    ]
