"""Promises of ``pserver launch``, kept with tiny scripts and, where a server is not the point, a
tiny server.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.launcher.cluster import Cluster, cluster_endpoints
from pserver.launcher.launch import launch

# Behaves as ``pserver serve --once`` does towards launch: says what it is bound to, ends with 0 on
# SIGTERM.
SERVER = """
import signal, socket, sys
{before}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
host, _, port = sys.argv[sys.argv.index("--endpoint") + 1].rpartition(":")
bound = socket.create_server((host, int(port)))
print("options", *sys.argv[1:], flush=True)
print(f"pserver ready at {host}:{bound.getsockname()[1]} (flight 1, grpc)", flush=True)
{body}
signal.pause()
"""
pytestmark = pytest.mark.processes

LEAVE = "sys.exit(0)"  # as after a job
DEADLINE = 30.0


class Run:
    """A launch in a process of its own, as a user has it."""

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *,
        server: str = LEAVE,
        servers: str = "1",
        trainers: str = "2",
        **more: str,
    ) -> None:
        (tmp_path / "server.py").write_text(
            SERVER.replace("{body}", server).replace("{before}", more.get("before", ""))
        )
        (tmp_path / "script.py").write_text(script)
        self.logs = tmp_path / "logs"
        program = (
            "import os, sys; from pserver.launcher.cluster import Cluster, cluster_endpoints\n"
            "from pserver.launcher.launch import launch\n"
            f"servers, trainers = cluster_endpoints({servers!r}, {trainers!r}, {more.get('host')!r})\n"
            f"cluster = Cluster({str(tmp_path / 'script.py')!r}, ('a', '--b'), servers, trainers, "
            f"host={more.get('host')!r},"
            f" transport={more.get('transport')!r}, log_dir={str(self.logs)!r})\n"
            "sys.exit(launch(cluster, os.environ, serve=(sys.executable, "
            f"{str(tmp_path / 'server.py')!r})))"
        )
        environment = {
            k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        }
        environment |= {"OMP_NUM_THREADS": more["omp"]} if "omp" in more else {}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=DEADLINE)
        return self.popen.returncode, out, err

    def wait_for(self, name: str, pattern: str) -> str:
        """What the first group of the pattern matched in a log, as soon as it does."""
        path = self.logs / name
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if path.exists() and (match := re.search(pattern, path.read_text())):
                return match[1]
            assert self.popen.poll() is None, self.end()
            time.sleep(0.02)
        raise AssertionError(f"{name} does not say {pattern}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[type[Run]]:
    started: list[Run] = []

    class Started(Run):
        def __init__(self, script: str, **more: str) -> None:
            super().__init__(tmp_path, script, **more)
            started.append(self)

    yield Started  # type: ignore[misc]
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
            one.popen.communicate(timeout=DEADLINE)


def alive(pid: int) -> bool:
    """A zombie, which only waits to be collected, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    end = time.monotonic() + DEADLINE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


SHOW = """
import os, sys
for name in ("TRAINING_ROLE", "TRAINERS", "TRAINER_ID", "PSERVER_ENDPOINTS", "CURRENT_ENDPOINT",
             "PSERVER_TRANSPORT", "OMP_NUM_THREADS"):
    print(name, os.environ.get(name))
print(sys.argv[1:])
"""
HANG = """
import os, signal
print("pid", os.getpid(), flush=True)
signal.pause()
"""


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


def run_logs(out: str, number: int) -> list[str]:
    prefix = f"trainer {number} | "
    return [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]


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


