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
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pserver.checkpoint import checkpoint
from pserver.storage.single_file import file_to_read, file_to_write
from trainer.communicator.communicator import Communicator
from trainer.executor.executor import Executor
from transpiler.formats.text import computes
from transpiler.inference.inference import pruned
from transpiler.ir.graph import PERSISTENT, Block, Op, Role, Storage, Variable, freeze
from transpiler.ir.table_ops import start_rows, table_name
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

# ---- inference model ----
#
# A forward program and its values as one file, to serve a model without the job that trained it.
#
# The file is a program's file (transpiler/formats/program_file.py): the ops that the fetched
# variables need, the inputs that are fed, parameters, buffers, and the rows of tables.


PLACES = ("file", "servers")
PathLike = str | os.PathLike[str]


def save_inference_model(
    path: PathLike,
    feeds: Sequence[str],
    fetches: Sequence[str],
    executor: Executor,
    program: Program | None = None,
    tables: str = "file",
) -> None:
    """Saves what is needed to compute ``fetches`` from ``feeds``: a pruned forward program and its
    present values, in one file.

    In a job with servers the values are those of the servers, and any one trainer may save.

    Args:
        path: of the file, or its URL.
        feeds: names of inputs, in the order in which they will be fed.
        fetches: names of variables: outputs of the step, or what ``name()`` has named.
        executor: which has run the program.
        program: a forward program, or a training program, whose clone for tests is saved; None: the
            default main program.
        tables: the rows of tables are in the "file"; or they stay on the "servers", and an
            ``Executor`` that has joined them reads them there.

    Raises:
        TypeError: an argument has another type.
        ValueError: the program has no such variable, a fetch needs an input that is not fed, or the
            process has no values for it.
        OSError: the file cannot be written; an existing file stays.

    Example::

        program, startup = capture(net, lambda model, x: model(x), example=(torch.ones(3, 4),))
        with Executor() as executor:
            executor.run(startup)
            save_inference_model("model.program", ["x"], ["output"], executor, program)
    """
    given = default_main_program() if program is None else program
    if not isinstance(given, Program) or not isinstance(executor, Executor):
        wrong = given if not isinstance(given, Program) else executor
        raise TypeError(
            f"save_inference_model: expected a Program and an Executor, got {type(wrong).__name__}"
        )
    if tables not in PLACES:
        raise ValueError(f"tables: expected 'file' or 'servers', got {tables!r}")
    forward = _forward(given)
    assert forward.storage is not None, "checked"
    main = _between(
        forward.main, _checked_names("feeds", feeds), _checked_names("fetches", fetches)
    )
    connection = executor.connection_of(forward.storage)
    if tables == "servers":
        main = _on_servers(main)
    storage = _values(main, forward.storage, connection)
    with file_to_write(path) as file:
        Program((main,), None, storage).save(file)


def load_inference_model(
    path: PathLike, executor: Executor | None = None
) -> tuple[Program, list[str], list[str]]:
    """Loads what :func:`save_inference_model` saved.  No job, server or module is needed, unless
    rows are on servers.

    Args:
        path: of the file, or its URL.
        executor: that has joined the servers, where rows are on these.

    Returns:
        The program, the names of its inputs, and those of its outputs.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no program, or an op that is not in the catalogue; or rows are on
            servers, and the executor has joined none that have them.

    Example::

        program, startup = capture(net, lambda model, x: model(x), example=(torch.ones(3, 4),))
        with Executor() as executor:
            save_inference_model("model.program", ["x"], ["output"], executor, program)
            served, feeds, fetches = load_inference_model("model.program")
            (output,) = executor.run(served, {"x": torch.ones(5, 4)}, fetches)
    """
    with file_to_read(path) as file:
        program = Program.load(file)
    served = [op.outputs[0] for op in program.main.ops if op.type == "fake_init"]
    if served:
        if executor is None:
            raise ValueError(
                f"load_inference_model: the rows of table {served[0]!r} are on servers: expected "
                "the Executor that has joined them"
            )
        executor.served_tables(program)
    feeds = [variable.name for variable in program.main.variables_of(Role.INPUT)]
    fetches = [variable.name for variable in program.main.variables_of(Role.OUTPUT)]
    return program, feeds, fetches


