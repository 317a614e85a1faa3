"""The tables of docs/errors.md: the classes of ``pserver.errors``, and exit statuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from docs.generators.tables import filled, table
from pserver.cli.settings import EVERY
from pserver.errors import PServerError

PAGE = "errors.md"


def pages() -> dict[str, str]:
    """The page with its tables."""
    made = {"classes of pserver.errors": classes, "exit statuses": exit_statuses}
    return {PAGE: filled(PAGE, lambda mark: made[mark]())}


def classes() -> str:
    """Each error below the one that it is a kind of."""
    return table(("error", "is a", "gRPC status", "meaning"), _rows(PServerError))


def _rows(error: type[PServerError]) -> Iterator[tuple[str, ...]]:
    base = error.__base__
    meaning = " ".join((inspect.getdoc(error) or "").partition("\n\n")[0].split())
    yield (
        f"`{error.__name__}`",
        f"`{base.__name__}`" if base is not None else "",
        f"`{error.status}`",
        meaning.replace("``", "`").removesuffix("."),
    )
    for child in error.__subclasses__():
        yield from _rows(child)


def exit_statuses() -> str:
    """A row for each command, and for each process of a job."""
    rows = (
        (f"`{each.of}`" if each.of.startswith("pserver") else each.of, each.zero, each.one)
        + (each.two, each.otherwise)
        for each in EVERY
    )
    return table(("command", "0", "1", "2", "otherwise"), rows)
