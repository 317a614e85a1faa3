"""``pserver launch`` with real servers and trainers: whatever happens to one process, the others
end, and say why.
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

from tests.support.load import Deadline, communicated, scaled
from tests.support.processes import Processes

DEADLINE = 100.0
SCRIPT = """
import os
import sys
import torch
from trainer import fleet

if sys.argv[2:] == ["absent"] and os.environ["TRAINER_ID"] == "1":
    sys.exit(0)
torch.manual_seed(0)
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(int(sys.argv[1])):
    if step == 5 and fleet.worker_index() == 1 and sys.argv[2:] == ["raise"]:
        raise RuntimeError("the data of trainer 1 are gone")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        print("under way", flush=True)
fleet.finish()
print("finished")
"""
pytestmark = pytest.mark.processes


class Launched:
    """A launch of the script, with 2 servers and 2 trainers."""

    def __init__(self, path: Path, *arguments: str) -> None:
        (path / "script.py").write_text(SCRIPT)
        command = [
            sys.executable,
            "-m",
            "pserver",
            "launch",
            "--servers",
            "2",
            "--trainers",
            "2",
            "--heartbeat-timeout",
            str(scaled(5)),
            "script.py",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [*command, *arguments],
            cwd=path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logs = path / "logs"

    def under_way(self) -> None:
        """Returns when trainer 0 has taken a few steps."""
        deadline = Deadline(DEADLINE)
        log = self.logs / "trainer-0.log"
        while not (log.exists() and "under way" in log.read_text()):
            assert self.popen.poll() is None and not deadline.over, self.popen.communicate()
            time.sleep(0.05)

    def children(self, word: str) -> list[int]:
        """The processes with this word in their command line, in the order in which they were
        started.
        """
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent, command = (
                    int(stat.read_text().rpartition(")")[2].split()[1]),
                    (stat.parent / "cmdline").read_text(),
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.popen.pid and word in command.split("\0"):
                found.append(int(stat.parent.name))
        return sorted(found)

    def end(self) -> tuple[int, str, str]:
        out, err = communicated(self.popen, DEADLINE)
        return self.popen.returncode, out, err


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[type[Launched]]:
    started: list[Launched] = []

    class Here(Launched):
        def __init__(self, *arguments: str) -> None:
            super().__init__(tmp_path, *arguments)
            started.append(self)

    yield Here  # type: ignore[misc]  # the same class, whose path is given
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
            communicated(one.popen, DEADLINE)


def free(endpoints: list[str]) -> bool:
    """Whether nobody listens there any more."""
    import socket

    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        with socket.socket() as client:
            if client.connect_ex((host, int(port))) == 0:
                return False
    return True


def test_servers_end_when_the_trainers_have_finished(processes: Processes) -> None:
    """The job's status is 0, servers have left by themselves, and their ports are free."""
    (processes.path / "script.py").write_text(SCRIPT)
    words = ("-m", "pserver", "launch", "--servers", "2", "--trainers", "2")
    launch = processes.python("launch", *words, "--heartbeat-timeout", "5", "script.py", "10")

    assert launch.status() == 0, launch
    out = "\n".join(launch.lines)
    assert out.count("finished") == 2 and out.count("the job is done") == 2 and "SIGTERM" not in out
    assert free(re.findall(r"pserver ready at (\S+)", out))


@pytest.mark.long
def test_a_trainer_that_ends_well_before_it_begins_is_not_waited_for(
    launched: type[Launched],
) -> None:
    """Its status is 0, and it never called ``fleet.init``: the others learn of it long before the
    start timeout (300 s), and the job fails.
    """
    status, out, err = launched("10", "absent").end()

    assert status == 1, out + err
    assert "trainer 1 ended before it joined: its process ended with status 0" in out
    assert "finished" not in out


@pytest.mark.long  # of tests/pserver/launcher/test_launch_ends.py stand for it
def test_a_server_killed_with_9_ends_the_job(launched: type[Launched]) -> None:
    """kill -9 in mid-step: status 137 within seconds, the guilty process named, nobody left."""
    one = launched("100000000")
    one.under_way()
    everyone = one.children("serve") + one.children("script.py")
    killed = time.monotonic()
    os.kill(one.children("serve")[1], signal.SIGKILL)
    status, out, err = one.end()

    assert status == 137, out + err
    assert time.monotonic() - killed < scaled(5 + 10)
    assert "server 1 failed with status 137" in err
    assert len(everyone) == 4 and not any(Path(f"/proc/{pid}").exists() for pid in everyone)


@pytest.mark.long
def test_a_trainer_that_raises_ends_the_job_with_its_traceback(launched: type[Launched]) -> None:
    """Status 1, and the error that the user has to read stands in launch's own output."""
    status, out, err = launched("100000000", "raise").end()

    assert status == 1
    assert (
        "RuntimeError: the data of trainer 1 are gone" in err
        and "trainer 1 failed with status 1" in err
    )


@pytest.mark.long  # of tests/pserver/launcher/test_launch_ends.py stand for it
def test_ctrl_c_ends_the_job(launched: type[Launched]) -> None:
    """SIGINT reaches everyone, and launch ends with 130 when they have ended."""
    one = launched("100000000")
    one.under_way()
    everyone = one.children("serve") + one.children("script.py")
    one.popen.send_signal(signal.SIGINT)
    status, out, err = one.end()

    assert status == 130, out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)
