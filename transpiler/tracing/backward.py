"""Adds a backward part to a forward program: its ops are run again, under autograd, and traced.

The result has been compared with autograd itself, which differentiated the same ops, at every size
that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.inference.inference import renamed
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.table_ops import gradient_variable, is_sparse, table_name, table_of
from transpiler.ir.tables import Segment, ShowClickEntry, Table
from transpiler.lower import Lowered, lower
from transpiler.program import Program
from transpiler.tracing.autograd import gradients_of
from transpiler.tracing.default_programs import default_main_program
from transpiler.tracing.equivalence_check import StepResult, check_equivalence, resized, unchanged
from transpiler.tracing.input_spec import Inputs, InputSpec, made_inputs

# ---- backward tables ----
#
# Tables in a program that gets a backward part: rows count as inputs while it is differentiated.
#
# The results of lookups become inputs of the program; the gradients of these inputs, and the
# lookups' ids, make the gradient of each table's rows.


@dataclass(frozen=True)
class WithoutLookups:
    """A program whose lookups have become inputs.

    Attributes:
        program: without lookups; their rows are inputs, their ids are outputs.
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
        later = {op.outputs[0] for op in lookups} | made  # the variables not written yet
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
    """The id whose row gets no gradient; for torch's own embeddings that of their module."""
    held = {} if program.storage is None else program.storage.tables
    modules = held.get(table_name(lookup), ())
    module: nn.Module | None = next(iter(modules), None)
    if module is not None and is_sparse(module):
        found: int | None = module.padding_idx  # type: ignore[assignment]  # torch's own
        return found
    return lookup.arguments.get("padding_idx")


