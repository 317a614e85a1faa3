"""Update rules that users register: a block of ops on one parameter, and how it runs.

[Note: rules as data]  A registered rule is a :class:`Block` that any process can run without the
code it was captured from.  Its variables are what it reads: ``param`` and ``grad``; the states, of
the parameter's shape (``("n",)``) or scalars (``()``); the hparams (role INPUT), numbers or tuples
of them, whose items are ``betas.0``, ``betas.1``.  Its ops write new names only, and the new values
are called ``param@NEW`` and ``STATE@NEW``.  A state begins as 0.

A server takes a block only from a list of ops.  Each is a function of its arguments, works on one
element at a time, and ends; and there are few values at a time.  So the shapes of all results
follow, a parameter may be cut anywhere, and a stranger's block can neither read, run nor fill
anything else.  The ops in ``NORMS`` make one number of a whole tensor: a parameter whose rule has
one is kept whole on one server.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from transpiler.ir.aten_ops import aten_overload, aten_schema
from transpiler.ir.block import Argument, Block, Op, Ref, Role
from transpiler.ir.schema import (
    INDEX,
    NUMBER,
    VARIABLE,
    ArgumentKind,
    Parameter,
    Schema,
    check_against,
    fixed,
    where,
)

_TYPE = re.compile(r"registered\.\w{1,64}")
_UPDATE = ArgumentKind("the block of a rule", lambda value: isinstance(value, Block))
NEW = "@NEW"
MOST_OPS = 256
MOST_INPUTS = 64
MOST_ALIVE = 64  # values at a time, those that it reads among them
MOST_ITEMS = 16  # of an hparam that is a tuple

ELEMENT_WISE = frozenset(
    "abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not "
    "bitwise_or bitwise_xor ceil clamp clamp_max clamp_min copysign cos cosh div eq erf erfc exp "
    "exp2 expm1 floor fmax fmin fmod frac ge gt heaviside hypot isfinite isinf isnan le lerp log "
    "log10 log1p log2 logical_and logical_not logical_or logical_xor lt maximum minimum mul "
    "nan_to_num ne neg pow reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin "
    "sinh sqrt square sub tan tanh threshold trunc where xlogy".split()
)
"""Ops of torch's that work on one element at a time, in any of their functional overloads."""

# ops of torch's of which a rule may use these arguments only
_NARROW: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "aten.clone": frozenset({"self"}),
        "aten._to_copy": frozenset({"self", "dtype"}),
        "aten.zeros_like": frozenset({"self", "dtype"}),
        "aten.ones_like": frozenset({"self", "dtype"}),
        "aten.full_like": frozenset({"self", "fill_value", "dtype"}),
        "aten.sum": frozenset({"self"}),
        "aten.mean": frozenset({"self"}),
        "aten.max": frozenset({"self"}),
        "aten.min": frozenset({"self"}),
        "aten.amax": frozenset({"self"}),
        "aten.amin": frozenset({"self"}),
        "aten.norm.Scalar": frozenset({"self", "p"}),
        "aten.linalg_vector_norm": frozenset({"self", "ord"}),
    }
)
NORMS = frozenset(
    f"aten.{name}"
    for name in ("sum", "mean", "max", "min", "amax", "amin", "norm.Scalar", "linalg_vector_norm")
)
"""Ops that make one number of a whole tensor."""


def _total(function: Callable[..., Any]) -> Callable[..., float]:
    """The function with nan where Python would raise, or leave the real numbers: no rate of a
    trainer ends a server.
    """

    def computed(*numbers: float) -> float:
        try:
            found = function(*numbers)
        except (ArithmeticError, ValueError):
            return math.nan
        return found if isinstance(found, float) else math.nan

    return computed


NUMBERS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "sym.add": _total(operator.add),
        "sym.sub": _total(operator.sub),
        "sym.mul": _total(operator.mul),
        "sym.truediv": _total(operator.truediv),
        "sym.pow": _total(operator.pow),
        "sym.neg": _total(operator.neg),
        "sym.sqrt": _total(math.sqrt),
    }
)
"""Arithmetic on hparams, which are floats: no whole number could grow without end."""


