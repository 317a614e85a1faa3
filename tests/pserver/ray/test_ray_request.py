"""Promises about what ``pserver.ray.run`` is asked for, and what it tells processes.  No Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pserver.ray
from pserver.errors import TrainerLost
from pserver.ray.actor import (
    ActorPlace,
    FunctionActor,
    JobKeys,
    ProcessEnd,
    StartRequest,
    public_bytes,
    ray_library,
    script_here,
    without_other_jobs,
    write_credentials,
)
from pserver.ray.driver import JobRequest, ProcessFailed, RayProcess
from pserver.security.certificates import new_key
from pserver.security.keys import Keys
from pserver.security.tokens import Role, read

LOST = ("pserver.errors.TrainerLost: trainer 1 was lost",)


def train() -> None:
    """A function for trainers."""


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pserver.ray`` is imported without Ray; ``run`` names the extra."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[ray\]' .* \(.*ray"):
        pserver.ray.run(train)
    with pytest.raises(ModuleNotFoundError, match=r"'\.\[ray\]' in a checkout"):
        ray_library()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"target": "none.py"}, ValueError, r"there is no file '\S+/none.py'"),
        ({"target": 3}, TypeError, "str, bytes or os.PathLike object, not int"),
        ({"target": __file__, "arguments": [3]}, TypeError, "a script's are texts, got 3"),
        ({"arguments": "abc"}, TypeError, "arguments: expected a list, got the text 'abc'"),
        ({"servers": 0}, ValueError, "servers: expected a whole number from 1 on, got 0"),
        ({"trainers": 1.5}, ValueError, "trainers: expected a whole number from 1 on, got 1.5"),
        ({"max_restarts": -1}, ValueError, "max_restarts: .* whole number from 0 on, got -1"),
        ({"start_timeout": 0}, ValueError, "start_timeout: expected a number of seconds above 0"),
        ({"server_resources": {"CPU": -1}}, ValueError, "server_resources: .* 0 or more .* got -1"),
        ({"environment": {"A": 1}}, TypeError, "environment: expected a text for A, got 1"),
        ({"environment": {"TRAINER_ID": "1"}}, ValueError, "TRAINER_ID follows from the job's"),
        (
            {"server_flags": ["--endpoint", "a:1"]},
            ValueError,
            "pserver.ray.run sets --endpoint: leave it out",
        ),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    """One sentence says what was expected, before Ray is asked for anything."""
    with pytest.raises(kind, match=message):
        pserver.ray.run(**{"target": train, **wrong})


def test_a_process_finds_its_role_in_its_environment() -> None:
    """As ``pserver launch`` would tell it; threads are as many as CPUs."""
    request = JobRequest(
        train,
        servers=2,
        trainers=3,
        arguments=(),
        resources={"server": {"CPU": 1}, "trainer": {"CPU": 4, "GPU": 1}},
        max_restarts=0,
        environment={"PSERVER_TRANSPORT": "tcp"},
        server_flags=(),
        strategy="PACK",
        start_timeout=1.0,
    )
    shared = {"PSERVER_JOB": "train", "PSERVER_TRANSPORT": "tcp", "PYTHONUNBUFFERED": "1"}

    assert request.variables("server", 1) == {
        **shared,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    assert request.variables("trainer", 2, ["a:1", "b:1"]) == {
        **shared,
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "TRAINING_ROLE": "TRAINER",
        "PSERVER_ENDPOINTS": "a:1,b:1",
        "TRAINERS": "3",
        "TRAINER_ID": "2",
    }


def test_another_job_s_variables_stay_behind() -> None:
    """Ray may have been started in a shell that had a role in another job."""
    found = {"PATH": "/bin", "RANK": "1", "PSERVER_KEYS": "keys", "TRAINER_ID": "3"}

    assert without_other_jobs(found) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("addresses", "environment", "host", "keys"),
    [
        (["10.0.0.1", "10.0.0.1"], {}, "127.0.0.1", False),
        (["10.0.0.1", "10.0.0.2"], {}, "10.0.0.2", True),
        (["10.0.0.1", "10.0.0.2"], {"PSERVER_INSECURE": "1"}, "10.0.0.2", False),
        (["10.0.0.1", "10.0.0.2"], {"PSERVER_KEYS": "/keys"}, "10.0.0.2", False),
    ],
)
def test_a_job_is_protected_by_itself(
    addresses: list[str], environment: dict[str, str], host: str, keys: bool, tmp_path: Path
) -> None:
    """Every job has a secret, and one on several addresses has keys, unless the user says else; a
    private key never leaves its actor.
    """
    made = JobKeys(addresses, environment)
    private = new_key()
    place = ActorPlace(addresses[1], public_bytes(private))
    given = made.credentials("trainer", place)
    named = write_credentials(tmp_path, "trainer", given, private)

    assert made.host(addresses[1]) == host
    assert ("keys/trainer.pem" in given) is keys
    assert not any(b"PRIVATE" in content for content in given.values())
    assert read(named["PSERVER_TOKEN_FILE"]).role is Role.TRAINER
    assert given["trainer.token"].decode() not in repr(StartRequest({}, given))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))
    if keys:
        assert Keys(named["PSERVER_KEYS"], ("trainer",)).bearer.host == addresses[1]


def test_a_script_is_found_where_a_node_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the driver's path, else below the folder that Ray has given the node; or it is said."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    order = StartRequest({}, {}, folder="/of/driver", script="/of/driver/jobs/train.py")

    with pytest.raises(FileNotFoundError, match=r"/of/driver/jobs/train.py on .*, or jobs/train"):
        script_here(order)

    (tmp_path / "jobs/train.py").touch()

    assert script_here(order) == str(tmp_path / "jobs/train.py")


def leaves(code: object) -> Callable[[], None]:
    """A function that ends as a script does by ``sys.exit``."""
    return lambda: sys.exit(code)  # type: ignore[arg-type]


def loses() -> None:
    """A function whose job has lost a trainer."""
    raise TrainerLost("trainer 1 was lost")


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (lambda: 5, ProcessEnd("trainer 2", "", 0, value=5)),
        (leaves(None), ProcessEnd("trainer 2", "", 0)),
        (leaves(259), ProcessEnd("trainer 2", "", 3)),
        (leaves("no"), ProcessEnd("trainer 2", "", 1, ("no",))),
        (loses, ProcessEnd("trainer 2", "", 1, LOST, LOST[0].partition(": ")[2])),
    ],
)
def test_a_function_ends_as_a_script(
    function: Callable[[], Any], end: ProcessEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a status, the traceback of its exception, which is printed as well, and its value."""
    found = FunctionActor(2).call(function, ())

    assert capsys.readouterr().err == "".join(f"{line}\n" for line in found.tail)
    assert replace(found, tail=found.tail[-1:]) == end


