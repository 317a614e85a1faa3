"""Scopes: the tensors that names stand for, in the programs that an Executor runs.

[Note: two kinds of scopes]  The values of a captured program are the module's own tensors: running
it trains the module.  The global scope finds these by name, and keeps no module alive.  A scope of
one's own holds copies instead, which the startup program makes: so two copies of a program's values
live side by side, and the module is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transpiler.ir.close_names import close_names
from transpiler.ir.graph import Role, Storage
from transpiler.program import Program


class ScopeVariable:
    """A name in a scope, as :meth:`Scope.find_var` gives it.

    Attributes:
        name: of the variable.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = tensor

    def get_tensor(self) -> Tensor:
        """The live tensor, detached: its values change as programs run, and what is written into
        it is what they read.
        """
        return self._tensor.detach()

    def set(self, value: Any) -> None:
        """Copies a value into the tensor.

        Args:
            value: a tensor, an array or numbers, of the variable's shape; converted to its dtype.

        Raises:
            TypeError: it is nothing that a tensor can be made of.
            ValueError: it has another shape.
        """
        try:
            given = value if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"set: {self.name!r}: expected a tensor, got {value!r}") from error
        if given.shape != self._tensor.shape:
            raise ValueError(
                f"set: {self.name!r}: expected the shape {list(self._tensor.shape)}, got "
                f"{list(given.shape)}"
            )
        with torch.no_grad():
            self._tensor.copy_(given)


class Scope:
    """Tensors by name, for the programs that run while it is the current scope.

    In a scope of one's own a program begins with its startup program, which copies the present
    values of its parameters and buffers, without optimizer state.  Its hyper-parameters are then
    those of its ops, as of a program that was loaded: a scheduler of the module's optimizer does
    not move them.

    See [Note: two kinds of scopes].

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3, 4),)
        main, startup = capture(model, lambda model, x: model(x).sum(), optimizer, batch)
        scope = Scope()
        with Executor() as executor, scope_guard(scope):
            executor.run(startup)
            executor.run(main, batch)
        scope.find_var("bias").get_tensor() - model.bias    # one step ahead of the module
    """

    def __init__(self) -> None:
        # what it holds: made here, or copied
        self.tensors: dict[str, Tensor] = {}
        # what an Executor has bound in the global scope: a module's tensors, which it does not hold
        self._shown: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._copies: weakref.WeakKeyDictionary[Storage, Storage] = weakref.WeakKeyDictionary()
        # by the program's id; the reference says whether the id is still that program's
        self._programs: dict[int, tuple[weakref.ref[Program], Program]] = {}

    def find_var(self, name: str) -> ScopeVariable:
        """The variable of a name: a parameter, a buffer, or what ``create_global_var`` made.

        In a job with servers a value that is set here is an external write.

        Raises:
            TypeError: the name is no text.
            ValueError: there is none; the message names close ones.
        """
        if not isinstance(name, str):
            raise TypeError(f"find_var: expected a name, got {name!r}")
        found = self.tensors.get(name, self._shown.get(name))
        if found is None:
            near = close_names(name, self.names())
            raise ValueError(f"find_var: the scope has no variable {name!r}; close names: {near}")
        return ScopeVariable(name, found)

    def names(self) -> list[str]:
        """The names of all variables, sorted."""
        return sorted({*self.tensors, *self._shown})

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self._shown

    def put(self, name: str, tensor: Tensor) -> None:
        """Makes a name stand for this tensor.

        Raises:
            ValueError: the scope has a variable of this name already.
        """
        if name in self:
            raise ValueError(f"{name!r} is a variable of this scope already")
        self.tensors[name] = tensor

    def show(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes names stand for tensors that others hold, as long as they do."""
        self._shown.update(tensors)

    def program(self, program: Program) -> Program:
        """A program as this scope runs it: over the scope's values instead of the module's.

        It can be saved, or given to any call that takes a program.  In the global scope it is the
        program itself.

        Raises:
            TypeError: it is no program.
            ValueError: its startup program was not run in this scope; or it has a table, whose
                rows its module holds; or it is a trainer's of a job, whose values are the job's.
        """
        if not isinstance(program, Program):
            raise TypeError(f"expected a Program, got {type(program).__name__}")
        if self is PROCESS_SCOPE:
            return program
        if program.storage is not None:
            _check_own(program)
            if any(op.type == "init" for op in program.main.ops):
                self._begin(program.storage)
        known = self._programs.get(id(program))
        if known is None or known[0]() is not program:
            key, programs = id(program), self._programs
            watch = weakref.ref(program, lambda _: programs.pop(key, None) and None)
            known = programs[key] = (watch, replace(program, storage=self._copy_of(program)))
        return known[1]

    def _copy_of(self, program: Program) -> Storage | None:
        if program.storage is None:
            return None
        if program.storage not in self._copies:
            raise ValueError(
                "the scope holds no values for the program: run its startup program in this scope "
                "first"
            )
        return self._copies[program.storage]

    def _begin(self, storage: Storage) -> None:
        """Copies the present values; the programs over a former copy are forgotten."""
        former = self._copies.get(storage)
        for key, (_, program) in list(self._programs.items()):
            if former is not None and program.storage is former:
                del self._programs[key]
        copies = {tensor: tensor.detach().clone() for tensor in storage.tensors.values()}
        named = {name: copies[tensor] for name, tensor in storage.tensors.items()}
        self._copies[storage] = Storage(named, None, rows=storage.rows)
        self.tensors.update(named)


def _check_own(program: Program) -> None:
    deployment = program.deployment
    if deployment is not None and deployment.trainer_id is not None:
        raise ValueError(
            "expected the global scope for a trainer's program: its values are those of the job"
        )
    tables = program.main.variables_of(Role.TABLE)
    server = deployment is not None
    if tables and not server:
        raise ValueError(
            f"expected the global scope for a program with table {tables[0].name!r}: its rows are "
            "those of its module"
        )


PROCESS_SCOPE = Scope()
# of each thread: a scope_guard elsewhere changes nothing here
_current: ContextVar[Scope] = ContextVar("scope", default=PROCESS_SCOPE)


def global_scope() -> Scope:
    """The scope in which programs run: that of the innermost ``scope_guard`` of this thread.

    Outside of them all it is the process's: the tensors of the modules whose programs an Executor
    has run there, by the names that programs have for them.  Where two modules have a parameter of
    one name, it is that of the program that was loaded last.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3, 4),)
        main, startup = capture(model, lambda model, x: model(x).sum(), optimizer, batch)
        with Executor() as executor:
            executor.run(startup)
            global_scope().find_var("bias").set([1.0, 2.0])    # model.bias
            executor.run(main, batch)
    """
    return _current.get()


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Runs this thread's programs in a scope, inside the block; then again in the former one.

    Args:
        scope: a ``Scope()`` of one's own, or the process's, which ``global_scope()`` gives outside
            of every guard.

    Raises:
        TypeError: it is no scope.

    Example::

        scope = Scope()
        with scope_guard(scope):
            create_global_var([1], 0.5, "float32", name="temperature")
            global_scope().find_var("temperature").get_tensor()    # tensor([0.5000])
    """
    if not isinstance(scope, Scope):
        raise TypeError(f"scope_guard: expected a Scope, got {type(scope).__name__}")
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)
