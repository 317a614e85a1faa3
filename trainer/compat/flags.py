"""Settings of this process: those of its connections, which a script reads and changes by name; and
those of torch and cuDNN while a job runs.

A flag is an environment variable.  So a process that this one starts has the same setting, and
there is one place where a setting is looked up: ``environment.connection.Connection``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from trainer.environment.environment import Connection, set_variable, variable
from transpiler.ir.close_names import close_names
from transpiler.plan.plan import Execution

Flag = str | int | float | bool

# the variable, and the attribute of a Connection that it gives
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "PSERVER_CHECKPOINT": "checkpoint",
        "PSERVER_CHECKPOINT_EVERY": "checkpoint_every_seconds",
        "PSERVER_CHECKPOINT_KEEP": "checkpoint_keep",
        "PSERVER_GRACE": "grace_seconds",
        "PSERVER_HEARTBEAT_TIMEOUT": "heartbeat_timeout_seconds",
        "PSERVER_INSECURE": "insecure",
        "PSERVER_INSECURE_COLLECTIVE": "insecure_collective",
        "PSERVER_JOB": "job",
        "PSERVER_KEYS": "keys",
        "PSERVER_LOG_JSON": "log_json",
        "PSERVER_METRICS": "metrics",
        "PSERVER_START_TIMEOUT": "start_timeout_seconds",
        "PSERVER_TENSORBOARD": "tensorboard",
        "PSERVER_TOKEN_FILE": "token_file",
        "PSERVER_TRACE": "trace",
        "PSERVER_TRACE_STEPS": "trace_steps",
        "PSERVER_TRANSPORT": "transport",
    }
)
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "True or False"}


def get_flags(flags: str | Sequence[str]) -> dict[str, Flag]:
    """The present settings of this process, by name.

    Args:
        flags: one name or several; ``docs/environment.md`` lists them.

    Returns:
        The values: seconds as float, numbers of steps as int, switches as bool, all others as text;
        the default where nothing was set.

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


# ---- torch settings ----

WORKSPACE = "CUDNN_CONV_WSCAP_DBG"  # cuDNN reads it: MB of a convolution


@dataclass(frozen=True, slots=True)
class _Knob:
    """One setting of the process that can be read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _set_limit(value: int | None) -> None:
    if value is not None:  # None: a torch without cuDNN
        torch.backends.cudnn.benchmark_limit = value


_THREADS = _Knob(torch.get_num_threads, torch.set_num_threads)
_BENCHMARK = _Knob(lambda: torch.backends.cudnn.benchmark, _set_benchmark)
# 0: all algorithms are tried
_LIMIT = _Knob(lambda: torch.backends.cudnn.benchmark_limit, _set_limit)


@cache
def _variable(name: str) -> _Knob:
    """A variable of the environment; None: it is not set."""
    return _Knob(partial(variable, name), partial(set_variable, name))


class ProcessSettings:
    """The settings that a job changes in its process, and restores when it ends.

    ::

        with ProcessSettings() as settings:
            settings.apply(Execution(threads=2))
            torch.get_num_threads()  # 2
    """

    def __init__(self) -> None:
        self._before: dict[_Knob, Any] = {}  # in the order in which they were set

    def apply(self, execution: Execution) -> None:
        """Applies an execution's settings; those that it leaves open stay."""
        if execution.threads:
            self._set(_THREADS, execution.threads)
        if execution.benchmarks:
            self._set(_BENCHMARK, True)
            self._set(_LIMIT, None if torch.backends.cudnn.benchmark_limit is None else 0)
        if execution.workspace_mb:
            self.environment({WORKSPACE: str(execution.workspace_mb)})

    def environment(self, variables: Mapping[str, str]) -> None:
        """Sets variables of the environment."""
        for name, value in variables.items():
            self._set(_variable(name), value)

    def _set(self, knob: _Knob, value: Any) -> None:
        self._before.setdefault(knob, knob.read())
        knob.write(value)

    def restore(self) -> None:
        """Restores all settings."""
        while self._before:
            knob, value = self._before.popitem()
            knob.write(value)

    def __enter__(self) -> ProcessSettings:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()
