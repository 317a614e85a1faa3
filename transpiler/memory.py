"""``memory_optimize`` and ``release_memory`` of the original interface, which do nothing here."""

from __future__ import annotations

import logging
from collections.abc import Collection

from transpiler.plan.settings import check_flag
from transpiler.program import Program

_LOG = logging.getLogger("transpiler")
_WHY = (
    "torch frees a tensor when nothing refers to it, and a program's code drops each after its use"
)


def memory_optimize(
    input_program: Program,
    skip_opt_set: Collection[str] | None = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = True,
) -> None:
    """Does nothing, and logs why: torch frees a tensor when nothing refers to it any more, and the
    code of a program drops every variable after its last use.

    Args:
        input_program: stays as it is.
        skip_opt_set, print_log, level, skip_grads: have no effect.

    Raises:
        TypeError: ``input_program`` is not a Program, or a flag is neither True nor False.

    Example:
        >>> from pserver import Program, memory_optimize
        >>> memory_optimize(Program(()))
    """
    check_flag("print_log", print_log)
    check_flag("skip_grads", skip_grads)
    _tell("memory_optimize", input_program)


def release_memory(input_program: Program, skip_opt_set: Collection[str] | None = None) -> None:
    """Does nothing, and logs why, as :func:`memory_optimize`.

    Raises:
        TypeError: ``input_program`` is not a Program.

    Example:
        >>> from pserver import Program, release_memory
        >>> release_memory(Program(()))
    """
    _tell("release_memory", input_program)


def _tell(what: str, program: Program) -> None:
    if not isinstance(program, Program):
        raise TypeError(f"{what}: expected a Program, got {type(program).__name__}")
    _LOG.info("%s does nothing: %s", what, _WHY)
