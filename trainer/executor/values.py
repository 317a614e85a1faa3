"""The values of a program's variables, by name: from files, into a program, and as bytes.

::

    load_program_state          a file or a checkpoint -> values by name
    set_program_state           values by name -> a program
    serialize_persistables      a program -> bytes
    deserialize_persistables    bytes -> a program

An optimizer state has the name of its variable: ``fc.weight@exp_avg``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pserver.checkpoint import checkpoint
from trainer.executor.executor import Executor
from transpiler.formats.text import computes
from transpiler.ir.graph import PERSISTENT, Role, Storage, Variable
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

log = logging.getLogger(__name__)
Names = str | Variable | Sequence[str | Variable] | None


def load_program_state(path: str | Path, var_list: Names = None) -> dict[str, Tensor]:
    """The values in a file of ``Program.save``, or in a checkpoint of ``Executor.save`` or
    ``fleet.save``; a table's rows are left out.

    Args:
        path: of the file, or of the checkpoint's directory.
        var_list: names of variables, or variables; None: all.

    Returns:
        Values by name: parameters, buffers, and optimizer states.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the file is damaged, or lacks a variable.

    Example::

        net = nn.Linear(4, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        program, startup = capture(net, lambda net, x: net(x).sum(), sgd, (torch.ones(2, 4),))
        program.save("step.program")
        state = load_program_state("step.program", ["weight", "bias"])
    """
    found = _of_file(Path(path)) if Path(path).is_file() else _of_checkpoint(str(path))
    if var_list is None:
        return found
    wanted = _names(var_list)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{str(path)!r}: expected a value of {missing[0]!r}, got none")
    return {name: found[name] for name in wanted}


def _of_file(path: Path) -> dict[str, Tensor]:
    storage = Program.load(path).storage
    assert storage is not None, "a loaded program has one"
    return {**storage.tensors, **_named(storage.states)}


def _of_checkpoint(path: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.reading(path).tensors().items():
        kind, _, rest = name.partition("/")
        key, _, parameter = rest.partition("/")
        if kind == "model":
            found[rest] = tensor
        elif kind == "state" and parameter:
            found[f"{parameter}@{key}"] = tensor
    return found


def _named(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}@{key}": value for name, held in states.items() for key, value in held.items()}


def _names(listed: Names) -> list[str]:
    listed = [listed] if isinstance(listed, str | Variable) else listed or []
    return [each.name if isinstance(each, Variable) else each for each in listed]


@torch.no_grad()
def set_program_state(program: Program, state: Mapping[str, Tensor]) -> None:
    """Gives variables of a program other values; a warning names those that it does not have.

    In a job with servers these travel as what a script writes into parameters does: with the next
    step, or at the start with trainer 0's values.

    Args:
        program: that holds values: captured in this process, or loaded.
        state: values by name, as :func:`load_program_state` gives them; tensors or arrays.

    Raises:
        ValueError: the program holds no values; a value has another shape or dtype; or it is the
            optimizer state of a parameter that servers step, which ``Executor.load`` gives them.
            Nothing is changed.

    Example::

        net = nn.Linear(4, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        program, startup = capture(net, lambda net, x: net(x).sum(), sgd, (torch.ones(2, 4),))
        set_program_state(program, {"bias": torch.zeros(2)})
    """
    storage = _storage(program)
    states = {variable.name: variable for variable in program.main.variables_of(Role.STATE)}
    values = {name: torch.as_tensor(value) for name, value in state.items()}
    for name, value in values.items():
        if name in storage.tensors:
            _check(name, value, storage.tensors[name])
        elif name in states:
            _check_state(storage, states[name], value)
    unknown = [name for name in values if name not in storage.tensors and name not in states]
    if unknown:
        log.warning("set_program_state: the program has no %s", ", ".join(unknown))
    for name, value in values.items():
        if name in storage.tensors:
            storage.tensors[name].detach().copy_(value)
        elif name in states:
            _set_state(storage, states[name], value.clone())


def _check(name: str, value: Tensor, held: Tensor) -> None:
    if value.shape != held.shape or value.dtype != held.dtype:
        raise ValueError(
            f"{name!r}: expected {held.dtype} {list(held.shape)}, got {value.dtype} "
            f"{list(value.shape)}"
        )


def _check_state(storage: Storage, variable: Variable, value: Tensor) -> None:
    if variable.of in storage.unsaved:
        raise ValueError(
            f"{variable.name!r}: {storage.unsaved[variable.of]}: give them a checkpoint with "
            "Executor.load"
        )
    if tuple(value.shape) != variable.shape:
        raise ValueError(
            f"{variable.name!r}: expected {list(variable.shape)}, got {list(value.shape)}"
        )


def _set_state(storage: Storage, variable: Variable, value: Tensor) -> None:
    key = variable.name.removeprefix(f"{variable.of}@")
    parameter = storage.tensors[variable.of]
    value = value if key == "step" else value.to(parameter.device)  # as torch keeps them
    if storage.optimizer is None:
        storage.states.setdefault(variable.of, {})[key] = value
    else:
        storage.optimizer.state[parameter][key] = value


def _storage(program: Program) -> Storage:
    if program.storage is None:
        raise ValueError(
            "expected a program that holds values: one that was captured in this process, or loaded"
        )
    return program.storage


def serialize_persistables(
    feed_vars: Names, fetch_vars: Names, executor: Executor, program: Program | None = None
) -> bytes:
    """The values of a program's persistent variables, as the bytes of a safetensors file.

    Args:
        feed_vars, fetch_vars: with ``fetch_vars`` only those variables that these are computed
            from, where ``feed_vars`` are given; otherwise all that this process holds, optimizer
            states too.
        executor: that has run the program; what it has sent is waited for.
        program: None: the default main program.

    Raises:
        ValueError: the program holds no values, or has no variable of a name.

    Example::

        net = nn.Linear(4, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        program, startup = capture(net, lambda net, x: net(x).sum(), sgd, (torch.ones(2, 4),))
        with Executor() as executor:
            executor.run(program, feed=(torch.ones(2, 4),))
            data = serialize_persistables(None, None, executor, program)
    """
    program = default_main_program() if program is None else program
    executor.flush()
    storage = _storage(program)
    held = dict(storage.tensors)
    for variable in program.main.variables_of(Role.STATE):
        value = storage.states_of(variable.of).get(variable.name.removeprefix(f"{variable.of}@"))
        if value is not None:
            held[variable.name] = torch.as_tensor(value)
    persistent = {v.name for v in program.main.variables.values() if v.role in PERSISTENT}
    if fetch_vars:
        persistent &= _needed(program, _names(feed_vars), _names(fetch_vars))
    return safetensors.torch.save(
        {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in held.items()
            if name in persistent
        }
    )


def _needed(program: Program, feeds: Iterable[str], fetches: Iterable[str]) -> set[str]:
    """The variables that ``fetches`` are computed from, back to ``feeds``."""
    needed, given = set(fetches), set(feeds)
    unknown = sorted((needed | given) - set(program.main.variables))
    if unknown:
        raise ValueError(f"expected variables of the program, got {unknown[0]!r}")
    for op in reversed(program.main.ops):
        if computes(op) and needed & set(op.outputs) - given:
            needed.update(op.inputs)
    return needed


def deserialize_persistables(program: Program, data: bytes, executor: Executor) -> Program:
    """Gives a program the values that :func:`serialize_persistables` wrote.

    Args:
        program: that holds values.
        executor: that runs it; what it has sent is waited for first.

    Returns:
        The program.

    Raises:
        ValueError: the bytes are damaged, or as :func:`set_program_state`.

    Example::

        net = nn.Linear(4, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        program, startup = capture(net, lambda net, x: net(x).sum(), sgd, (torch.ones(2, 4),))
        with Executor() as executor:
            data = serialize_persistables(None, None, executor, program)
            deserialize_persistables(program, data, executor)
    """
    executor.flush()
    try:
        values = safetensors.torch.load(data)
    except SafetensorError as error:
        raise ValueError(f"expected bytes of serialize_persistables, got others: {error}") from None
    set_program_state(program, values)
    return program
