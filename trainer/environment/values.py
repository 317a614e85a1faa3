"""Values of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pserver import config


def number_of(environ: Mapping[str, str], name: str, default: str = "") -> int:
    """A whole number; of a variable that is not set, the default's.

    Raises:
        ValueError: it is none.
    """
    text = environ.get(name, "") or default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected a whole number, got {text!r}") from None


def seconds_of(environ: Mapping[str, str], name: str, default: float, zero: bool = False) -> float:
    """A number of seconds.

    Args:
        zero: it may be 0.

    Raises:
        ValueError: it is none, or out of range.
    """
    text = environ.get(name, "")
    return config.check_seconds(name, text, zero) if text else default


# ---- variables that other libraries read ----


def variable(name: str) -> str | None:
    """A variable of this process's environment; None where it is not set."""
    return os.environ.get(name)


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable of this process's environment; None takes it away."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
