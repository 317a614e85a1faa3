"""Settings of this process by name: what the environment says about connections, read and changed
by a script.

A flag is an environment variable.  So a process that this one starts has the same setting, and
there is one place where a setting is looked up: ``role.Connection``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainer.role import Connection
from transpiler.ir.close_names import close_names

Flag = str | float | bool

# the variable, and the attribute of a Connection that it gives
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "PSERVER_HEARTBEAT_TIMEOUT": "heartbeat_timeout_seconds",
        "PSERVER_INSECURE": "insecure",
        "PSERVER_INSECURE_COLLECTIVE": "insecure_collective",
        "PSERVER_KEYS": "keys",
        "PSERVER_START_TIMEOUT": "start_timeout_seconds",
        "PSERVER_TOKEN_FILE": "token_file",
        "PSERVER_TRANSPORT": "transport",
    }
)
_WORDS = {str: "text", float: "a number", bool: "True or False"}


def get_flags(flags: str | Sequence[str]) -> dict[str, Flag]:
    """The present settings of this process, by name.

    Args:
        flags: one name or several; ``docs/environment.md`` lists them.

    Returns:
        The values: seconds as float, switches as bool, all others as text; the default where
        nothing was set.

    Raises:
        TypeError: a name is no text.
        ValueError: there is no such flag, or the environment holds a wrong value.

    Example::

        get_flags("PSERVER_START_TIMEOUT")["PSERVER_START_TIMEOUT"]  # seconds: 300.0
    """
    names = [flags] if isinstance(flags, str) else flags
    if not isinstance(names, Sequence):
        raise TypeError(f"get_flags: expected a name or a list of names, got {flags!r}")
    for name in names:
        _check_name("get_flags", name)
    connection = Connection.from_environment()
    return {name: getattr(connection, FLAGS[name]) for name in names}


def set_flags(flags: Mapping[str, Flag]) -> None:
    """Changes settings of this process, and of processes that it starts from now on.

    A connection that exists keeps its settings: set flags before ``fleet.init()``, or before an
    Executor runs a program of a job.

    Args:
        flags: values by name, of the types that :func:`get_flags` gives.

    Raises:
        TypeError: a value has another type.
        ValueError: there is no such flag, or a value is out of range; nothing is changed.

    Example::

        set_flags({"PSERVER_START_TIMEOUT": 60.0, "PSERVER_TRANSPORT": "tcp"})
        set_flags({"PSERVER_START_TIMEOUT": 300.0, "PSERVER_TRANSPORT": "auto"})
    """
    if not isinstance(flags, Mapping):
        raise TypeError(f"set_flags: expected a dict of values by name, got {flags!r}")
    texts = {}
    for name, value in flags.items():
        _check_name("set_flags", name)
        kind: type = type(getattr(Connection(), FLAGS[name]))
        whole = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not whole:
            raise TypeError(f"set_flags: {name}: expected {_WORDS[kind]}, got {value!r}")
        texts[name] = str(int(value)) if isinstance(value, bool) else str(value)
    Connection.set_environment(texts)


def _check_name(who: str, name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{who}: expected names, got {name!r}")
    if name not in FLAGS:
        near = close_names(name, FLAGS)
        raise ValueError(f"{who}: there is no flag {name!r}; close names: {near}")
