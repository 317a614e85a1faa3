"""A flag that says its own default is said: it stands before a file and the environment."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pserver.__main__ import _cluster
from pserver.cli.flags import parser
from pserver.cli.settings import NAMES, server_config
from pserver.config import ServerConfig

SERVE = parser().commands["serve"]
# another valid value than the default, of the settings whose values are no plain numbers
OTHERS: dict[str, Any] = {
    "endpoint": "127.0.0.1:6174",
    "checksum": "on",
    "transport": "grpc",
    "job": "clicks",
    "max_program": 32,
}


def flags() -> dict[str, argparse.Action]:
    """The flags of ``serve`` that take a value, by setting; the others can only switch on."""
    return {
        action.dest: action
        for action in SERVE._actions
        if action.dest in NAMES and action.option_strings and action.nargs != 0
    }


def with_defaults() -> list[str]:
    return [name for name in flags() if getattr(ServerConfig(), name) is not None]


@pytest.mark.parametrize("name", with_defaults())
def test_a_flag_with_its_default_overrides_a_file(name: str, tmp_path: Path) -> None:
    """Each flag of ``serve``; the file alone holds, and so does the flag alone."""
    default = getattr(ServerConfig(), name)
    value = OTHERS[name] if name in OTHERS else default + 2
    path = tmp_path / "serve.toml"
    path.write_text(f"{name} = {value!r}\n".replace("'", '"'))
    flag = [flags()[name].option_strings[0], str(default)]

    def found(*words: str) -> Any:
        arguments = parser().parse_args(["serve", *words])
        return getattr(server_config(arguments, {}), name)

    assert found("--config", str(path)) == value
    assert found("--config", str(path), *flag) == found(*flag) == default


@pytest.mark.parametrize(
    "name", ["heartbeat_timeout_seconds", "start_timeout_seconds", "transport"]
)
def test_a_flag_and_a_file_with_a_default_override_the_environment(
    name: str, tmp_path: Path
) -> None:
    """In this order."""
    default = getattr(ServerConfig(), name)
    variable = {
        "heartbeat_timeout_seconds": ("PSERVER_HEARTBEAT_TIMEOUT", "7"),
        "start_timeout_seconds": ("PSERVER_START_TIMEOUT", "7"),
        "transport": ("PSERVER_TRANSPORT", "grpc"),
    }[name]
    path = tmp_path / "serve.toml"
    path.write_text(f"{name} = {default!r}\n".replace("'", '"'))
    flag = [flags()[name].option_strings[0], str(default)]
    for words in (flag, ["--config", str(path)]):
        arguments = parser().parse_args(["serve", *words])
        assert getattr(server_config(arguments, dict([variable])), name) == default


def test_launch_knows_a_default_from_no_word(tmp_path: Path) -> None:
    """What its processes inherit from the environment gives way to a flag, whatever it says."""
    script = tmp_path / "train.py"
    script.write_text("")
    flags = {
        "--transport": ("auto", "transport"),
        "--heartbeat-timeout": ("20", "heartbeat_timeout_seconds"),
        "--start-timeout": ("300", "start_timeout_seconds"),
        "--straggler-factor": ("3", "straggler_factor"),
        "--grace": ("0", "grace_seconds"),
    }
    counts = ["launch", "--servers", "1", "--trainers", "1"]
    for flag, (default, field) in flags.items():
        silent = _cluster(parser().parse_args([*counts, str(script)]))
        said = _cluster(parser().parse_args([*counts, flag, default, str(script)]))
        assert getattr(silent, field) is None, flag
        assert str(getattr(said, field)).removesuffix(".0") == default, flag
        assert dataclasses.replace(said, **{field: None}) == silent
