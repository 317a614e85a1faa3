"""Files of samples that servers deal out by leases, in jobs of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pserver.client.replies import Absences
from pserver.config import ServerConfig
from pserver.leases.epoch import Account
from pserver.service.server import Server
from pserver.telemetry.counts import counted
from pserver.wire_pb2 import StatusRequest
from tests.support.waiting import eventually
from trainer import fleet
from trainer.data import formats, pieces
from trainer.data.batches import samples_at
from trainer.job import datasets
from trainer.job.job import present
from trainer.samplers.sample_counts import SampleCounts
from trainer.senders.live_trainers import LiveTrainers
from transpiler import DistributedStrategy

FILES, LINES = 3, 17
SAMPLES = FILES * LINES
MODES = pytest.mark.parametrize("a_sync", [True, False], ids=["async", "sync"])
Step = Callable[[torch.Tensor], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(ServerConfig(keep_failed_seconds=0.0)) as running:
        yield running


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files of several pieces."""
    monkeypatch.setattr(formats, "pieces_of", partial(pieces.pieces_of, most=20), False)
    monkeypatch.setattr("trainer.data.lines.pieces_of", partial(pieces.pieces_of, most=20))
    found = []
    for file in range(FILES):
        path = tmp_path / f"part-{file}"
        path.write_text("".join(f"1 {file * LINES + n}\n" for n in range(LINES)))
        found.append(str(path))
    yield found
    fleet.finish()


def begin(server: Server, checkpoint: str | None = None, **settings: Any) -> Step:
    """A job of one trainer: what trains on a batch, with a step."""
    strategy = DistributedStrategy()
    for name, value in settings.items():
        setattr(strategy, name, value)
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint])
    every = None if checkpoint is None else 1e-6  # seconds: after each step
    fleet.init(role, strategy=strategy, checkpoint=checkpoint, every=every)
    model = fleet.distributed_model(nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x.float()[:, None]).mean().backward()
        optimizer.step()

    return step


def dataset(files: list[str], **settings: Any) -> fleet.QueueDataset:
    made = fleet.QueueDataset()
    made.init(batch_size=4, use_var=[fleet.Slot("n")], **settings)
    made.set_filelist(files)
    return made


def in_memory(files: list[str], **settings: Any) -> fleet.InMemoryDataset:
    made = fleet.InMemoryDataset()
    made.init(batch_size=4, use_var=[fleet.Slot("n")], **settings)
    made.set_filelist(files)
    made.load_into_memory(progress=False)
    return made


def accounts(server: Server) -> dict[int, Account]:
    assert server.job.program is not None, "a job runs"
    return server.job.program.leases.accounts


@MODES
@pytest.mark.parametrize("threads", [1, 3])
def test_each_sample_of_the_files_is_in_one_decided_step(
    server: Server, files: list[str], threads: int, a_sync: bool
) -> None:
    """Pass by pass, in the order of the files."""
    step = begin(server, a_sync=a_sync)
    batches = dataset(files, thread_num=threads)
    for _ in range(2):
        seen = []
        for batch in batches:
            step(batch["n"])
            seen.append(batch["n"].tolist())

        assert [n for each in seen for n in each] == list(range(SAMPLES))
        assert [len(each) for each in seen] == [4] * 12 + [3]
    for batch in batches:
        step(batch["n"])

    assert accounts(server)[0] == accounts(server)[1] == Account(SAMPLES, SAMPLES, 0, 0, over=True)


@MODES
def test_a_last_batch_that_is_dropped_is_counted(
    server: Server, files: list[str], a_sync: bool
) -> None:
    """With drop_last: as skipped, or as left out where trainers step together."""
    step = begin(server, a_sync=a_sync)
    batches = dataset(files, drop_last=True)
    seen = []
    for batch in batches:
        step(batch["n"])
        seen.append(len(batch["n"]))
    next(iter(batches))

    assert seen == [4] * 12
    skipped, left_out = (3, 0) if a_sync else (0, 3)
    assert accounts(server)[0] == Account(SAMPLES, 48, skipped, left_out, over=True)


@MODES
def test_what_a_script_leaves_in_the_middle_is_handed_back(
    server: Server, files: list[str], a_sync: bool
) -> None:
    """Of the pass nothing is left for the trainer itself; the next one has all samples."""
    step = begin(server, a_sync=a_sync)
    batches = dataset(files)
    for number, batch in enumerate(batches, 1):
        step(batch["n"])
        if number == 3:
            break
    seen = []
    for batch in batches:
        step(batch["n"])
        seen += batch["n"].tolist()

    assert seen == list(range(SAMPLES))
    assert accounts(server)[0].decided == 12 and accounts(server)[0].over


