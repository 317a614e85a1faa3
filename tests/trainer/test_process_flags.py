"""Settings of a process by name, and the devices that it has."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from trainer import Executor, cpu_places, cuda_places, get_flags, set_flags
from trainer.compat.flags import FLAGS
from trainer.environment.environment import Connection

WORLD = {"PSERVER_START_TIMEOUT": "12", "PSERVER_INSECURE": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's variables are as before afterwards."""
    monkeypatch.setattr(os, "environ", dict(WORLD))


def test_flags_are_what_the_environment_says() -> None:
    """One name or several; each in its own type."""
    assert get_flags("PSERVER_START_TIMEOUT") == {"PSERVER_START_TIMEOUT": 12.0}
    assert get_flags(["PSERVER_INSECURE", "PSERVER_TRANSPORT"]) == {
        "PSERVER_INSECURE": True,
        "PSERVER_TRANSPORT": "auto",
    }


def test_every_setting_of_a_connection_is_a_flag() -> None:
    """Except those that are internal."""
    probe = {"probe", "probe_seconds", "probe_trainers", "probe_end"}
    internal = {"finished", "plan_only", "panel", *probe}
    settings = set(Connection.__dataclass_fields__) - internal

    assert settings == set(FLAGS.values())


def test_a_flag_acts_on_the_next_connection() -> None:
    """What is read back is what was set."""
    wanted = {
        "PSERVER_HEARTBEAT_TIMEOUT": 3,
        "PSERVER_TRANSPORT": "tcp",
        "PSERVER_INSECURE": False,
        "PSERVER_KEYS": "keys",
    }
    set_flags(wanted)
    connection = Connection.from_environment()

    assert get_flags(list(wanted)) == wanted
    assert (connection.heartbeat_timeout_seconds, connection.transport) == (3.0, "tcp")
    assert (connection.insecure, connection.keys) == (False, "keys")


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (["PSERVER_KEYS"], TypeError, "expected a dict of values by name"),
        ({"PSERVER_KEY": "x"}, ValueError, "no flag 'PSERVER_KEY'; close names: PSERVER_KEYS"),
        ({1: "x"}, TypeError, "expected names, got 1"),
        ({"PSERVER_INSECURE": 1}, TypeError, "PSERVER_INSECURE: expected True or False, got 1"),
        ({"PSERVER_START_TIMEOUT": True}, TypeError, "expected a number, got True"),
        ({"PSERVER_START_TIMEOUT": "9"}, TypeError, "expected a number, got '9'"),
        ({"PSERVER_START_TIMEOUT": 0}, ValueError, "PSERVER_START_TIMEOUT: expected"),
        ({"PSERVER_TRANSPORT": "pigeon"}, ValueError, "expected one of .*, got 'pigeon'"),
        ({"PSERVER_TRANSPORT": None}, TypeError, "expected text, got None"),
    ],
)
def test_a_wrong_flag_changes_nothing(flags: Any, error: type[Exception], message: str) -> None:
    """The error names the flag; what stands beside it is not set either."""
    with pytest.raises(error, match=message):
        set_flags({"PSERVER_TRANSPORT": "shm", **flags} if isinstance(flags, dict) else flags)

    assert {name: os.environ[name] for name in FLAGS if name in os.environ} == WORLD


@pytest.mark.parametrize("name", ["PSERVER_PLAN_ONLY", "FLAGS_transport"])
def test_an_unknown_flag_cannot_be_read(name: str) -> None:
    """Known names are told."""
    with pytest.raises(ValueError, match=f"get_flags: there is no flag '{name}'; close names: PS"):
        get_flags(name)
    with pytest.raises(TypeError, match="expected a name or a list of names, got 3"):
        get_flags(3)  # type: ignore[arg-type]  # refused


def test_places_are_devices_of_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is one place; GPUs are those of the process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with Executor(cpu_places(1)[0]):
        pass

    assert cpu_places() == [torch.device("cpu")]
    assert [place.index for place in cuda_places()] == [0, 1, 2]
    assert cuda_places([2, 0]) == [torch.device("cuda", 2), torch.device("cuda", 0)]


@pytest.mark.parametrize("count", [0, 2])
def test_a_place_that_does_not_exist_is_an_error(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(
        ValueError, match=f"expected the number of a GPU .* got 2 with {count} GPUs"
    ):
        cuda_places([2])
    with pytest.raises(ValueError, match="got -1"):
        cuda_places([-1])
    with pytest.raises(ValueError, match="cpu_places: expected 1, got 4: the CPU is one place"):
        cpu_places(4)


@pytest.mark.parametrize(
    ("call", "given"), [(cpu_places, "1"), (cpu_places, True), (cuda_places, "0"), (cuda_places, 0)]
)
def test_places_take_numbers(call: Any, given: Any) -> None:
    """Not text, not a switch."""
    with pytest.raises(TypeError, match="expected .*whole number"):
        call(given)
    with pytest.raises(TypeError, match="expected whole numbers, got '0'"):
        cuda_places(["0"])  # type: ignore[list-item]  # refused
