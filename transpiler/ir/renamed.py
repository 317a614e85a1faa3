"""Ops that read other variables than before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transpiler.ir.block import Argument, Op, Ref


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op, reading other variables; it writes the same ones.

    Args:
        names: the new name of each variable that has one, by its old name.
    """
    arguments = {key: renamed_argument(value, names) for key, value in op.arguments.items()}
    return replace(op, arguments=arguments)


def renamed_argument(argument: Argument, names: Mapping[str, str]) -> Argument:
    """The argument with its variables renamed."""
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(renamed_argument(item, names) for item in argument)
    return argument
