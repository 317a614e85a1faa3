"""Which process am I: what each role's environment must hold, and what the error names where it
does not.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any

import pytest

from trainer import fleet, init_parallel_env
from trainer.collective.world import leave_parallel_env
from trainer.environment.environment import (
    TORCHRUN,
    CloudRoleMaker,
    Connection,
    Role,
    RoleMaker,
    UserDefinedRoleMaker,
    World,
)

ENDPOINTS = "10.0.0.1:6174,10.0.0.2:6174"
COMPLETE = {
    "TRAINER": {
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": ENDPOINTS,
        "TRAINERS": "3",
        "TRAINER_ID": "2",
    },
    "PSERVER": {
        "TRAINING_ROLE": "PSERVER",
        "PSERVER_ENDPOINTS": ENDPOINTS,
        "TRAINERS": "3",
        "CURRENT_ENDPOINT": "10.0.0.2:6174",
    },
}
REQUIRED = [
    (role, name)
    for role, complete in COMPLETE.items()
    for name in complete
    if name != "TRAINING_ROLE"
]


def test_a_trainers_environment_says_its_number_and_where_the_servers_are() -> None:
    """Four variables, and CURRENT_ENDPOINT is optional."""
    role = CloudRoleMaker(COMPLETE["TRAINER"])

    assert role == RoleMaker(
        Role.TRAINER, trainer_id=2, trainers=3, server_endpoints=("10.0.0.1:6174", "10.0.0.2:6174")
    )
    assert CloudRoleMaker({**COMPLETE["TRAINER"], "CURRENT_ENDPOINT": "10.0.0.9:1"}) == role


def test_a_servers_environment_says_which_of_the_endpoints_is_its_own() -> None:
    """Its index is the place of CURRENT_ENDPOINT in PSERVER_ENDPOINTS; TRAINER_ID is not needed."""
    role = CloudRoleMaker(COMPLETE["PSERVER"])

    assert (role.role, role.server_index, role.trainers) == (Role.PSERVER, 1, 3)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize(("role", "name"), REQUIRED)
def test_a_required_variable_that_is_missing_or_empty_is_named(
    role: str, name: str, value: str | None
) -> None:
    """The error says which variable, and which role needs it."""
    environ = {key: text for key, text in COMPLETE[role].items() if key != name}
    environ |= {} if value is None else {name: value}

    with pytest.raises(ValueError, match=rf"^{name} is not set.*TRAINING_ROLE={role}"):
        CloudRoleMaker(environ)


@pytest.mark.parametrize(("role", "name"), REQUIRED)
def test_fleet_names_the_missing_variable_of_the_real_environment(
    monkeypatch: pytest.MonkeyPatch, role: str, name: str
) -> None:
    """``fleet.init()`` reads the same variables, and starts no job without them."""
    for key, text in COMPLETE[role].items():
        monkeypatch.setenv(key, text)
    monkeypatch.delenv(name)

    with pytest.raises(ValueError, match=name):
        fleet.init()
    with pytest.raises(RuntimeError, match=r"fleet\.init"):
        fleet.worker_num()


@pytest.mark.parametrize(
    ("role", "name", "value", "words"),
    [
        (
            "TRAINER",
            "TRAINING_ROLE",
            "trainer",
            r"expected TRAINER \(also WORKER\) or PSERVER .*got 'trainer'",
        ),
        ("TRAINER", "TRAINING_ROLE", "", "or PSERVER .*got ''"),
        ("TRAINER", "TRAINERS", "two", "expected a whole number, got 'two'"),
        ("TRAINER", "TRAINERS", "0", "expected 1 or more, got 0"),
        ("TRAINER", "TRAINERS", "-3", "expected 1 or more, got -3"),
        ("TRAINER", "TRAINER_ID", "1.5", "expected a whole number, got '1.5'"),
        ("TRAINER", "TRAINER_ID", "3", "expected 0 to 2, got 3"),
        ("TRAINER", "TRAINER_ID", "-1", "expected 0 to 2, got -1"),
        ("TRAINER", "PSERVER_ENDPOINTS", "10.0.0.1", "HOST:PORT"),
        ("TRAINER", "PSERVER_ENDPOINTS", "10.0.0.1:99999", "0 to 65535"),
        ("TRAINER", "PSERVER_ENDPOINTS", ",", "at least one"),
        ("TRAINER", "PSERVER_ENDPOINTS", "a:1,b:1,a:1", "each endpoint once"),
        (
            "PSERVER",
            "CURRENT_ENDPOINT",
            "10.0.0.3:6174",
            r"expected one of PSERVER_ENDPOINTS \(10\.0\.0\.1:6174, 10\.0\.0\.2:6174\)",
        ),
        ("PSERVER", "TRAINERS", "many", "expected a whole number, got 'many'"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    role: str, name: str, value: str, words: str
) -> None:
    """The variable, what it should hold, what it holds."""
    with pytest.raises(ValueError, match=words) as caught:
        CloudRoleMaker({**COMPLETE[role], name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize("name", sorted({name for _, name in REQUIRED}))
def test_a_job_s_variables_without_a_role_do_not_train_alone(name: str) -> None:
    """As with a part of torchrun's: some host would train alone, and exit with 0."""
    with pytest.raises(ValueError, match=f"TRAINING_ROLE is not set, but {name}"):
        CloudRoleMaker({name: {**COMPLETE["TRAINER"], **COMPLETE["PSERVER"]}[name]})


