"""A single-node main program with its startup program, and what rewrites the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from transpiler.program import Program
from transpiler.strategy.strategy import DistributedStrategy


class Programs(NamedTuple):
    """A main program and the startup program of its variables.

    Attributes:
        main: forward, backward, clipping and updates.
        startup: gives every variable that ``main`` keeps its first value.
    """

    main: Program
    startup: Program


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a single-node program.

    Attributes:
        asked: whether a strategy asks for it.
        apply: the rewrite.
    """

    asked: Callable[[DistributedStrategy], bool]
    apply: Callable[[Programs, DistributedStrategy], Programs]
