"""A training block in evaluation mode, and a block pruned to what its results need.

[Note: dropout in a program]  A program holds what autograd saw: an empty tensor, filled with zeros
and ones (``bernoulli_``), divided by the probability of a one, times the values.  The rewriting
looks for these ops and for those of alpha dropout.  A mask that the step draws itself in other ways
stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from transpiler.ir.aten_ops import CHECKS
from transpiler.ir.effects import Aliases, changed
from transpiler.ir.graph import PERSISTENT, Argument, Block, Op, Ref, Role, freeze

# ---- pruning ----
#
# A block without the ops and variables that some results do not need.


def pruned(main: Block, wanted: Iterable[str], inputs: Iterable[str] = ()) -> Block:
    """The block with only the ops that give ``wanted`` their values, in their order.

    An op that changes a variable in place stays if a later one reads that memory.

    Args:
        main: block 0 of a program.
        wanted: names of variables.
        inputs: inputs that stay although nothing reads them.
    """
    ops = needed(main.ops, wanted)
    named = {name for op in ops for name in (*op.inputs, *filter(None, op.outputs))}
    named |= {*wanted, *inputs}
    variables = {name: each for name, each in main.variables.items() if name in named}
    return replace(main, ops=tuple(ops), variables=freeze(variables))


def needed(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """The ops that give ``wanted`` their values, in their order, and those that check them."""
    memory, names = Aliases(ops), set(wanted)
    touched = {memory.of(name) for name in names}
    kept: list[Op] = []
    for op in reversed(ops):
        gives = not names.isdisjoint(op.outputs)
        if not gives and not any(memory.of(name) in touched for name in changed(op)):
            continue
        kept.append(op)
        names.difference_update(op.outputs)
        names.update(op.inputs)
        touched.update(map(memory.of, op.inputs))
    left_out = {name for op in ops for name in op.outputs}
    left_out -= {name for op in kept for name in op.outputs}
    chosen = {id(op) for op in kept}
    return [
        op
        for op in ops
        if id(op) in chosen or (op.type in CHECKS and left_out.isdisjoint(op.inputs))
    ]


def results_and_inputs(main: Block) -> tuple[list[str], list[str]]:
    """The names of a step's outputs, and of its inputs, in order.

    Raises:
        ValueError: the step returns nothing.
    """
    wanted = [variable.name for variable in main.variables_of(Role.OUTPUT)]
    if not wanted:
        raise ValueError("expected a program with outputs, got one that returns nothing")
    return wanted, [variable.name for variable in main.variables_of(Role.INPUT)]


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other names in place of those of its arguments that are keys of ``names``."""
    if not names or names.keys().isdisjoint(op.inputs):
        return op

    def other(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        return tuple(map(other, argument)) if isinstance(argument, tuple) else argument

    return replace(op, arguments={key: other(each) for key, each in op.arguments.items()})


# ---- evaluation ----
#
# A training block in evaluation mode: dropout off, batch norm with its running statistics, no
# backward, no update, no message to a server.
#
# A trainer's block still pulls rows from the servers, and receives the parameters first.


_EMPTY = ("aten.empty_like", "aten.new_empty", "aten.empty.memory_format")
_ARRIVAL = ("recv", "fetch_barrier", "concat")


def evaluated(
    main: Block,
    place: Mapping[str, Argument] | None = None,
    captured: Block | None = None,
) -> Block:
    """The evaluation block of a training block.

    It has the same inputs and outputs, and changes no variable that persists.

    Args:
        main: block 0 of a single-node program, or of a trainer's.
        place: the arguments of an op that addresses every server; None: there are none.
        captured: the step captured in evaluation mode; None: the block's ops are rewritten.

    Raises:
        ValueError: the step returns nothing.
    """
    wanted, inputs = results_and_inputs(main)
    received = [op for op in main.ops if op.type == "recv"]
    concatenated = [op for op in main.ops if op.type == "concat"]
    if captured is None:
        computing = [op for op in main.ops if op.type not in _ARRIVAL]
        ops = _without_writes(_Evaluating(computing).ops(), main)
        captured = replace(main, ops=tuple(ops))
    found = pruned(captured, wanted, inputs)
    if not received or place is None:
        return found
    arriving = [*received, Op("fetch_barrier", place), *concatenated]
    return _received_first(found, arriving, main)


def _received_first(found: Block, arriving: Iterable[Op], main: Block) -> Block:
    """The block with the ops that receive parameters at its front."""
    ops = [*arriving, *found.ops]
    named = {name for op in arriving for name in (*op.inputs, *filter(None, op.outputs))}
    received = {name: each for name, each in main.variables.items() if name in named}
    return replace(found, ops=tuple(ops), variables=freeze({**found.variables, **received}))


def _without_writes(ops: Iterable[Op], main: Block) -> Iterator[Op]:
    """The ops without those that change a persistent variable; their results are read as it is."""
    given = list(ops)
    memory = Aliases(given)
    held = {memory.of(v.name) for v in main.variables.values() if v.role in PERSISTENT}
    other: dict[str, str] = {}
    for op in given:
        op = renamed(op, other)
        written = [name for name in changed(op) if memory.of(name) in held]
        if written and len(op.outputs) == 1:
            other[op.outputs[0]] = written[0]
        elif not written:
            yield op


class _Evaluating:
    """One rewriting of a block's computing ops from training to evaluation.

    Args:
        ops: of the block.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops = list(ops)
        self._maker = {name: op for op in self._ops for name in op.outputs}

    def ops(self) -> Iterator[Op]:
        """The rewritten ops."""
        same: dict[str, str] = {}  # the result of a dropout -> the tensor that it was applied to
        for op in self._ops:
            source = self._dropped_out(op)
            if source is None:
                yield _told(renamed(op, same))
                continue
            same[op.outputs[0]] = kept = same.get(source, source)
            yield Op("assign", {"x": Ref(kept)}, op.outputs[:1], op.location)

    def _dropped_out(self, op: Op) -> str | None:
        """The variable to which an op applies dropout; None for another op."""
        if op.type == "aten.native_dropout" and op.arguments.get("train") is not False:
            return _name(op, "input")
        if op.type in ("aten.mul.Tensor", "aten.mul_.Tensor"):
            noise = self._made(op, "other", ("aten.div_.Scalar",))
            ones = self._ones(noise)
            if noise is None or ones is None or noise.arguments["other"] != _chance(ones):
                return None
            return _name(op, "self")
        return self._alpha_dropped_out(op)

    def _alpha_dropped_out(self, op: Op) -> str | None:
        """The variable to which an op applies alpha dropout, which torch writes as
        ``a * (x * noise) + b * (1 - noise)``; None for another op.
        """
        if op.type not in ("aten.add_.Tensor", "aten.add.Tensor"):
            return None
        product = self._made(op, "self", ("aten.mul.Tensor", "aten.mul_.Tensor"))
        scaled = self._made(product, "other", ("aten.mul_.Scalar",))
        shift = self._made(op, "other", ("aten.add_.Scalar",))
        inverse = self._made(
            self._made(shift, "self", ("aten.mul_.Scalar",)), "self", ("aten.add.Scalar",)
        )
        first, second = self._ones(scaled), self._ones(inverse)
        if product is None or first is None or first is not second:
            return None
        return _name(product, "self")

    def _ones(self, noise: Op | None) -> Op | None:
        """The op that draws zeros and ones into an empty tensor, which ``noise`` scales."""
        drawn = self._made(noise, "self", ("aten.bernoulli_.float",))
        return drawn if self._made(drawn, "self", _EMPTY) is not None else None

    def _made(self, op: Op | None, argument: str, types: tuple[str, ...]) -> Op | None:
        """The op of one of these types that an argument of an op comes from."""
        name = None if op is None else _name(op, argument)
        maker = None if name is None else self._maker.get(name)
        return maker if maker is not None and maker.type in types else None


def _name(op: Op, argument: str) -> str | None:
    value = op.arguments.get(argument)
    return value.name if isinstance(value, Ref) else None


def _chance(drawn: Op) -> Argument:
    return drawn.arguments.get("p", 0.5)


def _told(op: Op) -> Op:
    """The op with its flags for training switched off."""
    arguments = dict(op.arguments)
    if arguments.get("dropout_p"):
        arguments["dropout_p"] = 0.0
    if op.type == "recurrent":
        arguments["train"] = False
        arguments.pop("tracked", None)
    statistics = isinstance(arguments.get("running_mean"), Ref)
    if arguments.get("training") is True and (statistics or op.type == "aten.rrelu_with_noise"):
        arguments["training"] = False
    return op if arguments == op.arguments else replace(op, arguments=arguments)
