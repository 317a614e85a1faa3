"""Files of two trainers that do not wait for each other: what each has, and what one leaves."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pserver.config import ServerConfig
from pserver.leases.epoch import Account
from pserver.service.server import Server
from tests.support.threaded_scripts import Script, kill
from tests.support.threads import at_once
from trainer.data.datasets import QueueDataset
from trainer.data.pieces import Slot
from trainer.job.datasets import _Passes
from trainer.samplers.read_ahead import ReadAhead
from trainer.samplers.sample_counts import SampleCounts

pytestmark = pytest.mark.timeout(60)

SAMPLES, BATCH = 60, 4  # of a file, of a batch
TAKEN = 6  # batches of a trainer that is then lost


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig()) as running:
        yield running


def written(folder: Path, files: int) -> list[str]:
    """Compressed files, each of which is one piece."""
    found = []
    for file in range(files):
        lines = "".join(f"1 {file * SAMPLES + n}\n" for n in range(SAMPLES))
        path = folder / f"part-{file}.gz"
        path.write_bytes(gzip.compress(lines.encode()))
        found.append(str(path))
    return found


class Announced:
    """Lookups of coming batches, of which there are none."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def announce_batch(self, batch: Any, source: object) -> None:
        pass

    def give(self, batch: Any) -> None:
        pass

    def withdraw(self, source: object = None) -> None:
        pass


def batches(
    script: Script, files: list[str], depth: int = 0, **settings: Any
) -> Iterator[list[int]]:
    """The samples of a pass, batch by batch; a step is taken with each.

    Args:
        depth: batches that are read ahead.
    """

    job, trainers = script.job, SimpleNamespace(part=lambda: (script.number, 2))
    dataset = QueueDataset(trainers)  # type: ignore[arg-type]  # it needs no more of the job
    dataset.init(batch_size=BATCH, use_var=[Slot("n")], **settings)
    dataset.set_filelist(files)
    counts = SampleCounts("files", job.agree)
    leases = job.samples.leases(job.communicator, job.strategy, job.saves)
    ahead = ReadAhead(lambda: Announced(depth))
    for batch in _Passes(dataset, lambda: leases, job.passes.begin, counts, ahead):
        yield batch["n"].tolist()
        script.step()


def accounts(server: Server) -> dict[int, Account]:
    assert server.job.program is not None, "a job runs"
    return server.job.program.leases.accounts


def pair(server: Server) -> list[Script]:
    return at_once(*(lambda n=n: Script([server], n) for n in (0, 1)))  # type: ignore[misc]  # of lambdas


@pytest.mark.parametrize("depth", [0, 2], ids=["", "read ahead"])
@pytest.mark.parametrize("files", [1, 8], ids=["samples", "pieces"])
def test_what_a_lost_trainer_leaves_counts_as_handed_back(
    server: Server, tmp_path: Path, files: int, depth: int
) -> None:
    """All that it had leased and that no step had, also of pieces whose end nobody had met, and
    what was read ahead: each sample is in one step, of either trainer.
    """
    lost, other = pair(server)
    paths, seen = written(tmp_path, files), list[int]()
    mine = batches(lost, paths, depth)
    for _ in range(TAKEN + 1):
        seen += next(mine)
    lost.optimizer.flush()
    taken = accounts(server)[0].decided
    kill([server], lost)  # its last batch is in no step
    for batch in batches(other, paths, depth):
        seen += batch
    other.optimizer.flush()
    account = accounts(server)[0]
    other.finish()

    assert taken == TAKEN * BATCH and account.over
    whole = files * SAMPLES
    assert sorted(seen[:taken] + seen[(TAKEN + 1) * BATCH :]) == list(range(whole))
    assert account == Account(whole, whole, 0, 0, over=True, handed_back=account.handed_back)
    assert account.handed_back >= BATCH
    if files > 1:
        assert account.handed_back == 2 * SAMPLES - taken  # it held two pieces


@pytest.mark.parametrize(("files", "threads"), [(2, 1), (3, 4), (6, 4)], ids=str)
def test_few_files_are_no_one_trainers(
    server: Server, tmp_path: Path, files: int, threads: int
) -> None:
    """Not even of the one that asks first, and may hold as many: who takes equally many batches
    finds them, up to near the end, and each sample is in one step.
    """
    scripts, paths, whole = pair(server), written(tmp_path, files), files * SAMPLES
    passes = [batches(each, paths, thread_num=threads) for each in scripts]
    seen = list[int]()
    for _ in range(whole // BATCH // 2 * 3 // 4):
        for each in passes:
            seen += next(each)

    def rest(number: int) -> list[int]:
        found = [n for batch in passes[number] for n in batch]
        scripts[number].finish()
        return found

    assert sorted(sum(at_once(lambda: rest(0), lambda: rest(1)), seen)) == list(range(whole))