def test_an_evaluation_reads_all_files(server: Server, files: list[str]) -> None:
    """Without gradients nothing is leased; nor where a trainer reads all files by itself."""
    begin(server)
    alone = dataset(files)
    alone.set_filelist(files, 0, 1)
    with torch.no_grad():
        seen = [n for batch in dataset(files) for n in batch["n"].tolist()]

    assert seen == [n for batch in alone for n in batch["n"].tolist()] == list(range(SAMPLES))
    assert accounts(server) == {}


def test_an_evaluation_without_lost_trainers_says_that_parts_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where all are live it says nothing."""
    live = LiveTrainers(3, own=0)
    there: Any = SimpleNamespace(
        communicator=SimpleNamespace(live=live), role=SimpleNamespace(trainers=3), splits_data=True
    )
    with torch.no_grad():
        assert datasets._leases(there) is None and not caplog.records
        live.learn(Absences(1, frozenset({2})))
        assert datasets._leases(there) is None

    assert "2 of 3 trainers are live: this pass, without gradients, leaves out" in caplog.text


@MODES
def test_each_sample_in_memory_is_in_one_decided_step(
    server: Server, files: list[str], a_sync: bool
) -> None:
    """In the order of the shuffles, which is that of a process that trains alone."""
    alone = in_memory(files)
    step = begin(server, a_sync=a_sync)
    batches = in_memory(files)
    for shuffle in ("load_into_memory", "global_shuffle", "local_shuffle"):
        seen = []
        for each in (alone, batches):
            getattr(each, shuffle)()
        for batch in batches:
            step(batch["n"])
            seen.append(batch["n"].tolist())
        with torch.no_grad():
            expected = [batch["n"].tolist() for batch in alone]

        assert seen == expected and sorted(sum(seen, [])) == list(range(SAMPLES))
    next(iter(batches))
    whole = Account(13, 13, 0, 0, over=True, unit="batches")
    assert [accounts(server)[number] for number in range(3)] == [whole] * 3


@MODES
def test_samples_that_are_not_in_memory_are_read_again(
    server: Server, files: list[str], a_sync: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: a batch that is leased has the samples that it has on every trainer; the pass goes on
    from there with them in memory.
    """
    step = begin(server, a_sync=a_sync)
    batches = in_memory(files)
    batches.global_shuffle()
    with torch.no_grad():
        expected = [batch["n"].tolist() for batch in batches]
    held = batches.held
    some = np.arange(0, SAMPLES, 3)
    batches.keep(samples_at(held, some))  # as of one who has taken the place of a lost trainer
    for _ in range(2):
        seen = []
        for batch in batches:
            step(batch["n"])
            seen.append(batch["n"].tolist())

        assert seen == expected
    assert caplog.text.count("reads 34 samples") == 1
    assert batches.get_memory_data_size() == SAMPLES
    batches.keep(samples_at(held, some))
    Path(files[2]).write_text(Path(files[2]).read_text().replace("1 37\n", "1 3\n1 7\n"))
    with pytest.raises(ValueError, match=r"part-2: expected 4 samples, as when.* got 5"):
        list(batches)


def test_where_a_lost_trainer_ends_the_job_each_has_files_of_its_own(
    server: Server, files: list[str]
) -> None:
    """Nothing is counted, and nothing leased, unless the strategy is elastic."""
    for elastic in (False, True):
        stop = {"lost_trainer": "stop"}
        step = begin(server, a_sync=False, a_sync_configs=stop, elastic=elastic)
        for batch in dataset(files):
            step(batch["n"])

        assert [each.decided for each in accounts(server).values()] == [SAMPLES] * elastic
        fleet.finish()


def test_a_file_that_changes_after_it_was_counted_is_an_error(
    server: Server, files: list[str]
) -> None:
    """Where trainers step together: it names the file, and both numbers."""
    step = begin(server, a_sync=False)
    batches = dataset(files, prefetch=1)
    with pytest.raises(ValueError, match=r"part-2: expected 4 samples, as when.* got 5"):
        for number, batch in enumerate(batches):
            step(batch["n"])
            if not number:
                text = Path(files[2]).read_text()
                Path(files[2]).write_text(text.replace("1 37\n", "1 3\n1 7\n"))


def test_trainers_that_have_other_files_are_told(server: Server, files: list[str]) -> None:
    """What another trainer has counted is what counts."""
    begin(server, a_sync=False)
    counts = SampleCounts("", lambda topic, text: "[1]" if text else "")
    batches = dataset(files)

    with pytest.raises(ValueError, match=r"part-0: expected 1 samples, as another.* got 5"):
        counts.of(batches, batches.all_pieces(), 0, 1)


class Stopped(Exception):
    """The process is killed here."""


