"""A forward program and its values as one file: what serves a model without the job that trained
it.

The file is a program's file (transpiler/formats/program_file.py): the ops that the fetched
variables need, the inputs that are fed, parameters, buffers, and the rows of tables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pserver.storage.single_file import read, written
from trainer.communicator.communicator import Communicator
from trainer.executor.executor import Executor
from transpiler.inference.inference import pruned
from transpiler.ir.graph import Block, Op, Role, Storage, freeze
from transpiler.ir.table_ops import start_rows, table_name
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

PLACES = ("file", "servers")
Path = str | os.PathLike[str]


def save_inference_model(
    path: Path,
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
        OSError: the file cannot be written; the one that was there stays.

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
    main = _between(forward.main, _names("feeds", feeds), _names("fetches", fetches))
    connection = executor.connection_of(forward.storage)
    if tables == "servers":
        main = _on_servers(main)
    storage = _values(main, forward.storage, connection)
    with written(path) as file:
        Program((main,), None, storage).save(file)


def load_inference_model(
    path: Path, executor: Executor | None = None
) -> tuple[Program, list[str], list[str]]:
    """Loads what :func:`save_inference_model` saved.  No job, server or module is needed, unless
    rows are on servers.

    Args:
        path: of the file, or its URL.
        executor: that has joined the servers, where rows are on these.

    Returns:
        The program, the names that it is fed with, and those that it is fetched by.

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
    with read(path) as file:
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


def _names(what: str, given: Sequence[str]) -> list[str]:
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