def _checked_names(what: str, given: Sequence[str]) -> list[str]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{what}: expected a list of names, got {given!r}")
    if len(set(given)) != len(given) or (what == "fetches" and not given):
        raise ValueError(f"{what}: expected names, each once, got {', '.join(given) or 'none'}")
    return list(given)


def _forward(program: Program) -> Program:
    """The forward program of one that trains."""
    storage = program.storage
    if storage is None:
        raise ValueError(
            "save_inference_model: expected a program with values: one that was captured or loaded "
            "in this process"
        )
    if program.deployment is not None and storage.evaluation is None:
        raise ValueError(
            "save_inference_model: expected the single-node program, got a transpiled one"
        )
    trains = program.main.variables_of(Role.GRADIENT) or program.deployment is not None
    return replace(program, deployment=None).clone(for_test=True) if trains else program


def _between(main: Block, feeds: Sequence[str], fetches: Sequence[str]) -> Block:
    """The block from the feeds to the fetches, with these as its only inputs and outputs, in this
    order.
    """
    for what, names in (("feeds", feeds), ("fetches", fetches)):
        for name in names:
            if name not in main.variables:
                raise ValueError(f"{what}: the program has no variable {name!r}")
    for name in feeds:
        if main.variables[name].role is not Role.INPUT:
            raise ValueError(f"feeds: {name!r} is no input of the program")
    for name in fetches:
        if main.variables[name].role not in (Role.TEMPORARY, Role.OUTPUT):
            raise ValueError(f"fetches: {name!r} is nothing that the program computes")
    found = pruned(main, fetches, feeds)
    unfed = [v.name for v in found.variables_of(Role.INPUT) if v.name not in feeds]
    if unfed:
        raise ValueError(
            f"feeds: expected {unfed[0]!r} too, which {', '.join(fetches)} cannot be computed "
            "without"
        )
    roles = {v.name: Role.TEMPORARY for v in found.variables_of(Role.OUTPUT)}
    roles |= dict.fromkeys(fetches, Role.OUTPUT)
    variables = {name: found.variables[name] for name in (*feeds, *fetches, *found.variables)}
    changed = {
        name: replace(each, role=roles.get(name, each.role)) for name, each in variables.items()
    }
    return replace(found, variables=freeze(changed))


def _on_servers(main: Block) -> Block:
    """The block with its tables declared as held elsewhere."""
    ops = [
        Op("fake_init", {}, op.outputs, op.location) if op.type == "sparse_table" else op
        for op in main.ops
    ]
    return replace(main, ops=tuple(ops))


def _values(main: Block, storage: Storage, connection: Communicator | None) -> Storage:
    """The present values of a block's variables: the servers', where there are any."""
    tensors: Mapping[str, Tensor] = storage.tensors
    if connection is not None:
        connection.flush()
        tensors = {**tensors, **connection.served()}
    rows = {}
    for op in main.ops:
        if op.type == "sparse_table":
            found = _rows_of(table_name(op), storage, connection)
            if found is not None:
                rows[table_name(op)] = found
    return Storage(tensors, None, rows=rows)


def _rows_of(
    name: str, storage: Storage, connection: Communicator | None
) -> tuple[Tensor, Tensor] | None:
    """All rows of a table: ids, int64 [n], and values, [n, dim]; None where it has none."""
    if connection is not None and any(each.name == name for each in connection.plan.tables):
        from trainer.checkpoint.tables import store_of  # imports numba

        store = store_of(None, connection)
        assert store is not None, "the plan has tables"
        chunks = list(store.materialized(name))
        if not any(len(chunk["ids"]) for chunk in chunks):
            return None
        ids, values = (
            torch.from_numpy(np.concatenate([chunk[key] for chunk in chunks]))
            for key in ("ids", "values")
        )
        return ids, values
    modules: Sequence[Any] = storage.tables.get(name, ())
    if modules and hasattr(modules[0], "rows"):
        found: tuple[Tensor, Tensor] | None = modules[0].rows.whole()
        return found
    if not modules and name in storage.unsaved:
        raise ValueError(f"save_inference_model: table {name!r}: {storage.unsaved[name]}")
    return storage.rows.get(name) or start_rows(modules)


# ---- program values ----


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

    In a job with servers these are external writes: they are sent with the next step, or at the
    start with trainer 0's values.

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
        executor: that has run the program; waits until servers have applied all that it has sent.
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
        executor: that runs it; waits first until servers have applied all that it has sent.

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