def expect(holds: bool, what: str) -> None:
    """Raises a ValueError with the message ``what`` unless the condition holds."""
    if not holds:
        raise ValueError(what)


# ---- the parts of a block ----


def is_registered(op_type: str) -> bool:
    """Whether this is the type of a registered rule: ``registered.lion``."""
    return _TYPE.fullmatch(op_type) is not None


def states_of(block: Block) -> dict[str, bool]:
    """The states of a registered rule: True for one of the parameter's shape, False for a
    scalar.
    """
    return {variable.name: bool(variable.shape) for variable in block.variables_of(Role.STATE)}


def hparams_of(block: Block) -> dict[str, int | None]:
    """The hparams of a registered rule: the number of items of a tuple; None for a number."""
    extents = {each.name: each.shape for each in block.variables_of(Role.INPUT)}
    return {name: int(shape[0]) if shape else None for name, shape in extents.items()}


def needs_norms(block: Block) -> bool:
    """Whether the rule computes a number of a whole tensor, so that no parameter may be cut."""
    return any(op.type in NORMS for op in block.ops)


def digest(block: Block) -> str:
    """A digest of what a rule reads and does, for a manifest: 16 hexadecimal digits."""
    reads = [(each.name, each.role.name, each.shape) for each in block.variables.values()]
    does = [(op.type, sorted(op.arguments.items()), op.outputs) for op in block.ops]
    return blake2b(repr((reads, does)).encode(), digest_size=8).hexdigest()


def results_of(block: Block) -> dict[str, str]:
    """The variable of each new value: ``param`` -> ``param@NEW``, then each state's."""
    return {name: name + NEW for name in ("param", *states_of(block))}


def inputs_of(block: Block) -> list[str]:
    """The names that ops may read before any op has run."""
    items = [
        [name] if count is None else [f"{name}.{index}" for index in range(count)]
        for name, count in hparams_of(block).items()
    ]
    return ["param", "grad", *states_of(block), *(name for each in items for name in each)]


# ---- checks ----


def check(block: Block) -> None:
    """Checks that a block is a rule; see [Note: rules as data].

    Raises:
        ValueError: naming the variable or the op, what was expected and what came.
    """
    expect(
        len(block.ops) <= MOST_OPS,
        f"update: expected {MOST_OPS} ops or fewer, got {len(block.ops)}",
    )
    _check_variables(block)
    known = set(inputs_of(block))
    for op in block.ops:
        _check_op(op)
        for name in op.inputs:
            expect(
                name in known,
                f"update, {where(op)}: expected variables that an earlier op wrote, got {name!r}",
            )
        (name,) = op.outputs
        expect(
            name not in known,
            f"update, {where(op)}: expected a new name as its result, got {name!r}",
        )
        known.add(name)
    alive = most_alive(block)
    expect(
        alive <= MOST_ALIVE,
        f"update: expected {MOST_ALIVE} values or fewer at a time, got {alive}",
    )
    for name, result in results_of(block).items():
        expect(result in known, f"update: expected an op that writes {result!r}, got none: {name}")


def registered_schema(op: Op) -> Schema:
    """The schema of a registered optimizer op, whose block gives its states and hparams.

    Raises:
        ValueError: it has no block, or one that is not a rule.
    """
    block = op.arguments.get("update")
    if not isinstance(block, Block):
        raise ValueError(f"{where(op)}, argument 'update': expected the rule's block, got none")
    try:
        check(block)
    except ValueError as error:
        raise ValueError(f"{where(op)}: {error}") from error
    hparams = {
        name: Parameter(NUMBER if count is None else fixed(NUMBER, count))
        for name, count in hparams_of(block).items()
    }
    tensors = {name: Parameter(VARIABLE) for name in ("param", "grad", *states_of(block))}
    own = {"group": Parameter(INDEX), **hparams, "update": Parameter(_UPDATE)}
    return Schema({**tensors, **own}, 1)


