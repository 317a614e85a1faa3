"""The default programs of this process, and the names that a step gives to intermediate tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from transpiler.ir.source_location import here
from transpiler.program import Program


class _Defaults:
    """One level of default programs: the process's own, or those of one ``program_guard``.

    Attributes:
        main: None before anything is captured.
        startup: None before anything is captured.
        trainer: the program that ``transpile`` made from ``main`` in a mode without servers; None
            otherwise.
    """

    def __init__(self, main: Program | None = None, startup: Program | None = None) -> None:
        self.main = main
        self.startup = startup
        self.trainer: Program | None = None


_defaults = [_Defaults()]
_scopes: list[str] = []
_recorders: list[dict[str, Tensor]] = []
_listeners: list[NameListener] = []


def default_main_program() -> Program:
    """The main program of the last ``capture``, or that of the innermost ``program_guard``.

    Returns:
        The single-node main program.

    Raises:
        ValueError: nothing has been captured yet.

    Example:
        >>> from pserver import Program, default_main_program, program_guard
        >>> main, startup = Program(()), Program(())
        >>> with program_guard(main, startup):
        ...     default_main_program() is main
        True
    """
    if (main := _defaults[-1].main) is None:
        raise ValueError(
            "default_main_program: expected a captured program, got none; call capture first"
        )
    return main


def default_startup_program() -> Program:
    """The startup program of the last ``capture``, or that of the innermost ``program_guard``.

    Returns:
        The single-node startup program.

    Raises:
        ValueError: nothing has been captured yet.

    Example:
        >>> from pserver import Program, default_startup_program, program_guard
        >>> main, startup = Program(()), Program(())
        >>> with program_guard(main, startup):
        ...     default_startup_program() is startup
        True
    """
    if (startup := _defaults[-1].startup) is None:
        raise ValueError(
            "default_startup_program: expected a captured program, got none; call capture first"
        )
    return startup


def set_defaults(main: Program, startup: Program) -> None:
    """Makes these the default programs of the innermost ``program_guard``, or of the process."""
    _defaults[-1].main, _defaults[-1].startup, _defaults[-1].trainer = main, startup, None


def set_default_trainer(program: Program) -> None:
    """Records the program that ``transpile`` made from the default main program, for
    ``ParallelExecutor``; the default programs stay as they are.
    """
    _defaults[-1].trainer = program


def default_trainer_program() -> Program:
    """The program that ``transpile`` made from the default main program in a mode without servers;
    without one, the default itself.

    Raises:
        ValueError: nothing has been captured yet.
    """
    return _defaults[-1].trainer or default_main_program()


@contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Scopes the default programs: the given ones inside, the former ones again afterwards.

    A ``capture`` inside replaces the inner ones only.

    Args:
        main: the default main program inside.
        startup: the default startup program inside; None: the present one.

    Raises:
        TypeError: an argument is not a program.

    Example:
        >>> from pserver import Program, default_main_program, program_guard
        >>> main = Program(())
        >>> with program_guard(main):
        ...     default_main_program() is main
        True
    """
    for program in (main, startup):
        if program is not None and not isinstance(program, Program):
            raise TypeError(f"program_guard: expected a Program, got {type(program).__name__}")
    level = _Defaults(main, startup if startup is not None else _defaults[-1].startup)
    _defaults.append(level)
    try:
        yield
    finally:
        _defaults.remove(level)


def name(tensor: Tensor, label: str) -> Tensor:
    """Gives an intermediate tensor of a step a name in the captured program.

    Fetch lists, recompute checkpoints and dumps refer to the tensor by this name.  Inside
    ``name_scope("block1")`` the name ``"x"`` is ``"block1/x"``.  Outside a capture a job dumps the
    tensor under the name, if its strategy asks for it.

    Args:
        tensor: an intermediate tensor of the step.
        label: any text without ``@``.

    Returns:
        The tensor, unchanged.

    Raises:
        TypeError: not a tensor, or the label is not text.
        ValueError: the step uses the name twice, or the label is empty or holds ``@``.

    Example:
        >>> import torch
        >>> from pserver import name
        >>> def step(model, x):
        ...     hidden = name(torch.relu(model(x)), "hidden")
        ...     return hidden.sum()
        >>> step(torch.nn.Identity(), torch.tensor([1.0, -1.0]))
        tensor(1.)
    """
    if not isinstance(tensor, Tensor) or not isinstance(label, str):
        raise TypeError(
            f"name: expected a tensor and text, got {type(tensor).__name__} and "
            f"{type(label).__name__}"
        )
    _check_label("name", label)
    if _recorders:
        full = "/".join([*_scopes, label])
        if full in _recorders[-1]:
            raise ValueError(
                f"{here()}: name {full!r} is already given to another tensor of this step; use "
                "name_scope"
            )
        _recorders[-1][full] = tensor
    else:
        for listener in _listeners:
            listener.heard("/".join([*_scopes, label]), tensor)
    return tensor


class NameListener:
    """Calls a function for the names that eager steps give, until :meth:`remove`."""

    def __init__(self, heard: Callable[[str, Tensor], None]) -> None:
        self.heard = heard

    def remove(self) -> None:
        """Ends the calls."""
        if self in _listeners:
            _listeners.remove(self)


def listen(heard: Callable[[str, Tensor], None]) -> NameListener:
    """Calls ``heard(name, tensor)`` for each tensor that is named outside a capture."""
    listener = NameListener(heard)
    _listeners.append(listener)
    return listener


@contextmanager
def name_scope(label: str) -> Iterator[None]:
    """Prefixes the names given inside with ``label/``; scopes nest.

    Args:
        label: any text without ``@``.

    Raises:
        ValueError: the label is empty or holds ``@``.

    Example:
        >>> import torch
        >>> from pserver import name, name_scope
        >>> def step(model, x):
        ...     with name_scope("block1"):
        ...         hidden = name(model(x), "hidden")  # the program calls it block1/hidden
        ...     return hidden.sum()
        >>> step(torch.nn.Identity(), torch.tensor([1.0, -1.0]))
        tensor(0.)
    """
    _check_label("name_scope", label)
    _scopes.append(label)
    try:
        yield
    finally:
        _scopes.pop()


def _check_label(what: str, label: str) -> None:
    if not label or "@" in label:
        raise ValueError(
            f"{what}: expected a label that is not empty and holds no '@', got {label!r}"
        )


@contextmanager
def recording() -> Iterator[dict[str, Tensor]]:
    """Collects the names that a step gives inside; no ``name_scope`` from outside applies."""
    outer, names = list(_scopes), {}  # type: tuple[list[str], dict[str, Tensor]]
    _scopes.clear()
    _recorders.append(names)
    try:
        yield names
    finally:
        _recorders.remove(names)
        _scopes[:] = outer