def test_threads_times_processes_do_not_exceed_the_cores(run: type[Run]) -> None:
    """Every process gets its share of the cores, at least one thread; a number that the user has
    set holds.
    """
    shared = int(re.search(r"OMP_NUM_THREADS (\d+)", run(SHOW).end()[1])[1])  # type: ignore[index]
    kept = re.search(r"OMP_NUM_THREADS (\d+)", run(SHOW, omp="7").end()[1])

    assert shared == max(1, len(os.sched_getaffinity(0)) // 3)
    assert kept is not None and kept[1] == "7"


def test_a_trainer_that_fails_ends_the_job_with_its_status_and_its_last_lines(
    run: type[Run],
) -> None:
    """The rest is stopped, though it would run for ever; stderr shows the guilty log."""
    script = HANG.replace(
        "signal.pause()",
        "int(os.environ['TRAINER_ID']) and exit('no such file: data.csv')\nsignal.pause()",
    )
    one = run(script, server="")
    started = time.monotonic()
    status, out, err = one.end()

    assert status == 1 and time.monotonic() - started < 15
    assert (
        "trainer 1 failed with status 1; the last lines of" in err
        and "no such file: data.csv" in err
    )
    assert gone(*map(int, re.findall(r"pid (\d+)", out)))


def test_a_server_that_stays_after_the_job_is_asked_to_end(run: type[Run]) -> None:
    """Servers that no trainer ever joined get SIGTERM, and the job's status is still 0."""
    one = run("", server="print('pid', __import__('os').getpid(), flush=True)")

    assert one.end()[0] == 0
    assert gone(int(re.findall(r"pid (\d+)", (one.logs / "server-0.log").read_text())[0]))


def test_the_status_is_the_scripts_own(run: type[Run]) -> None:
    """sys.exit(7) in a trainer makes launch end with 7."""
    assert run("import sys; sys.exit(7)", trainers="1").end()[0] == 7


@pytest.mark.parametrize("victim", ["server-0.log", "trainer-1.log"])
def test_a_process_killed_with_9_stops_the_rest_within_seconds(run: type[Run], victim: str) -> None:
    """Status 128 + 9, whatever the others then say about it; and nobody is left."""
    one = run(HANG, server="import os; print('pid', os.getpid(), flush=True)")
    pids = {
        name: int(one.wait_for(name, r"pid (\d+)"))
        for name in ("server-0.log", "trainer-0.log", "trainer-1.log")
    }
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    status, _, err = one.end()

    assert status == 137 and time.monotonic() - killed < 15
    assert f"{victim.replace('-', ' ').removesuffix('.log')} failed with status 137" in err
    assert gone(*pids.values())


def test_a_server_that_never_gets_ready_fails_the_launch(run: type[Run]) -> None:
    """A server that ends before its readiness line (a port in use) is reported; no trainer
    starts.
    """
    status, out, err = run(SHOW, before="sys.exit('port 6174 is in use')").end()

    assert status == 1 and "port 6174 is in use" in err and "TRAINER_ID" not in out


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on(run: type[Run], number: int, expected: int) -> None:
    """Ctrl-C reaches trainers as KeyboardInterrupt; launch ends with 128 + the signal when they
    have ended.
    """
    one = run(
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "print('pid', os.getpid(), flush=True)\n"
        "try:\n    signal.pause()\nexcept KeyboardInterrupt:\n    print('left in order', "
        "flush=True)"
    )
    for name in ("trainer-0.log", "trainer-1.log"):
        one.wait_for(name, r"pid (\d+)")
    one.popen.send_signal(number)
    status, out, _ = one.end()

    assert status == expected and out.count("left in order") == 2


def test_a_second_signal_kills(run: type[Run]) -> None:
    """Who ignores the first Ctrl-C does not survive the second."""
    one = run("import signal\nsignal.signal(2, signal.SIG_IGN)\n" + HANG, trainers="1")
    pid = int(one.wait_for("trainer-0.log", r"pid (\d+)"))
    one.popen.send_signal(signal.SIGINT)
    assert one.popen.stderr is not None and "a second signal kills" in one.popen.stderr.readline()
    started = time.monotonic()
    one.popen.send_signal(signal.SIGINT)

    assert one.end()[0] == 130 and time.monotonic() - started < 4
    assert gone(pid)


def test_nobody_outlives_a_launch_that_is_killed(run: type[Run]) -> None:
    """kill -9 of launch itself takes servers, trainers and the trainers' children with it."""
    one = run(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import signal; "
        "signal.pause()'])\n"
        "print('child', child.pid, flush=True)\n" + HANG,
        server="import os; print('pid', os.getpid(), flush=True)",
    )
    pids = [
        int(one.wait_for(name, r"pid (\d+)"))
        for name in ("server-0.log", "trainer-0.log", "trainer-1.log")
    ]
    pids += [int(one.wait_for("trainer-0.log", r"child (\d+)"))]
    one.popen.kill()
    one.popen.communicate(timeout=DEADLINE)

    assert gone(*pids)


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


def collective(tmp_path: Path, *command: str) -> tuple[list[str], list[str]]:
    """What the trainers of ``pserver launch --nccl2`` print, of a caller that has a role among
    servers itself.
    """
    (tmp_path / "script.py").write_text(COLLECTIVE)
    launched = subprocess.run(
        [
            sys.executable,
            "-m",
            "pserver",
            "launch",
            "--nccl2",
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
    """Two trainers that meet at one port of this machine, each with its number; --devices are what
    they see, --heartbeat-timeout holds.
    """
    first, second = collective(tmp_path, "--devices", "2,3", "--heartbeat-timeout", "7")

    assert first[0] == "TRAINING_ROLE TRAINER" and first[5] == "MASTER_ADDR 127.0.0.1"
    assert first[1:5] == ["RANK 0", "WORLD_SIZE 2", "LOCAL_RANK 0", "LOCAL_WORLD_SIZE 2"]
    assert second[1:5] == ["RANK 1", "WORLD_SIZE 2", "LOCAL_RANK 1", "LOCAL_WORLD_SIZE 2"]
    assert first[6:] == second[6:] and re.fullmatch(r"MASTER_PORT [1-9]\d+", first[6])
    assert first[7:] == ["CUDA_VISIBLE_DEVICES 2,3", "['PSERVER_HEARTBEAT_TIMEOUT']"]


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


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def test_on_a_terminal_trainer_0_owns_it(tmp_path: Path) -> None:
    """Trainer 0 sees a terminal and its bytes go through as they are; the log has what its display
    left behind.
    """
    import pty
    import threading

    (tmp_path / "server.py").write_text(SERVER.replace("{body}", LEAVE).replace("{before}", ""))
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(os.environ['TRAINER_ID'], "
        "sys.stdout.isatty())\nprint('\\x1b[?25lstep 1\\rstep 2')"
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
    assert "0 True" in text and "\x1b[?25lstep 1\rstep 2" in text and "trainer 1 | 1 False" in text
    assert text.endswith("\x1b[?25h")
    assert (tmp_path / "logs" / "trainer-0.log").read_text() == "0 True\nstep 2\n"


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