def test_without_any_variable_a_process_trains_alone(caplog: pytest.LogCaptureFixture) -> None:
    """On purpose, and with exactly one line that says so."""
    assert CloudRoleMaker({}) == RoleMaker(Role.SINGLE)

    with caplog.at_level(logging.INFO):
        fleet.init()
    try:
        assert [
            record.message for record in caplog.records if "training alone" in record.message
        ] == ["no TRAINING_ROLE in the environment: training alone, in this process only"]
        assert (
            fleet.is_worker(),
            fleet.worker_index(),
            fleet.worker_num(),
            fleet.server_endpoints(),
        ) == (True, 0, 1, [])
    finally:
        fleet.finish()


def test_torchruns_variables_without_servers_make_a_collective_trainer() -> None:
    """As torchrun or ``launch --nccl2`` sets them; beside a parameter-server role they are
    ignored.
    """
    torchrun = dict(zip(TORCHRUN, ("1", "2", "1", "127.0.0.1", "29500"), strict=True))

    assert CloudRoleMaker(torchrun) == RoleMaker(Role.COLLECTIVE, trainer_id=1, trainers=2)
    assert CloudRoleMaker({"TRAINING_ROLE": "TRAINER", **torchrun}) == RoleMaker(
        Role.COLLECTIVE, trainer_id=1, trainers=2
    )
    assert CloudRoleMaker({**COMPLETE["TRAINER"], **torchrun}) == CloudRoleMaker(
        COMPLETE["TRAINER"]
    )
    assert World.from_environment(torchrun) == World(1, 2, 1, "127.0.0.1", 29500)
    assert World.from_environment({}) == World()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT: not set"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: not set"),
        ({"RANK": "2"}, "RANK: expected 0 to 1, got 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a whole number, got 'two'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: expected 0 to 65535, got 70000"),
    ],
)
def test_a_wrong_one_of_torchruns_variables_is_named(changed: dict[str, str], words: str) -> None:
    """Each is required of a trainer of a collective job, and checked."""
    torchrun = dict(zip(TORCHRUN, ("1", "2", "1", "127.0.0.1", "29500"), strict=True))

    with pytest.raises(ValueError, match=words):
        World.from_environment({**torchrun, **changed})


COMPLETE_TORCHRUN = dict(zip(TORCHRUN, ("1", "2", "1", "127.0.0.1", "29500"), strict=True))
PARTS = [
    names for count in range(1, len(TORCHRUN)) for names in itertools.combinations(TORCHRUN, count)
]