def most_alive(block: Block) -> int:
    """The largest number of values that exist at a time while the rule runs."""
    last = {name: index for index, op in enumerate(block.ops) for name in op.inputs}
    kept = {*inputs_of(block), *results_of(block).values()}
    alive = most = len(inputs_of(block))
    for index, op in enumerate(block.ops):
        alive += 1
        most = max(most, alive)
        alive -= sum(last[name] == index and name not in kept for name in set(op.inputs))
    return most


def _check_variables(block: Block) -> None:
    count = len(block.variables)
    expect(count <= MOST_INPUTS, f"update: expected {MOST_INPUTS} variables or fewer, got {count}")
    for name, variable in block.variables.items():
        role, shape, what = variable.role, variable.shape, f"update, variable {name!r}"
        expect(name == variable.name, f"{what}: expected its own name, got {variable.name!r}")
        fixed = {"param": Role.PARAMETER, "grad": Role.GRADIENT}.get(name)
        roles = (Role.STATE, Role.INPUT) if fixed is None else (fixed,)
        expected = " or ".join(each.name for each in roles)
        expect(role in roles, f"{what}: expected a {expected}, got a {role.name}")
        reserved = name in ("group", "update", "params") or "@" in name or "." in name or not name
        expect(not reserved, f"{what}: expected another name")
        if role is Role.INPUT:
            items = shape[0] if len(shape) == 1 else 1 if not shape else -1
            fits = isinstance(items, int) and 1 <= items <= MOST_ITEMS
            wanted = f"[] or [items], of 1 to {MOST_ITEMS}"
        else:
            fits = shape == ("n",) or (role is Role.STATE and shape == ())
            wanted = "['n'], or [] of a state"
        expect(fits, f"{what}: expected the shape {wanted}, got {list(shape)}")
    for name in ("param", "grad"):
        expect(name in block.variables, f"update: expected a variable {name!r}, got none")


def _check_op(op: Op) -> None:
    expect(
        len(op.outputs) == 1 and op.outputs[0] != "",
        f"update, {where(op)}: expected one result, got {', '.join(op.outputs[:8]) or 'none'}",
    )
    if op.type in NUMBERS:
        names = {"a"} if op.type in ("sym.neg", "sym.sqrt") else {"a", "b"}
        fits = set(op.arguments) == names and all(map(_is_operand, op.arguments.values()))
        what = "numbers, at least one of them a variable"
        expect(fits and bool(op.inputs), f"update, {where(op)}: expected {what}")
    elif op.type == "assign":
        fits = set(op.arguments) == {"x"} and isinstance(op.arguments["x"], Ref)
        expect(fits, f"update, {where(op)}: expected a variable as its argument x")
    else:
        _check_aten(op)


def _is_operand(value: Argument) -> bool:
    return isinstance(value, Ref | int | float) and not isinstance(value, bool)


def _check_aten(op: Op) -> None:
    name = op.type.split(".")[1] if op.type.startswith("aten.") else ""
    expect(
        op.type in _NARROW or name in ELEMENT_WISE,
        f"update, {where(op)}: expected an op that works element by element, or one of "
        f"{', '.join(sorted(NORMS))}",
    )
    overload = aten_overload(op.type)
    returned = [str(each.type) for each in overload._schema.returns]
    expect(
        not overload._schema.is_mutable and returned == ["Tensor"],
        f"update, {where(op)}: expected an op that changes none of its arguments and gives one "
        "tensor",
    )
    try:
        schema = aten_schema(op.type)
        check_against(op, Schema(schema.parameters, 1))
    except ValueError as error:
        raise ValueError(f"update, {error}") from error
    odd = sorted(set(op.arguments) - _NARROW.get(op.type, frozenset(op.arguments)))
    expect(not odd, f"update, {where(op)}: a rule may not use the argument {odd[:1]}")
    tensors = [key for key, value in op.arguments.items() if isinstance(value, tuple)]
    expect(not tensors, f"update, {where(op)}, argument {tensors[:1]}: expected no list")
