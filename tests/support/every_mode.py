"""The update modes of the matrices: settings that a test has chosen, and the example of each mode
that it has not.  So a new mode is in every matrix once ``transpiler/plan/modes.py`` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from transpiler.plan.modes import MODES, Mode

Settings = TypeVar("Settings")


def with_every_mode(
    chosen: Mapping[str, Settings],
    made: Callable[[dict[str, Any]], Settings],
    modes: Mapping[str, Mode] = MODES,
) -> dict[str, Settings]:
    """The settings of a matrix, by name.

    Args:
        chosen: those of a mode, or of a variant of one, by name.
        made: gives them from ``a_sync_configs``.
        modes: all that there are.
    """
    names = {name.replace("-", "_") for name in chosen}
    others = {name: mode for name, mode in modes.items() if name not in names}
    return {**chosen, **{name: made(dict(mode.example)) for name, mode in others.items()}}