@pytest.mark.parametrize("names", PARTS, ids=" ".join)
def test_a_partly_set_torchrun_environment_trains_nowhere(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error that names what is missing, not a process that trains alone."""
    leave_parallel_env()  # of another test
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, COMPLETE_TORCHRUN[name])
    missing = ", ".join(name for name in TORCHRUN if name not in names)
    for environ in ({}, {"TRAINING_ROLE": "TRAINER"}):
        with pytest.raises(ValueError, match=f"^{missing}: not set.*unset {', '.join(names)}$"):
            CloudRoleMaker({**environ, **{name: COMPLETE_TORCHRUN[name] for name in names}})
    for call in (fleet.init, partial(fleet.init, is_collective=True), init_parallel_env):
        with pytest.raises(ValueError, match=f"^{missing}: not set"):
            call()


@pytest.mark.parametrize(
    ("word", "role"),
    [
        ("TRAINER", Role.TRAINER),
        ("WORKER", Role.TRAINER),
        ("PSERVER", Role.PSERVER),
        ("SERVER", Role.PSERVER),
    ],
)
def test_every_name_of_a_role_is_a_training_role(word: str, role: Role) -> None:
    """WORKER means TRAINER in the environment, too, and SERVER means PSERVER."""
    environ = {**COMPLETE["TRAINER"], **COMPLETE["PSERVER"], "TRAINING_ROLE": word}

    assert CloudRoleMaker(environ) == CloudRoleMaker({**environ, "TRAINING_ROLE": role.value})


@pytest.mark.parametrize("name", ["PSERVER_HEARTBEAT_TIMEOUT", "PSERVER_START_TIMEOUT"])
@pytest.mark.parametrize("text", ["inf", "nan", "-inf", "0", "-1", "soon", "1e300"])
def test_a_wrong_timeout_is_told_also_to_a_script_that_runs_alone(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is named; no number is infinite."""
    monkeypatch.setenv(name, text)
    for call in (fleet.init, partial(fleet.init, is_collective=True)):
        with pytest.raises(ValueError, match=f"^{name}: expected a number of seconds above 0 and"):
            call()


def test_a_script_may_decide_its_role_itself() -> None:
    """UserDefinedRoleMaker, with the documentation's other names of the roles."""
    endpoints = ["a:1", "b:2"]

    assert UserDefinedRoleMaker(1, Role.WORKER, 2, endpoints) == RoleMaker(
        Role.TRAINER, 1, 2, ("a:1", "b:2")
    )
    assert UserDefinedRoleMaker(1, Role.SERVER, 2, endpoints) == RoleMaker(
        Role.PSERVER, trainers=2, server_endpoints=("a:1", "b:2"), current_endpoint="b:2"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(current_id=2, worker_num=2, server_endpoints=["a:1"]), "expected 0 to 1, got 2"),
        (dict(current_id=0, worker_num=1), "at least one HOST:PORT"),
        (dict(current_id=0, worker_num=0, server_endpoints=["a:1"]), "expected 1 or more, got 0"),
        (
            dict(current_id=1, role=Role.PSERVER, server_endpoints=["a:1"]),
            "current_id: expected 0 to 0 for a server, got 1",
        ),
        (dict(current_id=0, role=Role.PSERVER, server_endpoints=["a"]), "HOST:PORT"),
    ],
)
def test_a_role_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    """The same checks as for the environment."""
    with pytest.raises(ValueError, match=words):
        UserDefinedRoleMaker(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            dict(role="PSERVER", server_endpoints=["a:1"]),
            "role: expected Role.TRAINER or Role.PSERVER, got 'PSERVER'",
        ),
        (dict(role=Role.SINGLE, server_endpoints=["a:1"]), "role: expected"),
        (
            dict(current_id="0", server_endpoints=["a:1"]),
            "current_id: expected a whole number, got '0'",
        ),
        (dict(worker_num=True, server_endpoints=["a:1"]), "worker_num: expected a whole number"),
        (
            dict(server_endpoints="a:1,b:2"),
            "server_endpoints: expected a list of HOST:PORT, got 'a:1,b:2'",
        ),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, Any], words: str) -> None:
    """A role in text would otherwise make a trainer of a server."""
    with pytest.raises(TypeError, match=words):
        UserDefinedRoleMaker(**arguments)


def test_init_takes_role_makers_only() -> None:
    """A wrong type is told at once."""
    with pytest.raises(TypeError, match="role_maker.*str"):
        fleet.init("TRAINER")  # type: ignore[arg-type]


def test_the_connections_settings_are_optional_and_checked() -> None:
    """PSERVER_HEARTBEAT_TIMEOUT, PSERVER_START_TIMEOUT, PSERVER_TRANSPORT: each error names its
    variable.
    """
    assert Connection.from_environment({}) == Connection()
    given = {
        "PSERVER_HEARTBEAT_TIMEOUT": "2.5",
        "PSERVER_START_TIMEOUT": "7",
        "PSERVER_TRANSPORT": "grpc",
    }
    assert Connection.from_environment(given) == Connection(2.5, 7.0, "grpc")
    for name, value in (
        ("PSERVER_HEARTBEAT_TIMEOUT", "0"),
        ("PSERVER_HEARTBEAT_TIMEOUT", "soon"),
        ("PSERVER_HEARTBEAT_TIMEOUT", "nan"),
        ("PSERVER_START_TIMEOUT", "-1"),
        ("PSERVER_TRANSPORT", "pigeon"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            Connection.from_environment({name: value})
