"""Promises about what ``pserver.ray.run`` is asked for, and what it tells processes.  No Ray."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import pserver.ray
from pserver.ray.actor import (
    MOST_BYTES,
    MOST_KEPT,
    Credentials,
    JobKeys,
    JobRequest,
    LogLines,
    ProcessEnd,
    StartRequest,
    captured_output,
    own_variables,
    public_bytes,
    ray_library,
    script_here,
    without_other_jobs,
    write_credentials,
)
from pserver.ray.driver import Failure, ProcessFailed
from pserver.security.keys import Keys, new_key
from pserver.security.tokens import Role, read


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
        ({"target": "none.py"}, ValueError, "there is no file 'none.py'"),
        ({"target": 3}, TypeError, "expected the path of a script or a function, got 3"),
        ({"target": __file__, "arguments": [3]}, TypeError, "a script's are texts, got 3"),
        ({"arguments": "abc"}, TypeError, "arguments: expected a list, got the text 'abc'"),
        ({"servers": 0}, ValueError, "servers: expected 1 to 65536, got 0"),
        ({"trainers": 1.5}, TypeError, "trainers: expected a whole number, got 1.5"),
        ({"max_restarts": -1}, ValueError, "max_restarts: expected 0 to 65536, got -1"),
        ({"strategy": "NEAR"}, ValueError, "strategy: expected one of PACK, SPREAD, .* got 'NEAR'"),
        ({"start_timeout": 0}, ValueError, "start_timeout: expected a number of seconds above 0"),
        ({"log_dir": "s3://a/b"}, ValueError, "log_dir: expected a path on this machine"),
        ({"server_resources": {"CPU": -1}}, ValueError, "0 or more of CPU, got -1"),
        ({"trainer_resources": {"CPU": 0}}, ValueError, "something above 0"),
        ({"environment": {"A": 1}}, TypeError, "environment: expected a text for A, got 1"),
        ({"environment": {"TRAINER_ID": "1"}}, ValueError, "TRAINER_ID follows from the job's"),
        ({"server_flags": ["--endpoint", "a:1"]}, ValueError, "--endpoint is not for the user"),
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
        trainer_resources={"CPU": 4, "GPU": 1},
        environment={"PSERVER_TRANSPORT": "tcp"},
    )
    shared = {"PSERVER_JOB": "train", "PSERVER_TRANSPORT": "tcp", "PYTHONUNBUFFERED": "1"}

    assert own_variables(request, "server", 1) == {
        **shared,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    assert own_variables(request, "trainer", 2, ["a:1", "b:1"]) == {
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
    given = made.credentials("trainer", addresses[1], public_bytes(private))
    named = write_credentials(tmp_path, "trainer", given, private)

    assert made.host(addresses[1]) == host
    assert bool(given.files) is keys
    assert not any(b"PRIVATE" in content for content in given.files.values())
    assert read(named["PSERVER_TOKEN_FILE"]).role is Role.TRAINER
    assert given.token not in repr(given)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))
    if keys:
        assert Keys(named["PSERVER_KEYS"], ("trainer",)).bearer.host == addresses[1]


def test_lines_are_told_once_and_in_order() -> None:
    """Answers are small, and the end is told last."""
    spoken = LogLines()
    for number in range(3):
        spoken.add(f"{number}" * (MOST_BYTES // 2))
    spoken.ready("a:1")
    spoken.end(ProcessEnd(3))

    first, second = spoken.fetch(0.0), spoken.fetch(0.0)

    assert [line[0] for line in first.lines] == ["0", "1"] and first.ended is None
    assert [line[0] for line in second.lines] == ["2"] and second.ended == ProcessEnd(3)
    assert first.endpoint == second.endpoint == "a:1"


def test_lines_that_nobody_fetches_are_bounded() -> None:
    """The newest stay; the others are counted."""
    spoken = LogLines()
    for number in range(MOST_KEPT + 5):
        spoken.add(str(number))

    news = spoken.fetch(0.0)

    assert news.left_out == 5 and news.lines[0] == "5"


def test_news_wake_who_waits_for_them() -> None:
    """A line is told when it comes, not when the time is over."""
    spoken = LogLines()
    threading.Timer(0.05, spoken.add, ["a line"]).start()

    assert spoken.fetch(30.0).lines == ("a line",)


def test_what_a_function_prints_becomes_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Of standard output and standard error, as of a process of its own."""
    lines: list[str] = []
    with captured_output(lines.append):
        os.write(1, b"out\n")
        os.write(2, b"10 %\r20 %\n")
    os.write(1, b"after\n")

    assert lines == ["out", "20 %"]
    assert capfd.readouterr().out == "after\n"


def test_a_script_is_found_where_a_node_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the driver's path, else below the folder that Ray has given the node; or it is said."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    order = StartRequest(
        {}, Credentials("token"), script="/of/driver/train.py", near="jobs/train.py"
    )

    with pytest.raises(FileNotFoundError, match=r"/of/driver/train.py on this node, or jobs/train"):
        script_here(order)

    (tmp_path / "jobs/train.py").touch()

    assert script_here(order) == str(tmp_path / "jobs/train.py")


def test_the_cause_comes_first() -> None:
    """An actor that is gone, then what a signal has killed, then who was not told by others."""
    told = Failure("trainer", 0, "a", 1, told="pserver.errors.TrainerLost: trainer 1")
    plain = Failure("trainer", 1, "b", 3, ("Traceback", "ValueError: no"))
    killed = Failure("server", 0, "b", 137)
    gone = Failure("server", 1, "c", None, gone="its node has died")

    error = ProcessFailed([told, plain, killed, gone], 0)

    assert error.failures == [gone, killed, plain, told]
    assert error.exit_status == 1
    assert "server 0 on node b failed with status 137 (killed by SIGKILL)" in str(error)

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