def test_an_error_of_ray_s_is_an_end() -> None:
    """An actor that is gone has lost its process; what its method raises is a failure.  A failure
    of the process that is known says more, and an end with 0 less.
    """
    gone, raised = RuntimeError("the node\nhas died"), RuntimeError("wrapped")
    raised.cause = ValueError("no")  # type: ignore[attr-defined]
    told = ProcessEnd("server 0", "a", 2, ("unknown flag",))
    place = ActorPlace("a", b"")

    for error, known, end in (
        (gone, None, ProcessEnd("server 0", "a", None, told="the node has died")),
        (raised, None, ProcessEnd("server 0", "a", 1, ("ValueError: no",))),
        (
            raised,
            ProcessEnd("server 0", "a", 0),
            ProcessEnd("server 0", "a", 1, ("ValueError: no",)),
        ),
        (gone, told, told),
    ):
        process = RayProcess("server", 0, place=place, end=known)
        process.fail(error)

        assert process.end == end
        assert process.lost is (end.status is None)


def test_the_cause_comes_first() -> None:
    """An actor that is gone, then what a signal has killed, then who was not told by others."""
    told = ProcessEnd("trainer 0", "a", 1, told="pserver.errors.TrainerLost: trainer 1")
    plain = ProcessEnd("trainer 1", "b", 3, ("Traceback", "ValueError: no"))
    killed = ProcessEnd("server 0", "b", 137)
    gone = ProcessEnd("server 1", "c", None, told="its node has died")

    error = ProcessFailed([told, plain, killed, gone], 0)

    assert error.failures == [gone, killed, plain, told]
    assert error.exit_status == 1
    assert str(error).splitlines()[:2] == [
        "server 1 on node c was lost: its node has died",
        "server 0 on node b failed with status 137 (killed by SIGKILL)",
    ]

    alone = ProcessFailed([told, plain], 2)

    assert alone.exit_status == 3
    assert str(alone).splitlines() == [
        "trainer 1 on node b failed with status 3; its last lines:",
        "    Traceback",
        "    ValueError: no",
        "trainer 0 on node a failed with status 1, reported by others: pserver.errors.TrainerLost: "
        "trainer 1",
        "the job was started 3 times",
    ]
