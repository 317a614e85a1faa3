"""PaddlePaddle 2.6.2's parameter server on this host, for comparisons: started by environment
variables, asked line by line.

Paddle lives in a virtual environment of its own (its protobuf and numpy are not ours).  A script
that compares has two lives: run by our interpreter it starts ours and, with :class:`PaddleCluster`,
itself under Paddle's; there it calls :func:`play` with the model to train.  So this module imports
nothing but the standard library, and Paddle where that is the interpreter.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROLE = "TRAINING_ROLE"  # "PSERVER" or "TRAINER": this process is one of Paddle's
PACKAGES = ("paddlepaddle==2.6.2", "numpy<2", "protobuf==4.25.8", "setuptools")
READY = "ready"
START_SECONDS = 120.0
STOP_SECONDS = 20.0

# paddle -> the loss, and what feeds a step
Build = Callable[[Any], tuple[Any, Callable[[], dict[str, Any]]]]


def environment(at: Path) -> Path:
    """The interpreter of a virtual environment with Paddle in it; made, with pip, where there is
    none.
    """
    python = at / "bin" / "python"
    if (
        subprocess.run([python, "-c", "import paddle"], capture_output=True).returncode
        if python.exists()
        else True
    ):
        subprocess.run([sys.executable, "-m", "venv", str(at)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


# ---- from our interpreter ----


class PaddleCluster:
    """One server and one trainer or more, each a process of ``script`` under Paddle's interpreter;
    a context manager.

    Args:
        arguments: of the script.
        threads: of each process.
    """

    def __init__(
        self,
        python: Path,
        script: str,
        arguments: Sequence[str],
        servers: int = 1,
        trainers: int = 1,
        threads: int = 1,
    ) -> None:
        self._command = [str(python), script, *arguments]
        self._counts = {"PSERVER": servers, "TRAINER": trainers}
        self._threads = threads
        self._processes: dict[str, list[subprocess.Popen[str]]] = {"PSERVER": [], "TRAINER": []}
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115  # closed with the cluster

    def __enter__(self) -> PaddleCluster:
        ports = {role: _free_ports(count) for role, count in self._counts.items()}
        lists = {
            role: ",".join(f"127.0.0.1:{port}" for port in found) for role, found in ports.items()
        }
        for role, found in ports.items():
            for number, port in enumerate(found):
                own = {
                    ROLE: role,
                    "POD_IP": "127.0.0.1",
                    "PADDLE_PORT": str(port),
                    "PADDLE_TRAINER_ID": str(number),
                }
                own |= {
                    "PADDLE_PSERVERS_IP_PORT_LIST": lists["PSERVER"],
                    "PADDLE_TRAINER_ENDPOINTS": lists["TRAINER"],
                }
                own |= {
                    "PADDLE_TRAINERS_NUM": str(self._counts["TRAINER"]),
                    "OMP_NUM_THREADS": str(self._threads),
                }
                self._processes[role].append(
                    self._start({**os.environ, **own, "GLOG_v": "0", "PYTHONPATH": ""})
                )
        try:
            for trainer in self._processes["TRAINER"]:
                self._heard(trainer, READY)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def server_pids(self) -> list[int]:
        """The process numbers of the servers."""
        return [process.pid for process in self._processes["PSERVER"]]

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def _heard(self, process: subprocess.Popen[str], word: str) -> str:
        """What a process says behind the word; other lines are none of ours."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        self._log.seek(0)
        raise RuntimeError(
            f"Paddle ended with status {process.wait()}:\n{self._log.read()[-3000:]}"
        )

    def seconds(self, steps: int) -> float:
        """All trainers take so many steps: the seconds of the slowest."""
        for trainer in self._processes["TRAINER"]:
            assert trainer.stdin is not None
            trainer.stdin.write(f"{steps}\n")
            trainer.stdin.flush()
        return max(float(self._heard(trainer, "took")) for trainer in self._processes["TRAINER"])

    def __exit__(self, *_: object) -> None:
        for role in ("TRAINER", "PSERVER"):  # trainers tell the servers that they have ended
            for process in self._processes[role]:
                assert process.stdin is not None
                process.stdin.close()
            for process in self._processes[role]:
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(STOP_SECONDS)
        self._log.close()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; Paddle cannot be told to choose."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


# ---- under Paddle's interpreter ----


def is_played() -> bool:
    """Whether this process is one of Paddle's."""
    return ROLE in os.environ


def play(
    build: Build,
    rule: Callable[[Any], Any],
    configs: dict[str, Any],
    configure: Callable[[Any], None] | None = None,
) -> None:
    """Serves, or trains as many steps as each line of the input says.

    Args:
        rule: paddle -> the optimizer.
        configs: Paddle's own ``a_sync_configs``.
        configure: says more to Paddle's strategy.
    """
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    paddle.seed(0)
    fleet.init(fleet.PaddleCloudRoleMaker())
    loss, feed = build(paddle)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = configs
    if configure is not None:
        configure(strategy)
    fleet.distributed_optimizer(rule(paddle), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    print(READY, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            executor.run(paddle.static.default_main_program(), feed=feed())
        print("took", time.perf_counter() - began, flush=True)
    fleet.stop_worker()
