"""A server's settings from flags, a TOML file and environment variables, in this order of
precedence.
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pserver.config import ServerConfig

NAMES = frozenset(field.name for field in dataclasses.fields(ServerConfig))
VARIABLES = {
    "PSERVER_HEARTBEAT_TIMEOUT": "heartbeat_timeout_seconds",
    "PSERVER_START_TIMEOUT": "start_timeout_seconds",
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
    settings |= _from_file(arguments.config) if arguments.config else {}
    settings |= {name: value for name, value in vars(arguments).items() if name in NAMES}
    return checked(lambda: ServerConfig(**settings))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "PSERVER_TRANSPORT" in environ:
        found["transport"] = environ["PSERVER_TRANSPORT"]
    for variable, name in VARIABLES.items():
        try:
            found |= {name: float(environ[variable])} if environ.get(variable) else {}
        except ValueError:
            raise UsageError(
                f"{variable}: expected a number of seconds, got {environ[variable]!r}"
            ) from None
    return found


def _from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file; an unknown key is an error."""
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
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
        if type(value) is not kind and not (kind is float and type(value) is int):
            like = default or ("TEXT" if kind is str else kind())
            raise UsageError(
                f"--config {path}: {name}: expected a value like {like!r}, got {value!r}"
            )
    return settings