def opened(program: Program, wanted: Collection[str], what: str) -> WithoutLookups:
    """The program with inputs in place of the rows that its lookups read.

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
    return WithoutLookups(program.with_blocks(block), rows, program, tables)


# ---- backward ----


_SHOWN = 8


def append_backward(
    program: Program,
    loss: str = "loss",
    parameter_list: Sequence[str] | None = None,
    no_grad_set: Collection[str] | None = None,
) -> Program:
    """A forward program with the gradients of a loss, each as ``PARAMETER@GRAD``.

    They are those of autograd over the program's ops, to the bit on the CPU.  Inputs, outputs and
    persistent variables keep their names; other variables get new ones.

    Args:
        program: captured without an optimizer, or a clone of such a program.
        loss: the name of a variable of one element.
        parameter_list: the parameters and tables whose gradients are wanted; None: all that are
            trained.
        no_grad_set: variables that count as constants, and parameters that get no gradient.

    Returns:
        Another program over the same storage.

    Raises:
        TypeError: an argument has another type.
        ValueError: there is no such variable, the loss depends on none of the parameters or has
            several elements, the program has a backward part, its step calls an autograd function
            of the user's, or a table counts shows and clicks.

    Example:
        >>> import torch
        >>> from pserver import append_backward, capture
        >>> model = torch.nn.Linear(3, 1)
        >>> def step(model, x):
        ...     return {"loss": model(x).mean()}
        >>> forward, _ = capture(model, step, example=(torch.ones(4, 3),))
        >>> sorted(v.name for v in append_backward(forward).main.variables.values() if v.of)
        ['bias@GRAD', 'weight@GRAD']
    """
    _check(program, "append_backward")
    trained = program.main.variables_of(Role.PARAMETER, Role.TABLE)
    known = {variable.name for variable in trained}
    wanted = list(known if parameter_list is None else _names(parameter_list))
    for name in wanted:
        if name not in known:
            raise ValueError(f"append_backward: parameter_list: the program has no {name!r}")
    constant = set(_names(no_grad_set or ()))
    ordered = [
        variable.name
        for variable in trained
        if variable.name in wanted and variable.name not in constant
    ]
    size = _variable(program, loss, "loss").shape
    if any(extent != 1 for extent in size):
        raise ValueError(f"append_backward: loss: expected one element, got {list(size)}")
    return _with_backward(program, [loss], ordered, constant)


def gradients(
    targets: str | Sequence[str],
    inputs: str | Sequence[str],
    program: Program | None = None,
    no_grad_set: Collection[str] | None = None,
) -> Program:
    """A forward program with the gradients of the sum of some variables, each as ``INPUT@GRAD``.

    Args:
        targets: names of variables.
        inputs: names of inputs of the program and of parameters.
        program: None: the default main program.
        no_grad_set: variables that count as constants.

    Returns:
        Another program over the same storage.

    Raises:
        TypeError, ValueError: as :func:`append_backward`.

    Example:
        >>> import torch
        >>> from pserver import capture, gradients
        >>> forward, _ = capture(torch.nn.Tanh(), lambda m, x: m(x), example=(torch.ones(4, 3),))
        >>> [op.type for op in gradients("output", "x", forward).main.ops]
        ['aten.tanh', 'aten.ones_like', 'aten.tanh_backward']
    """
    program = default_main_program() if program is None else program
    _check(program, "gradients")
    sums = [targets] if isinstance(targets, str) else _names(targets)
    wanted = [inputs] if isinstance(inputs, str) else _names(inputs)
    for name in sums:
        _variable(program, name, "targets")
    for name in wanted:
        variable = _variable(program, name, "inputs")
        floats = variable.dtype.startswith(("float", "bfloat", "complex"))
        if variable.role not in (Role.INPUT, Role.PARAMETER, Role.BUFFER) or not floats:
            raise ValueError(
                f"gradients: inputs: expected inputs and parameters of numbers, got {name!r}, a "
                f"{variable.role.name} of {variable.dtype}"
            )
    return _with_backward(program, sums, wanted, set(_names(no_grad_set or ())))


def _names(given: Iterable[str]) -> list[str]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"expected a list of names, got {given!r}")
    return list(given)


def _check(program: Program, what: str) -> None:
    if not isinstance(program, Program):
        raise TypeError(f"{what}: expected a Program, got {type(program).__name__}")
    if program.storage is None:
        raise ValueError(f"{what}: expected a program with values, got one without")
    main = program.main
    if program.deployment is not None or main.variables_of(Role.GRADIENT, Role.STATE):
        raise ValueError(f"{what}: expected a forward program, got one that trains")
    if program.storage.opaque:
        functions = ", ".join(program.storage.opaque[:_SHOWN])
        raise ValueError(
            f"{what}: the step calls {functions}, whose backward is Python code, which a program "
            "does not hold: capture the step with an optimizer"
        )


def _variable(program: Program, name: str, what: str) -> Variable:
    if name not in program.main.variables:
        raise ValueError(f"{what}: the program has no variable {name!r}")
    return program.main.variables[name]


# ---- the program as a module ----


class _Replay(nn.Module):
    """A forward program as a module over the same tensors, for tracing to differentiate."""

    def __init__(self, program: Program, wanted: Collection[str]) -> None:
        super().__init__()
        assert program.storage is not None, "checked"
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
            tensor, (parent, last) = program.storage.tensors[variable.name], self._place(variable)
            if variable.name in wanted:
                shared = nn.Parameter(tensor.detach(), requires_grad=True)
                parent.register_parameter(last, shared)
            else:
                parent.register_buffer(last, tensor.detach())

    def _place(self, variable: Variable) -> tuple[nn.Module, str]:
        module: nn.Module = self
        *path, last = variable.name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, last


def _with_backward(
    program: Program, targets: Sequence[str], wanted: Sequence[str], constant: Collection[str]
) -> Program:
    """The program with the gradients of ``targets`` with respect to ``wanted``."""
    if program.main.variables_of(Role.TABLE):
        open_ = opened(program, wanted, "append_backward")
        dense = [name for name in wanted if name not in open_.tables]
        return open_.closed(_with_backward(open_.program, targets, [*dense, *open_.rows], constant))
    # as in capture.py: tracing loads torch's compiler front end
    from transpiler.tracing.emit import emit
    from transpiler.tracing.guards import sizes_at, variants
    from transpiler.tracing.trace import TracedStep, trace

    replay, inputs = _Replay(program, wanted), _inputs(program)
    step = _step(program, [*_outputs(program), *targets], constant)

    def eagerly(batch: Sequence[Tensor]) -> StepResult:
        return _autograd(replay, step, inputs.names, targets, wanted, batch)

    with unchanged(replay) as restore:
        found: TracedStep = trace(replay, step, wanted, inputs, targets=targets)
        restore()
        emitted = emit(found, replay, inputs.names, set(wanted))
        results = [*_outputs(program), *targets, *(f"{name}@GRAD" for name in found.gradients)]
        lowered = lower(emitted.ops, list(dict.fromkeys(results)), _device(program))
        for variant in variants(found):
            sizes = sizes_at(found, variant.values)
            if sizes is None or _below(program, inputs, sizes):
                continue
            batch = resized(inputs.batch, sizes)
            check_equivalence(replay, restore, [batch], eagerly, _captured(replay, inputs, lowered))
    return _joined(program, emitted.variables, emitted.ops, wanted)


def _outputs(program: Program) -> list[str]:
    return [variable.name for variable in program.main.variables_of(Role.OUTPUT)]


def _device(program: Program) -> torch.device:
    held = {} if program.storage is None else program.storage.tensors
    return next((tensor.device for tensor in held.values()), torch.device("cpu"))


def _inputs(program: Program) -> Inputs:
    """Made-up inputs of the program, whose free sizes have its names."""
    variables = program.main.variables_of(Role.INPUT)
    specs = []
    for variable in variables:
        shape = [
            size if isinstance(size, int) else size.partition(">=")[0] for size in variable.shape
        ]
        specs.append(InputSpec(shape, variable.dtype, variable.name))
    made = made_inputs([variable.name for variable in variables], specs, None)
    device = _device(program)
    return replace(made, batch=tuple(tensor.to(device) for tensor in made.batch))


def _below(program: Program, inputs: Inputs, sizes: Sequence[Sequence[int | None]]) -> bool:
    """Whether sizes are smaller than the program allows."""
    for name, extents in zip(inputs.names, sizes, strict=True):
        for size, extent in zip(program.main.variables[name].shape, extents, strict=True):
            least = size.partition(">=")[2] if isinstance(size, str) else ""
            if extent is not None and least and extent < int(least):
                return True
    return False


def _step(
    program: Program, names: Sequence[str], constant: Collection[str]
) -> Callable[..., dict[str, Tensor]]:
    """The program as a step over its replay."""
    wanted = list(dict.fromkeys(names))
    lowered = lower(_detached(program.main, constant), wanted, _device(program))
    inputs = [variable.name for variable in program.main.variables_of(Role.INPUT)]

    def step(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        held: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        values = lowered({**held, **dict(zip(inputs, batch, strict=True))})
        return dict(zip(wanted, values, strict=True))

    return step


def _detached(main: Block, constant: Collection[str]) -> list[Op]:
    """The ops, with variables that count as constants detached where they are written."""
    ops: list[Op] = []
    other: dict[str, str] = {}
    for op in main.ops:
        ops.append(renamed(op, other))
        for name in op.outputs:
            if name in constant:
                other[name] = f"{name}@CONSTANT"
                ops.append(Op("aten.detach", {"self": Ref(name)}, (other[name],)))
    return ops


def _autograd(
    replay: nn.Module,
    step: Callable[..., dict[str, Tensor]],
    names: Sequence[str],
    targets: Sequence[str],
    wanted: Sequence[str],
    batch: Sequence[Tensor],
) -> StepResult:
    """Results and gradients as autograd computes them."""
    fed = dict(zip(names, batch, strict=True))
    fed |= {name: fed[name].detach().requires_grad_() for name in wanted if name in fed}
    with torch.enable_grad():
        outputs = step(replay, *fed.values())
        tensors = {**dict(replay.named_parameters()), **dict(replay.named_buffers()), **fed}
        found = gradients_of(
            [outputs[name] for name in targets], [tensors[name] for name in wanted]
        )
    grads = {
        f"{name}@GRAD": grad.detach().clone()
        for name, grad in zip(wanted, found, strict=True)
        if grad is not None
    }
    return StepResult(
        {**{name: value.detach().clone() for name, value in outputs.items()}, **grads}
    )


def _captured(
    replay: nn.Module, inputs: Inputs, lowered: Lowered
) -> Callable[[Sequence[Tensor]], StepResult]:
    """The program with its backward part, as a function of a batch."""

    def run(batch: Sequence[Tensor]) -> StepResult:
        held: Mapping[str, Any] = {
            **dict(replay.named_parameters()),
            **dict(replay.named_buffers()),
        }
        with torch.no_grad():
            values = lowered({**held, **dict(zip(inputs.names, batch, strict=True))})
        named = zip(lowered.outputs, values, strict=True)
        return StepResult({name: value.detach().clone() for name, value in named})

    return run


def _joined(
    program: Program, made: Mapping[str, Variable], ops: Sequence[Op], wanted: Sequence[str]
) -> Program:
    """The program of the emitted ops; former variables keep their roles and shapes."""
    variables = {name: program.main.variables.get(name, each) for name, each in made.items()}
    for name in wanted:
        gradient = variables.get(f"{name}@GRAD")
        if gradient is not None:
            variables[gradient.name] = replace(gradient, role=Role.GRADIENT, of=name)
    block = Block(0, freeze(variables), tuple(ops))
    return replace(program, _blocks=(block,))
