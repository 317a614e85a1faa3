"""Tables in a program that gets a backward part: rows count as inputs while it is differentiated.

What lookups read becomes inputs of the program; the gradients of these inputs, and the lookups'
ids, make the gradient of each table's rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.table_ops import gradient_variable, is_sparse, table_name, table_of
from transpiler.ir.tables import Segment, ShowClickEntry, Table
from transpiler.program import Program


@dataclass(frozen=True)
class Opened:
    """A program whose lookups have become inputs.

    Attributes:
        program: without lookups; what they read is an input, their ids are outputs.
        rows: the inputs whose gradients are wanted.
        original: the program as it was.
        tables: those whose gradients are wanted, by name.
    """

    program: Program
    rows: tuple[str, ...]
    original: Program
    tables: Mapping[str, Table]

    def closed(self, made: Program) -> Program:
        """The program with its backward part, with its lookups and the gradients of rows.

        Args:
            made: ``program`` with the gradients of ``rows``.
        """
        before = self.original.main.variables
        roles = {name: before.get(name, each) for name, each in made.main.variables.items()}
        roles |= {
            f"{name}@GRAD": replace(roles[f"{name}@GRAD"], role=Role.TEMPORARY, of="")
            for name in self.rows
            if f"{name}@GRAD" in roles
        }
        touched = [gradient_variable(table, f"{name}@GRAD") for name, table in self.tables.items()]
        ops = list(self._ops(made.main))
        written = {name for op in ops for name in op.outputs}
        roles |= {each.name: each for each in touched if each.name in written}
        missing = {op.outputs[0] for op in ops if op.type == "sparse_table"} - set(roles)
        variables = {**{name: before[name] for name in missing}, **roles}
        return made.with_blocks(Block(0, freeze(variables), tuple(ops)))

    def _ops(self, main: Block) -> Iterator[Op]:
        lookups = [op for op in self.original.main.ops if op.type == "lookup_table"]
        yield from (op for op in self.original.main.ops if op.type == "sparse_table")
        made = {name for op in main.ops for name in op.outputs}
        last = self._last(main, lookups)
        later = {op.outputs[0] for op in lookups} | made  # what nothing has written yet
        waiting = list(lookups)
        for op in (None, *main.ops):
            # a lookup waits for its ids, and the size of rows, which is read first of all, for them
            waiting += [] if op is None else [op]
            ready = True
            while ready:
                ready = False
                for each in list(waiting):
                    if not later.intersection(each.inputs):
                        waiting.remove(each)
                        later.difference_update(each.outputs)
                        ready = True
                        yield each
                        for name in set(each.outputs) & set(last):
                            yield self._gradient(last[name])

    def _last(self, main: Block, lookups: list[Op]) -> dict[str, list[Op]]:
        """The lookups of each table that has a gradient, by the last of their rows' gradients."""
        order = {name: index for index, op in enumerate(main.ops) for name in op.outputs}
        found: dict[str, list[Op]] = {}
        for table in self.tables:
            own = [
                op for op in lookups if table_name(op) == table and f"{op.outputs[0]}@GRAD" in order
            ]
            if own:
                last = max((f"{op.outputs[0]}@GRAD" for op in own), key=order.__getitem__)
                found[last] = own
        return found

    def _gradient(self, lookups: list[Op]) -> Op:
        name = table_name(lookups[0])
        arguments: dict[str, Argument] = {
            "w": Ref(name),
            "ids": tuple(op.arguments["ids"] for op in lookups),
            "grads": tuple(Ref(f"{op.outputs[0]}@GRAD") for op in lookups),
        }
        untrained = tuple(_untrained(self.original, op) for op in lookups)
        if any(each is not None for each in untrained):
            arguments["padding_idx"] = untrained
        return Op("lookup_table_grad", arguments, (f"{name}@GRAD",))


def _untrained(program: Program, lookup: Op) -> Argument:
    """The id whose row gets no gradient; of torch's own embeddings their module knows it."""
    held = {} if program.storage is None else program.storage.tables
    modules = held.get(table_name(lookup), ())
    module: nn.Module | None = next(iter(modules), None)
    if module is not None and is_sparse(module):
        found: int | None = module.padding_idx  # type: ignore[assignment]  # torch's own
        return found
    return lookup.arguments.get("padding_idx")


def opened(program: Program, wanted: Collection[str], what: str) -> Opened:
    """The program with inputs in the place of what its lookups read.

    Args:
        wanted: the names of parameters, inputs and tables whose gradients are wanted.
        what: the function that asks, for messages.

    Raises:
        ValueError: a table counts shows and clicks.
    """
    main = program.main
    lookups = [op for op in main.ops if op.type == "lookup_table"]
    tables = {
        op.outputs[0]: table_of(op, [Segment(0, int(str(op.arguments["dim"])), 0)])
        for op in main.ops
        if op.type == "sparse_table" and op.outputs[0] in wanted
    }
    for name, table in tables.items():
        if isinstance(table.entry, ShowClickEntry):
            raise ValueError(
                f"{what}: table {name!r} counts shows and clicks, which come with its gradients: "
                "capture the step with an optimizer"
            )
    read = {op.outputs[0]: table_name(op) for op in lookups}
    ids = {name for op in lookups for name in refs(op.arguments["ids"])}

    def told(variable: Variable) -> Variable:
        if variable.name in read:
            return replace(variable, role=Role.INPUT)
        kept = variable.name not in ids or variable.role is not Role.TEMPORARY
        return variable if kept else replace(variable, role=Role.OUTPUT)

    variables = {
        name: told(variable)
        for name, variable in main.variables.items()
        if variable.role is not Role.TABLE
    }
    ops = tuple(op for op in main.ops if op.type not in ("lookup_table", "sparse_table"))
    block = Block(0, freeze(variables), ops)
    rows = tuple(name for name, table in read.items() if table in tables)
    return Opened(program.with_blocks(block), rows, program, tables)
