"""What several test files need: an environment without a cluster's variables, and real servers in
this process.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy.testing  # noqa: F401  # here, because that of numpy 1.26 starts a process
import pytest
import torch

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.fork_server import early

pytest_plugins = [
    "tests.support.flakes",
    "tests.support.limits",
    "tests.support.times",
    "tests.support.tiers",
    "tests.support.checks",
    "tests.support.stores",
    "tests.support.order",
    "tests.support.patience",
    "tests.support.properties",
]

# in the processes that tests spawn with start_method="forkserver"
multiprocessing.set_forkserver_preload(["trainer.fleet", "torch._dynamo"])

# Its records, each with a stack, are made where it has a handler.  pytest gives its own to every
# logger that keeps its records to itself: a tenth of a capture's time.
logging.getLogger("torch.__trace").propagate = True

EXIT_SECONDS = 60.0
CLUSTER_VARIABLES = (
    "TRAINING_ROLE",
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
)
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rewrite``: see tests/support/transcript.py."""
    parser.addoption(
        "--rewrite", action="store_true", help="write the transcripts in tests/testdata anew"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects without the garbage collector, whose looks take a fifth: all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What there is by now stays: neither the collector nor a save, which asks it for the job's
    schedulers, looks at it again and again.  The rest is looked at less often, too: that took up to
    a tenth of a file's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every wait has a deadline, the one for threads that a test left behind too: where they are is
    said, and the run ends.  Workers wait for the process that has started them, which ends them.
    """
    if hasattr(session.config, "workerinput"):
        return

    def end() -> None:
        faulthandler.dump_traceback(all_threads=True)
        os._exit(int(session.exitstatus))

    late = threading.Timer(EXIT_SECONDS, end)
    late.daemon = True
    late.start()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the caller's cluster."""
    for name in (
        *CLUSTER_VARIABLES,
        *TORCHRUN_VARIABLES,
        *(key for key in os.environ if key.startswith("PSERVER_")),
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_early_variable_stays() -> Iterator[None]:
    """After every test: ``pserver serve`` sets one of gRPC's, and a process of a later test would
    not be forked.
    """
    before = early(os.environ).keys()
    yield
    for name in early(os.environ).keys() - before:
        del os.environ[name]


@pytest.fixture(autouse=True)
def no_job_stays() -> Iterator[None]:
    """After every test the job that it has begun is over, if it has begun one."""
    yield
    if (fleet := sys.modules.get("trainer.fleet")) is not None:
        fleet.finish()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums depend on the number of threads: a reference and what it is compared with both run with
    one.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[int], str]]:
    """``servers(n)``: the endpoints of n running servers, comma-separated; the same n servers serve
    every job of a test file.
    """
    with ExitStack() as stack:
        running: list[Server] = []

        def endpoints(count: int) -> str:
            while len(running) < count:
                config = ServerConfig(keep_failed_seconds=0.0)
                running.append(stack.enter_context(Server(config)))
            return ",".join(server.endpoint for server in running[:count])

        yield endpoints
