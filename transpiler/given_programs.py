"""The single-node programs given to ``transpile``: one, or several over one module."""

from __future__ import annotations

from collections.abc import Sequence

from transpiler.ir.graph import Block, Op, Role, Storage, freeze
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program, default_startup_program

Given = Program | Sequence[Program] | None


def given_programs(program: Given, startup: Given) -> list[tuple[Program, Program]]:
    """The main and the startup program of each optimizer; the default ones for None.

    A main program that is given without a startup program gets a new one, because the default
    startup program may be another model's.

    Raises:
        TypeError: an argument has another type.
        ValueError: the list is empty, the numbers of main and startup programs differ, or the
            programs do not share their tensors.
    """
    if not isinstance(program, list | tuple):
        pairs = [_pair(program, startup)]
        share([main.storage for main, _ in pairs if main.storage is not None])
        return pairs
    startups = [None] * len(program) if startup is None else startup
    if not isinstance(startups, list | tuple) or len(startups) != len(program) or not program:
        raise ValueError(
            "startup_program: expected one for each of the programs, in a list, or None; got "
            f"{len(program)} programs and "
            f"{len(startups) if isinstance(startups, list | tuple) else type(startups).__name__}"
        )
    pairs = [
        _pair(one, other, f"[{number}]")
        for number, (one, other) in enumerate(zip(program, startups, strict=True))
    ]
    share([main.storage for main, _ in pairs if main.storage is not None])
    return pairs


def startup_programs(given: Given, otherwise: tuple[Program, ...]) -> tuple[Program, ...]:
    """The single-node startup programs: ``given``, or else those that were transpiled.

    Raises:
        ValueError: the numbers of programs differ.
    """
    if given is None:
        return otherwise
    found = (given,) if isinstance(given, Program) else tuple(given)
    if len(found) != len(otherwise):
        raise ValueError(
            f"startup_program: expected one for each of {len(otherwise)} programs, in a list, got "
            f"{len(found)}"
        )
    return found


def values_of(programs: Sequence[Program]) -> Storage | None:
    """The values of all of these programs; None if they hold none."""
    found = [program.storage for program in programs if program.storage is not None]
    if len(found[0].together if found else ()) < 2:
        return found[0] if found else None
    return Storage({name: tensor for each in found for name, tensor in each.tensors.items()}, None)


def _pair(program: object, startup: object, which: str = "") -> tuple[Program, Program]:
    for what, given in (("program", program), ("startup_program", startup)):
        absent = given is None and not (which and what == "program")
        if not absent and not isinstance(given, Program):
            raise TypeError(f"{what}{which}: expected a Program, got {type(given).__name__}")
    assert startup is None or isinstance(startup, Program)
    if not isinstance(program, Program):
        return default_main_program(), default_startup_program() if startup is None else startup
    if startup is not None:
        return program, startup
    held = {
        variable.name: variable
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.TABLE)
    }
    block = Block(0, freeze(held), tuple(Op("init", {}, (name,)) for name in held))
    return program, Program((block,), None, program.storage)


def share(storages: Sequence[Storage]) -> None:
    """Raises ValueError unless the programs were captured from one module, whose tensors they
    share; notes that they belong together.
    """
    known: dict[str, tuple[int, object]] = {}
    for number, storage in enumerate(storages):
        for name, tensor in storage.tensors.items():
            other, same = known.setdefault(name, (number, tensor))
            if same is not tensor:
                raise ValueError(
                    f"program: {name}: expected one tensor in all programs, got another one in "
                    f"program {number} than in program {other}: capture all of them from one "
                    "module that has every model"
                )
        storage.together = tuple(storages)
