"""``pserver launch`` in a process of its own, with tiny scripts and a tiny server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.load import Deadline, communicated

# Behaves as ``pserver serve --once`` does towards launch: says what it is bound to, ends with 0 on
# SIGTERM.
SERVER = """
import signal, socket, sys
{before}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
host, _, port = sys.argv[sys.argv.index("--endpoint") + 1].rpartition(":")
bound = socket.create_server((host, int(port)))
print("options", *sys.argv[1:], flush=True)
print(f"pserver ready at {host}:{bound.getsockname()[1]} (tcp 1, grpc)", flush=True)
{body}
signal.pause()
"""


LEAVE = "sys.exit(0)"  # as after a job


DEADLINE = 30.0


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
            "from pserver.launcher import supervisor\n"
            "from pserver.launcher.launch import launch\n"
            "supervisor.TELL_SECONDS = 1.0  # nobody can tell the tiny servers anything\n"
            f"servers, trainers = cluster_endpoints({servers!r}, {trainers!r}, "
            f"{more.get('host')!r})\n"
            f"cluster = Cluster({str(tmp_path / 'script.py')!r}, ('a', '--b'), servers, trainers, "
            f"host={more.get('host')!r},"
            f" transport={more.get('transport')!r}, log_dir={str(self.logs)!r},"
            f" max_restarts={int(more.get('max_restarts', '0'))})\n"
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
        out, err = communicated(self.popen, DEADLINE)
        return self.popen.returncode, out, err

    def wait_for(self, name: str, pattern: str) -> str:
        """What the first group of the pattern matched in a log, as soon as it does."""
        path = self.logs / name
        deadline = Deadline(DEADLINE)
        while not deadline.over:
            if path.exists() and (match := re.search(pattern, path.read_text())):
                return match[1]
            assert self.popen.poll() is None, self.end()
            time.sleep(0.02)
        raise AssertionError(f"{name} does not say {pattern}")


def run_logs(out: str, number: int) -> list[str]:
    prefix = f"trainer {number} | "
    return [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
