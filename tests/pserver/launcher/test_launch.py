"""Promises of ``pserver launch`` about what it starts, kept with tiny scripts and, where a server
is not the point, a tiny server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pserver.launcher.cluster import (
    Cluster,
    cluster_endpoints,
    elastic_endpoints,
    free_port,
    least_and_most,
)
from pserver.launcher.free_place import free_places
from pserver.launcher.launch import launch
from pserver.wire_pb2 import StatusReply, TrainerStatus
from tests.support.tiny_launch import DEADLINE, LEAVE, SERVER, SHOW, Run, run_logs

pytestmark = pytest.mark.processes


def test_every_trainer_is_told_its_role_and_the_servers_real_ports(run: type[Run]) -> None:
    """Trainers get the contract's variables and the script's arguments; output is prefixed, and
    filed per process.
    """
    status, out, err = run(SHOW, servers="2", trainers="2", transport="grpc").end()
    logs = {number: (run_logs(out, number)) for number in (0, 1)}

    assert status == 0, err
    for number, lines in logs.items():
        assert lines[:3] == ["TRAINING_ROLE TRAINER", "TRAINERS 2", f"TRAINER_ID {number}"]
        assert re.fullmatch(
            r"PSERVER_ENDPOINTS 127\.0\.0\.1:[1-9]\d*,127\.0\.0\.1:[1-9]\d*", lines[3]
        )
        assert (
            lines[4:6] == ["CURRENT_ENDPOINT None", "PSERVER_TRANSPORT grpc"]
            and lines[-1] == "['a', '--b']"
        )
    assert "options --once --endpoint 127.0.0.1:0 --transport grpc" in out


def test_logs_are_filed_per_process(run: type[Run]) -> None:
    """Each process's lines stand in a file of their own, without a prefix; what a carriage return
    overwrote does not.
    """
    one = run("print('10 %\\r20 %\\r\\x1b[1mdone\\x1b[0m')")

    assert one.end()[0] == 0
    assert sorted(path.name for path in one.logs.iterdir()) == [
        "server-0.log",
        "trainer-0.log",
        "trainer-1.log",
    ]
    assert (one.logs / "trainer-1.log").read_text() == "done\n"


def test_logs_of_an_earlier_job_are_set_aside(run: type[Run], tmp_path: Path) -> None:
    """Those of processes that this job does not have: under another name, with all that they say,
    and a line for each.  Files of other names stay.
    """
    (tmp_path / "logs").mkdir()
    left = {"server-1.log": "old", "trainer-7.log": "old", "trainer-7.log.old": "older"}
    left |= {"trainer-x.log": "mine", "server-01.log": "mine", "notes.log": "mine"}
    for name, text in left.items():
        (tmp_path / "logs" / name).write_text(text)
    status, _, errors = run("print('new')").end()

    assert status == 0
    found = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert found.pop("trainer-0.log") == found.pop("trainer-1.log") == "new\n"
    assert "ready at" in found.pop("server-0.log")
    assert found == {
        "server-1.log.old": "old",
        "trainer-7.log.old": "older",
        "trainer-7.log.old1": "old",
        "trainer-x.log": "mine",
        "server-01.log": "mine",
        "notes.log": "mine",
    }
    assert "logs/server-1.log is of an earlier job: it is server-1.log.old now" in errors
    assert "trainer-7.log.old1 now" in errors and "notes" not in errors


def test_threads_times_processes_do_not_exceed_the_cores(run: type[Run]) -> None:
    """Every process gets its share of the cores, at least one thread; a number that the user has
    set holds.
    """
    shared = int(re.search(r"OMP_NUM_THREADS (\d+)", run(SHOW).end()[1])[1])  # type: ignore[index]
    kept = re.search(r"OMP_NUM_THREADS (\d+)", run(SHOW, omp="7").end()[1])

    assert shared == max(1, len(os.sched_getaffinity(0)) // 3)
    assert kept is not None and kept[1] == "7"


def test_a_part_of_a_larger_cluster_starts_only_what_is_here(run: type[Run]) -> None:
    """--host picks the servers and trainers of this host; numbers, endpoints and counts are those
    of the whole cluster.
    """
    servers, trainers = (
        "127.0.0.9:6174,127.0.0.1:0,127.0.0.9:6175".replace(":0", f":{free_port()}"),
        "127.0.0.9:1,127.0.0.1:2",
    )
    one = run(SHOW, servers=servers, trainers=trainers, host="127.0.0.1")
    status, out, err = one.end()

    assert status == 0, err
    assert sorted(path.name for path in one.logs.iterdir()) == ["server-1.log", "trainer-1.log"]
    assert run_logs(out, 1)[1:5] == [
        "TRAINERS 2",
        "TRAINER_ID 1",
        f"PSERVER_ENDPOINTS {servers}",
        "CURRENT_ENDPOINT 127.0.0.1:2",
    ]


COLLECTIVE = """
import os, sys
for name in ("TRAINING_ROLE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
    print(name, os.environ.get(name))
print(sorted(name for name in os.environ if name.startswith("PSERVER_")))
"""


BY_HAND = """
import os, sys
from pserver.launcher import cluster, launch
on_gpus = cluster.Cluster(sys.argv[3], (), (), ("", ""), devices=("2", "3"), log_dir=sys.argv[2])
sys.exit(launch.launch(on_gpus, os.environ))
"""


def collective(
    tmp_path: Path,
    *command: str,
    launch: Sequence[str] = ("-m", "pserver", "launch", "--nccl2"),
) -> tuple[list[str], list[str]]:
    """What the trainers of ``pserver launch --nccl2`` print, of a caller that has a role among
    servers itself.
    """
    (tmp_path / "script.py").write_text(COLLECTIVE)
    launched = subprocess.run(
        [
            sys.executable,
            *launch,
            *command,
            "--log-dir",
            str(tmp_path),
            str(tmp_path / "script.py"),
        ],
        env={
            **os.environ,
            "TRAINING_ROLE": "PSERVER",
            "PSERVER_ENDPOINTS": "a:1",
            "TRAINER_ID": "7",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert launched.returncode == 0, launched.stderr
    return run_logs(launched.stdout, 0), run_logs(launched.stdout, 1)


def test_a_collective_launch_gives_torchruns_variables(tmp_path: Path) -> None:
    """Two trainers that meet at one port of this machine, each with its number; --heartbeat-timeout
    and --start-timeout hold.
    """
    timeouts = ("--heartbeat-timeout", "7", "--start-timeout", "9")
    first, second = collective(tmp_path, "--trainers", "2", *timeouts)

    assert first[0] == "TRAINING_ROLE TRAINER" and first[5] == "MASTER_ADDR 127.0.0.1"
    assert first[1:5] == ["RANK 0", "WORLD_SIZE 2", "LOCAL_RANK 0", "LOCAL_WORLD_SIZE 2"]
    assert second[1:5] == ["RANK 1", "WORLD_SIZE 2", "LOCAL_RANK 1", "LOCAL_WORLD_SIZE 2"]
    assert first[6:] == second[6:] and re.fullmatch(r"MASTER_PORT [1-9]\d+", first[6])
    assert first[-1] == str(
        ["PSERVER_FINISHED", "PSERVER_HEARTBEAT_TIMEOUT", "PSERVER_START_TIMEOUT"]
    )


def test_trainers_see_the_devices_of_their_launch(tmp_path: Path) -> None:
    """All of this host's, of which each takes its own by LOCAL_RANK."""
    for mine in collective(tmp_path, launch=("-c", BY_HAND)):
        assert "CUDA_VISIBLE_DEVICES 2,3" in mine


def test_a_part_of_a_larger_collective_meets_at_the_first_trainer(tmp_path: Path) -> None:
    """With --host only this host's trainers start, numbered among all, and by themselves as
    LOCAL_RANK says.
    """
    first, second = collective(
        tmp_path, "--trainers", "127.0.0.9:6200,127.0.0.1:6201", "--host", "127.0.0.1"
    )

    assert first == []
    assert second[1:7] == [
        *("RANK 1", "WORLD_SIZE 2", "LOCAL_RANK 0", "LOCAL_WORLD_SIZE 1"),
        *("MASTER_ADDR 127.0.0.9", "MASTER_PORT 6200"),
    ]


def test_on_a_terminal_trainer_0_owns_it(tmp_path: Path) -> None:
    """Trainer 0 sees a terminal, and its bytes go through as they are, a whole line at a time; the
    log has what its display left behind.
    """
    import pty
    import threading

    (tmp_path / "server.py").write_text(SERVER.replace("{body}", LEAVE).replace("{before}", ""))
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(os.environ['TRAINER_ID'], sys.stdout.isatty(), "
        "sys.stdout.write_through)\nprint('\\x1b[?25lstep 1\\rstep 2')"
    )
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with os.fdopen(ours, "rb", buffering=0) as file:
            try:
                while chunk := file.read(4096):
                    shown.extend(chunk)
            except OSError:
                pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as out:
        cluster = Cluster(
            str(tmp_path / "script.py"),
            (),
            *cluster_endpoints("1", "2", None),
            log_dir=str(tmp_path / "logs"),
        )
        status = launch(
            cluster, os.environ, out=out, serve=(sys.executable, str(tmp_path / "server.py"))
        )
    reader.join(DEADLINE)
    text = shown.decode()

    assert status == 0
    assert "0 True False" in text and "\x1b[?25lstep 1\rstep 2" in text
    assert "trainer 1 | 1 False True" in text
    assert text.endswith("\x1b[?25h")
    assert (tmp_path / "logs" / "trainer-0.log").read_text() == "0 True False\nstep 2\n"


@pytest.mark.parametrize(
    ("servers", "trainers", "host", "message"),
    [
        ("0", "2", None, "--servers: expected 1 or more, got 0"),
        ("2", "-1", None, "--trainers: expected 1 or more, got -1"),
        ("2", "a:1", None, "expected two numbers"),
        ("2", "2", "a", "expected two numbers"),
        ("a:1", "b:1", None, "expected two numbers"),
        ("a:1,a:1", "b:1", "a", "each endpoint once"),
        ("a:0", "b:1", "a", "ports that other hosts can know"),
        ("a", "b:1", "a", "HOST:PORT"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused(
    servers: str, trainers: str, host: str | None, message: str
) -> None:
    """Counts below one, mixed forms and endpoints that are none raise ValueErrors that say what was
    expected.
    """
    with pytest.raises(ValueError, match=message):
        cluster_endpoints(servers, trainers, host)


def test_a_host_without_a_process_and_a_script_that_is_not_there_are_refused(
    tmp_path: Path,
) -> None:
    """Both are named in the message."""
    (tmp_path / "s.py").touch()
    with pytest.raises(ValueError, match="'c' has no process"):
        Cluster(str(tmp_path / "s.py"), (), ("a:1",), ("b:1",), host="c")
    with pytest.raises(ValueError, match="there is no file 'nowhere.py'"):
        Cluster("nowhere.py", (), ("a:0",), ("",))


@pytest.mark.parametrize("text", ["0:2", "3:2", "-1:2"])
def test_fewest_trainers_are_one_or_more_and_no_more_than_the_most(text: str) -> None:
    """--trainers MIN:MAX says which numbers it expects."""
    with pytest.raises(ValueError, match=r"expected MIN:MAX with 1 <= MIN <= MAX, got "):
        least_and_most(text)


def test_the_first_servers_host_begins_and_one_without_servers_joins(tmp_path: Path) -> None:
    """The host of another server starts no trainer."""
    (tmp_path / "s.py").touch()
    servers, trainers = elastic_endpoints("a:1,b:1", "4", "a")
    places = {
        host: Cluster(str(tmp_path / "s.py"), (), servers, trainers, host, least_trainers=2)
        for host in ("a", "b", "c")
    }

    here = {host: each.trainers_here for host, each in places.items()}
    assert here == {"a": [0, 1], "b": [], "c": []}
    assert [host for host, each in places.items() if each.joining] == ["c"]
    assert replace(places["c"], joins=3).trainers_here == [3]
    with pytest.raises(ValueError, match="expected a list of HOST:PORT with --host"):
        elastic_endpoints("2", "4", "a")


def test_free_places_are_those_that_nobody_takes() -> None:
    """Nor the host that has begun the job; one whose trainer was lost is free."""
    states = {0: "lost", 2: "joined", 3: "lost", 5: "left"}
    trainers = [TrainerStatus(trainer_id=n, state=state) for n, state in states.items()]

    assert free_places(StatusReply(trainers=trainers, trainers_expected=7), 2) == [3, 4, 6]
