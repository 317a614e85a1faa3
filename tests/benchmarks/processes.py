"""The other processes of a benchmark: parameter servers, and peers that do what is asked of them
line by line.

A peer ends when its standard input does, so that none outlives the benchmark.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
READY = "ready"


class Peer:
    """A process that says "ready ..." first, and then answers each line that it is told with one
    line of its own.
    """

    def __init__(
        self, role: str, *arguments: object, prefix: Sequence[str] = (), threads: int = 1
    ) -> None:
        command = [*prefix, sys.executable, str(HERE / "peers.py"), role, *map(str, arguments)]
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid

    def ready(self) -> str:
        """Waits until it is ready; what it says of itself."""
        said = self.heard()
        assert said.startswith(READY), f"expected a peer that is ready, got {said!r}"
        return said.removeprefix(READY).strip()

    def tell(self, line: object) -> None:
        """Asks for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def heard(self) -> str:
        """The next line of its answer; other lines, as torch's warnings, are none of ours."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with status {self._process.wait()}")
        return line.strip()

    def ask(self, line: object) -> str:
        """Asks, and waits for the answer."""
        self.tell(line)
        return self.heard()

    def rest(self) -> None:
        """Stops it until :meth:`wake`: some of torch's threads compute while they wait."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)

    def dismiss(self) -> None:
        """Tells it that nothing more will be asked."""
        assert self._process.stdin is not None
        self.wake()
        self._process.stdin.close()

    def end(self) -> None:
        """Ends it, after it has been dismissed."""
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@contextmanager
def peers(*started: Peer) -> Iterator[list[str]]:
    """What each says when it is ready; at the end they end."""
    try:
        yield [peer.ready() for peer in started]
    finally:
        for peer in started:
            peer.dismiss()
        for peer in started:
            peer.end()


@contextmanager
def server(
    transport: str = "auto",
    threads: int = 1,
    prefix: Sequence[str] = (),
    host: str = "127.0.0.1",
    flags: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """A parameter server's process number and endpoint."""
    command = [
        *prefix,
        sys.executable,
        "-m",
        "pserver",
        "serve",
        "--transport",
        transport,
        "--threads",
        str(threads),
    ]
    command += ["--endpoint", f"{host}:0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        ready = re.search(r"ready at (\S+)", process.stdout.readline())
        assert ready is not None, "expected a parameter server that is ready"
        yield process.pid, ready[1]
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have computed since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Main memory that a process holds for itself, and its part of what it shares."""
    found = re.search(
        r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    )
    assert found is not None, "Linux says how much memory a process holds"
    return int(found[1]) * 1024
