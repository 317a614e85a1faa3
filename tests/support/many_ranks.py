"""Tests that run on several ranks at once: one set of gloo processes for all such tests of a file.

::

    @on_ranks(4)
    def test_sums_are_equal(rank: int, scratch: Path) -> None:
        ...

The processes import the test file, join one group and run its functions in the order of their
definition; each test then reports what its function raised, rank by rank.  The first of a file's
tests to be asked for waits for all of them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.load import Deadline, factor
from tests.support.processes import Processes

Check = Callable[[int, Path], None]
SECONDS = 200.0  # for all of a file's, on a busy machine
COLLECTIVE_SECONDS = 30.0
ROOT = Path(__file__).parent.parent.parent
_checks: dict[tuple[str, int], dict[str, Check]] = {}  # by file and number of ranks


def on_ranks(ranks: int) -> Callable[[Check], Callable[[], None]]:
    """The function is run by every one of so many ranks; the test fails where one of them does."""

    def decorate(check: Check) -> Callable[[], None]:
        file = check.__code__.co_filename
        _checks.setdefault((file, ranks), {})[check.__name__] = check

        def test() -> None:
            failures = _outcome(file, ranks).get(check.__name__, "it was not run")
            if failures:
                pytest.fail(failures, pytrace=False)

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        marked: Callable[[], None] = pytest.mark.processes(pytest.mark.timeout(SECONDS + 40)(test))
        return marked

    return decorate


@functools.cache
def _outcome(file: str, ranks: int) -> dict[str, str]:
    """What went wrong in each check, on all ranks; empty where nothing did."""
    with tempfile.TemporaryDirectory() as scratch:
        processes = Processes(ROOT)
        words = [__file__, file, str(ranks), scratch]
        path = os.pathsep.join([str(ROOT), str(Path(file).parent)])
        started = [
            processes.python(f"rank {rank}", *words, str(rank), PYTHONPATH=path)
            for rank in range(ranks)
        ]
        deadline = Deadline(SECONDS)
        for process in started:
            with suppress(AssertionError):  # it goes on; what was written until then is read
                process.status(max(deadline.left / factor(), 0.1))
        processes.end()
        logs = ["\n".join(process.lines) for process in started]
        if "RANKS_LOG" in os.environ:  # what the processes said, for whoever looks for slow tests
            print(logs[0])
        return _gathered(
            Path(scratch), ranks, list(_checks[file, ranks]), [log[-3000:] for log in logs]
        )


def _gathered(scratch: Path, ranks: int, names: list[str], logs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        said = []
        for rank in range(ranks):
            path = scratch / f"{name}.{rank}.json"
            failure = (
                json.loads(path.read_text())
                if path.exists()
                else f"did not get through this\n{logs[rank]}"
            )
            if failure:
                said.append(f"rank {rank}: {failure}")
        found[name] = "\n".join(said)
    return found


def _run(file: str, ranks: int, scratch: Path, rank: int) -> None:
    """One rank's process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification is not None and specification.loader is not None
    # the file's decorator fills this very table
    sys.modules["tests.support.many_ranks"] = sys.modules["__main__"]
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    for name, check in _checks[file, ranks].items():
        failure, began = "", time.monotonic()
        try:
            torch.manual_seed(0)
            check(rank, scratch)
        except BaseException:
            failure = traceback.format_exc()
        Path(scratch, f"{name}.{rank}.json").write_text(json.dumps(failure))
        print(f"{name}: {time.monotonic() - began:.2f} s", flush=True)
    dist.destroy_process_group()


def summed(value: Any) -> Any:
    """The number, summed over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("ranks", type=int)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("rank", type=int)
    given = parser.parse_args()
    _run(given.file, given.ranks, given.scratch, given.rank)
