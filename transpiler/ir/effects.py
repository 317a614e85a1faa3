"""The effects of an op besides its results: the variables that it changes, and shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from transpiler.ir.aten_ops import aten_overload
from transpiler.ir.graph import Op, refs

# with training=False these read the running statistics that their schemas say they write
_STATISTICS = ("running_mean", "running_var")


def changed(op: Op) -> list[str]:
    """The variables that an op changes in place."""
    if not op.type.startswith("aten."):
        return []
    evaluates = op.arguments.get("training") is False
    written = [
        argument.name
        for argument in aten_overload(op.type)._schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not (evaluates and argument.name in _STATISTICS)
    ]
    return [name for key in written if key in op.arguments for name in refs(op.arguments[key])]


def _shared(op: Op) -> list[str]:
    """The variables whose memory an op's results may share."""
    if op.type == "assign":
        return list(op.inputs)
    if not op.type.startswith("aten."):
        return []
    schema = aten_overload(op.type)._schema
    if all(each.alias_info is None for each in schema.returns):
        return []
    keys = [each.name for each in schema.arguments if each.alias_info is not None]
    return [name for key in keys if key in op.arguments for name in refs(op.arguments[key])]


class Aliases:
    """Which variables of a block may share memory: views, and results of ops in place.

    Args:
        ops: of the block.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._parent: dict[str, str] = {}
        for op in ops:
            for name in _shared(op):
                for result in filter(None, op.outputs):
                    self._parent[self.of(result)] = self.of(name)

    def of(self, name: str) -> str:
        """A variable that stands for all that may share memory with this one."""
        while name in self._parent and self._parent[name] != name:
            name = self._parent[name]
        return name
