"""The tables of docs/environment.md, from ``trainer/environment/environment.py``."""

from __future__ import annotations

from docs.generators.tables import filled, table
from trainer.environment.environment import (
    INTERNAL,
    OTHER_LAUNCHERS,
    WITH_SERVERS,
    WITHOUT_SERVERS,
    EnvironmentVariable,
)

PAGE = "environment.md"
TABLES = {
    "variables of jobs with servers": WITH_SERVERS,
    "variables of jobs without servers": WITHOUT_SERVERS,
    "variables of other launchers": OTHER_LAUNCHERS,
    "variables between pserver's own processes": INTERNAL,
}
ABOUT = {  # where more is said of a variable
    "PSERVER_CHECKPOINT": "restarts.md",
    "PSERVER_GRACE": "elasticity.md",
    "PSERVER_INSECURE_COLLECTIVE": "security.md#ports",
    "PSERVER_KEYS": "security.md#keys",
    "PSERVER_LOG_JSON": "metrics.md#logs",
    "PSERVER_METRICS": "metrics.md",
    "PSERVER_PANEL": "terminal.md",
    "PSERVER_RECORD_LOG": "replay.md",
    "PSERVER_STRAGGLER_FACTOR": "elasticity.md#a-trainer-that-is-slow",
    "PSERVER_TENSORBOARD": "loggers.md#tensorboard",
    "PSERVER_TOKEN_FILE": "security.md",
    "PSERVER_TRACE": "trace.md",
}


def pages() -> dict[str, str]:
    """The page with its tables."""
    return {PAGE: filled(PAGE, lambda mark: variables(TABLES[mark]))}


def variables(described: tuple[EnvironmentVariable, ...]) -> str:
    """One table; the column of servers only where one of them reads something."""
    roles = ("trainer", "server") if any(each.server for each in described) else ("trainer",)
    rows = [
        (", ".join(map(_name, each.names)), *(getattr(each, role) for role in roles), each.meaning)
        for each in described
    ]
    return table(("variable", *roles, "meaning"), rows)


def _name(name: str) -> str:
    return f"[`{name}`]({ABOUT[name]})" if name in ABOUT else f"`{name}`"