@MODES
@pytest.mark.parametrize("made", [dataset, in_memory])
def test_a_script_that_is_started_again_reads_the_rest(
    server: Server, files: list[str], tmp_path: Path, a_sync: bool, made: Callable[..., Any]
) -> None:
    """Of the pass in which it was: what no saved step had."""

    def script(stop: int) -> list[list[int]]:
        step = begin(server, checkpoint=str(tmp_path / "saved"), a_sync=a_sync)
        batches = made(files)
        trained: list[list[int]] = [[], [], []]
        left = stop
        for epoch in range(3):
            if isinstance(batches, fleet.InMemoryDataset):
                batches.global_shuffle()
            for batch in batches:
                step(batch["n"])
                left -= 1
                if not left:
                    raise Stopped(trained)
                trained[epoch] += batch["n"].tolist()
        return trained

    with pytest.raises(Stopped) as stopped:
        script(19)  # it saves when it asks for a batch: the last step is in no checkpoint
    before = stopped.value.args[0]
    present().optimizers[0].close("killed")
    fleet.finish()
    after = script(0)

    assert before[1] and not before[2] and not after[0]
    both = [sorted(a + b) for a, b in zip(before, after, strict=True)]
    assert both == [list(range(SAMPLES))] * 3


@MODES
def test_a_script_that_saves_by_itself_keeps_the_position(
    server: Server, files: list[str], tmp_path: Path, a_sync: bool
) -> None:
    """A dataset's state names the pass; the checkpoint's servers know what is left of it."""
    step = begin(server, a_sync=a_sync)
    batches, before = dataset(files), []
    for number, batch in enumerate(batches, 1):
        step(batch["n"])
        before += batch["n"].tolist()
        if number == 5:
            fleet.save(str(tmp_path / "kept"))
            state = batches.state_dict()
            break
    fleet.finish()
    step = begin(server, a_sync=a_sync)
    fleet.load(str(tmp_path / "kept"))
    again = dataset(files)
    again.load_state_dict(state)
    after = []
    for batch in again:
        step(batch["n"])
        after += batch["n"].tolist()

    assert state == {"batches": 5, "batch_size": 4, "pass": 0}
    assert before + after == list(range(SAMPLES))
    plain = dataset(files)
    plain.load_state_dict(state)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dealt out by leases, as in the job"):
        next(iter(plain))
    plain.load_state_dict({"batches": 5, "batch_size": 4})
    with pytest.raises(RuntimeError, match="files of its own, as in the job"):
        next(iter(plain))


def wrong_lines(server: Server) -> int:
    """As the status of a server counts them."""
    return counted(server.job.status(StatusRequest()).trainers, "wrong_lines")


@MODES
def test_a_wrong_line_is_told_once(
    server: Server, files: list[str], caplog: pytest.LogCaptureFixture, a_sync: bool
) -> None:
    """Wrong lines are counted as in a job without leases, and the servers are told how many."""
    with Path(files[1]).open("a") as file:
        file.write("nothing\n")
    step = begin(server, a_sync=a_sync)
    batches = dataset(files, on_error="skip")
    for batch in batches:
        step(batch["n"])

    assert batches.wrong_lines == batches.get_wrong_lines(everywhere=True) == 1
    eventually(lambda: wrong_lines(server) == 1)
    assert caplog.text.count("left out 1 wrong lines") == 1


MANY = 99  # trainers: more than there are pieces


@pytest.mark.parametrize(
    ("before", "after", "a_sync"),
    [(MANY, 1, True), (1, MANY, True), (1, 1, False)],
    ids=["fewer", "more", "async"],
)
def test_a_pass_goes_on_with_another_number_of_trainers(
    server: Server,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
    a_sync: bool,
) -> None:
    """Also where they outnumbered the pieces of the files and do no more, or do since; and where
    they do not wait for one another any more.  Each sample is in one step.
    """
    saved, seen, state = str(tmp_path / "kept"), list[int](), dict[str, int]()
    for trainers, mode in ((before, a_sync), (after, True)):
        step = begin(server, a_sync=mode)
        if state:
            fleet.load(saved)
        batches = dataset(files)
        batches.load_state_dict(state or {"batches": 0})
        monkeypatch.setattr("trainer.job.datasets.JobTrainers.part", lambda _, of=trainers: (0, of))
        for number, batch in enumerate(batches, 1):
            step(batch["n"])
            seen += batch["n"].tolist()
            if number == 5 and not state:
                fleet.save(saved)
                state = batches.state_dict()
                break
        whole = accounts(server)[0]
        fleet.finish()

    assert whole == Account(SAMPLES, SAMPLES, 0, 0, over=True, handed_back=whole.handed_back)
    assert state == {"batches": 5, "batch_size": 4, "pass": 0}
    assert sorted(seen) == list(range(SAMPLES))
