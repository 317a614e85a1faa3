"""A server's settings from flags, a TOML file and environment variables, in this order of
precedence.
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from pserver.config import ServerConfig, check_factor, check_seconds, refuse_url

NAMES = frozenset(field.name for field in dataclasses.fields(ServerConfig))
VARIABLES = {
    "PSERVER_TRANSPORT": "transport",
    "PSERVER_HEARTBEAT_TIMEOUT": "heartbeat_timeout_seconds",
    "PSERVER_START_TIMEOUT": "start_timeout_seconds",
    "PSERVER_CONNECTIONS": "connections",
    "PSERVER_CHECKSUM": "checksum",
    "PSERVER_TOKEN_FILE": "token_file",
    "PSERVER_KEYS": "keys",
    "PSERVER_INSECURE": "insecure",
    "PSERVER_METRICS": "metrics",
    "PSERVER_JOB": "job",
    "PSERVER_STRAGGLER_FACTOR": "straggler_factor",
    "PSERVER_RECORD_LOG": "record_log",
}

KINDS: dict[str, type] = {"keep_failed_seconds": float}  # of settings whose default is None

T = TypeVar("T")


class UsageError(Exception):
    """A mistake in what was typed; the text is for the user."""


def checked(make: Callable[[], T]) -> T:
    """What ``make`` returns; a ValueError or TypeError of it is the user's mistake.

    Raises:
        UsageError: ``make`` raised one of the two.
    """
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def server_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ServerConfig:
    """The settings of ``pserver serve``.

    Args:
        arguments: what the parser made of the flags.
        environ: the process's environment variables.

    Raises:
        UsageError: a setting is unknown or wrong.
    """
    settings = _from_environment(environ)
    file = _from_file(arguments.config) if arguments.config else {}
    flags = {name: value for name, value in vars(arguments).items() if name in NAMES}
    written = {
        **{name: variable for variable, name in VARIABLES.items()},
        **{name: f"--config {arguments.config}: {name}" for name in file},
        **{name: flag_of(name) for name in flags},
    }
    try:
        return ServerConfig(**(settings | file | flags))
    except (ValueError, TypeError) as error:
        name, _, rest = str(error).partition(": ")
        raise UsageError(f"{written.get(name, name)}: {rest}") from error


def flag_of(name: str) -> str:
    """The flag of a setting: "--heartbeat-timeout"."""
    return "--" + name.removesuffix("_seconds").replace("_", "-")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, name in VARIABLES.items():
        if text := environ.get(variable):
            found[name] = text
            if name.endswith("_seconds"):
                found[name] = checked(partial(check_seconds, variable, text))
            elif name == "straggler_factor":
                found[name] = checked(partial(check_factor, variable, text))
            elif name == "insecure":
                found[name] = text == "1"
            elif name == "connections" and text.isdecimal():
                found[name] = int(text)
    return found


def _from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file; an unknown key is an error."""
    try:
        refuse_url("a file", path)
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except RecursionError as error:
        raise UsageError(f"--config {path}: expected TOML that is nested less deep") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if unknown := sorted(set(settings) - NAMES):
        raise UsageError(
            f"--config {path}: unknown key {', '.join(unknown)}; expected some of "
            f"{', '.join(sorted(NAMES))}"
        )
    for name, value in settings.items():
        default = getattr(ServerConfig(), name)
        kind = KINDS.get(name, str if default is None else type(default))
        if name == "metrics" and type(value) is int:
            settings[name] = str(value)
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            like = default or ("TEXT" if kind is str else kind())
            raise UsageError(
                f"--config {path}: {name}: expected a value like {like!r}, got {value!r}"
            )
    return settings
