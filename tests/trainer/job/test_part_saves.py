"""Saves of which every server writes its part: what is in them, who goes on from them, and what a
failure costs.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.eager_modes import OUTER_SGD, strategy_of
from tests.support.tiers import RARE
from trainer import DistributedEmbedding, fleet
from trainer.job.job import present
from transpiler import DistributedStrategy

IDS: Any = torch.arange(16)
ALWAYS = 1e-6  # seconds between two checkpoints: after every step
MODES: Mapping[str, dict[str, Any]] = {
    "async": {},
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 2, "outer_optimizer": OUTER_SGD},
}


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files need not outlive the machine: they are flushed by nobody."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Net(nn.Module):
    """A table, buffers, and a layer that is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = DistributedEmbedding(4, name="rows")
        self.norm = nn.BatchNorm1d(4)
        self.wide = nn.Linear(4, 3000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wide(nn.functional.dropout(self.norm(self.rows(ids)), 0.2))
        return out


class Stopped(Exception):
    """The job is killed here."""


@contextmanager
def job(
    servers: int, path: Path | str, store: Path | str | None, strategy: DistributedStrategy | None
) -> Iterator[None]:
    """A job of one trainer that saves by itself; on so many servers, or alone."""
    with ExitStack() as stack:
        config = ServerConfig(keep_failed_seconds=0.0, store=None if store is None else str(store))
        running = [stack.enter_context(Server(config)).endpoint for _ in range(servers)]
        options = dict[str, Any](checkpoint=str(path), every=ALWAYS, keep=2, strategy=strategy)
        role = (
            fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=running)
            if servers
            else None
        )
        fleet.init(role, **options)
        try:
            yield
        finally:
            fleet.finish()


def trained(own: Path | None = None, stop: int = 0, clamp: bool = False) -> dict[str, Any]:
    """The script.

    Args:
        own: where it saves by itself, too: what the servers write is compared with that.
        stop: the step after which it is killed.
        clamp: it writes into a parameter behind each step.
    """
    np.random.seed(7)
    model = Net()
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        for ids in fleet.shard(DataLoader(IDS, batch_size=4, shuffle=True)):
            saves = present().saves
            assert saves is not None
            saves.finish()  # a save that is under way is complete
            if own is not None and optimizer.steps:
                fleet.save(str(own / f"step-{optimizer.steps:06d}"))
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
            if clamp:
                with torch.no_grad():
                    model.wide.bias.clamp_(-0.01, 0.01)
            if optimizer.steps == stop:
                raise Stopped
        scheduler.step()
    held = {name: v for name, v in model.state_dict().items() if not name.startswith("rows.")}
    return {**held, "rows": model.rows(IDS).detach().clone()}  # alone a table is in the model


def run(
    servers: int,
    path: Path | str,
    store: Path | str | None = None,
    stop: int = 0,
    strategy: DistributedStrategy | None = None,
    **script: Any,
) -> dict[str, Any] | None:
    """What a job has trained; None where it was stopped."""
    try:
        with job(servers, path, store, strategy):
            found = trained(stop=stop, **script)
            return {name: value.clone() for name, value in found.items() if torch.is_tensor(value)}
    except Stopped:
        return None


def rows(path: Path | str, table: str = "rows") -> dict[int, list[list[float]]]:
    """The rows of a checkpoint with their states, by id."""
    return {
        int(row): [chunk[name][number].tolist() for name in sorted(chunk) if name != "ids"]
        for chunk in checkpoint.reading(path).chunks(table)
        for number, row in enumerate(chunk["ids"])
    }


def names(path: Path) -> list[str]:
    """Of the checkpoints in a folder: those that are kept, and those that they continue."""
    return sorted(each.name for each in path.glob("step-*"))


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Tensors and rows to the bit, and what is said of them."""
    (mine, said), (theirs, other_said) = checkpoint.load(one), checkpoint.load(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert [mine[name].dtype for name in mine] == [theirs[name].dtype for name in mine]
    for table in checkpoint.reading(other).tables:
        assert rows(one, table) == rows(other, table)
    assert said["step"] == other_said["step"] and said["tables"] == other_said["tables"]


@pytest.mark.parametrize("mode", [None, "async", RARE("geo"), "diloco"])
def test_parts_have_what_a_trainer_would_have_written(mode: str | None, tmp_path: Path) -> None:
    """Compared with fleet.save between the same two steps."""
    strategy = None if mode is None else strategy_of(**MODES[mode])
    path, own = tmp_path / "saved", tmp_path / "own"
    run(2, path, path, strategy=strategy, own=own, stop=5)

    assert names(path) == ["step-000003", "step-000004"]  # a save of the script's ends a chain
    for name in names(path):
        assert sorted(each.name for each in (path / name).glob("server-*")) == [
            "server-0",
            "server-1",
        ]
        assert_same_checkpoint(path / name, own / name)


def test_what_a_script_has_written_is_in_its_checkpoints(tmp_path: Path) -> None:
    """Servers learn of it with the next step only."""
    whole = run(2, tmp_path / "whole", clamp=True)
    assert run(2, tmp_path / "saved", tmp_path / "saved", stop=3, clamp=True) is None
    resumed = run(2, tmp_path / "saved", tmp_path / "saved", clamp=True)

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.parametrize(
    "numbers", [(2, 3, 1), (1, 0, 2), RARE((0, 2, 0)), RARE((3, 3, 3))], ids=str
)
def test_any_number_of_servers_goes_on(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """Stopped twice: it ends as a job that nothing stopped, to the bit; also alone."""
    whole = run(2, tmp_path / "whole")
    path = tmp_path / "saved"
    for servers, stop in zip(numbers, (3, 6, 0), strict=True):
        resumed = run(servers, path, path, stop=stop)

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.parametrize("damage", ["missing", "changed", "manifest"])
def test_a_damaged_part_is_left_out(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint before is taken, with a warning."""
    assert run(2, tmp_path, tmp_path, stop=4) is None
    newest = tmp_path / "step-000003"
    (file,) = (newest / "server-1").glob("rows-*")
    if damage == "missing":
        shutil.rmtree(newest / "server-1")
    elif damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    else:
        (newest / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING):
        run(3, tmp_path, tmp_path, stop=1)

    assert "continues from" in caplog.text and "after 2 steps" in caplog.text
    assert str(newest) in caplog.text


def test_without_a_store_trainer_0_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; and such a job goes on from what servers have written, and they from its."""
    assert run(2, tmp_path, tmp_path, stop=3) is None
    with caplog.at_level(logging.WARNING):
        assert run(2, tmp_path, stop=6) is None
    assert caplog.text.count("trainer 0 writes the checkpoints") == 1
    assert not list((tmp_path / "step-000005").glob("server-*"))
    resumed, whole = run(2, tmp_path, tmp_path), run(2, tmp_path / "whole")

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_a_store_of_the_operator_s_own(tmp_path: Path) -> None:
    """Parts lie below a name of this job's; what is kept no longer is removed there, too."""
    path, store = tmp_path / "saved", tmp_path / "store"
    assert run(2, path, store, stop=4) is None
    (mine,) = store.iterdir()

    assert names(mine) == names(path) == ["step-000001", "step-000002", "step-000003"]
    assert run(3, path, store) is not None
    assert names(mine) == names(path) and "step-000001" not in names(mine)
    said = json.loads((path / "step-000008" / "checkpoint.json").read_text())["parts"]
    assert said["places"][2]["path"] == f"../../store/{mine.name}/step-000008/server-2"


def test_a_store_below_which_the_folder_is(tmp_path: Path) -> None:
    """Parts lie beside what trainer 0 adds."""
    assert run(2, tmp_path / "jobs" / "mine", tmp_path, stop=3) is None

    newest = tmp_path / "jobs" / "mine" / "step-000002"
    assert {each.name for each in newest.iterdir()} >= {"server-0", "server-1", "checkpoint.json"}


def test_parts_behind_a_url(url: str) -> None:
    """Servers and trainer write to the same store."""
    whole = run(2, f"{url}/whole", f"{url}/whole")
    assert run(2, f"{url}/saved", f"{url}/saved", stop=3) is None
    resumed = run(1, f"{url}/saved", f"{url}/saved")

    assert whole is not None and resumed is not None
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers write to a directory of the same name on another machine."""
    moved = tmp_path / "another machine"
    monkeypatch.setattr(
        "pserver.job.job.Job._directory", lambda self, path: str(moved / path / "server-0")
    )


@pytest.mark.usefixtures("elsewhere")
def test_servers_that_write_elsewhere_are_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on trainer 0 writes."""
    with caplog.at_level(logging.WARNING):
        whole = run(1, tmp_path / "saved", tmp_path / "saved")

    assert whole is not None
    assert "where trainer 0 reads, got none" in caplog.text
    assert caplog.text.count("trainer 0 writes the checkpoints") == 1
    found = names(tmp_path / "saved")
    assert "step-000001" not in found and found[-1] == "step-000008"


# ---- saves of the script ----


def model_and_step() -> tuple[Net, Callable[[], None]]:
    """A job's model, and what trains it for one more step."""
    np.random.seed(7)
    model = Net()
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))

    def step() -> None:
        optimizer.zero_grad()
        model(IDS[:7]).square().mean().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("mode", [None, "async", "geo", "diloco"])
def test_servers_write_their_parts_of_a_script_s_save(mode: str | None, tmp_path: Path) -> None:
    """Below their store; it has what trainer 0 writes elsewhere, and replaces the save before,
    whose parts go.
    """
    strategy = None if mode is None else strategy_of(**MODES[mode])
    store, own = tmp_path / "store", tmp_path / "own"
    with job(2, tmp_path / "automatic", store, strategy):
        _, step = model_and_step()
        step()
        fleet.save(str(store / "jobs" / "mine"))
        (before,) = (store / "jobs" / "mine").glob("parts-*")
        step()
        fleet.save(str(store / "jobs" / "mine"))
        (now,) = (store / "jobs" / "mine").glob("parts-*")
        assert now != before
        assert sorted(each.name for each in now.iterdir()) == ["server-0", "server-1"]
        step()
        fleet.save(str(own))
        assert not list(own.glob("parts-*"))
        fleet.save(str(store / "jobs" / "mine"))

    assert_same_checkpoint(store / "jobs" / "mine", own)


def test_a_delta_continues_what_servers_have_written(tmp_path: Path) -> None:
    """Also where the next save replaces that: its parts stay as long as the delta needs them."""
    config = ServerConfig(store=str(tmp_path))
    with Server(config) as one, Server(config) as other:
        role = fleet.UserDefinedRoleMaker(
            0, worker_num=1, server_endpoints=[one.endpoint, other.endpoint]
        )
        fleet.init(role)
        _, step = model_and_step()
        step()
        fleet.save(str(tmp_path / "whole"))
        step()
        fleet.save(str(tmp_path / "delta"), delta=True)
        fleet.save(str(tmp_path / "copy"))
        step()
        fleet.save(str(tmp_path / "whole"))
        fleet.finish()

    assert len(list((tmp_path / "whole").glob("parts-*"))) == 2
    assert_same_checkpoint(tmp_path / "delta", tmp_path / "copy")
    assert checkpoint.load(tmp_path / "whole")[1]["step"] == 3
    checkpoint.compact(tmp_path / "delta", tmp_path / "delta")
    checkpoint.save(tmp_path / "whole", {}, {})
    assert not list((tmp_path / "whole").glob("parts-*"))


def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are removed, the job continues, and the next save is whole."""
    path, commit, fails = tmp_path / "saved", checkpoint.Writer.commit, [""]

    def full(self: checkpoint.Writer, meta: Mapping[str, Any]) -> checkpoint.Saved:
        if fails[0] and ("fingerprint" in meta) == (fails[0] == "server"):
            raise OSError(28, "No space left on device")
        return commit(self, meta)

    monkeypatch.setattr(checkpoint.Writer, "commit", full)
    with job(2, tmp_path / "automatic", tmp_path, None):
        _, step = model_and_step()
        step()
        fleet.save(str(path))
        (kept,) = path.glob("parts-*")
        for who in ("server", "trainer"):
            step()
            fails[0] = who
            with pytest.raises(OSError, match="No space left"):
                fleet.save(str(path))
            fails[0] = ""
            assert list(path.glob("parts-*")) == [kept]
            assert checkpoint.load(path)[1]["step"] == 1
        fleet.save(str(path))

    assert checkpoint.load(path)[1]["step"] == 3


def test_a_server_that_still_writes_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server's disk was full, the other is busy with its part of that save: trainer 0 writes
    the next one.
    """
    commit, go_on = checkpoint.Writer.commit, threading.Event()

    def uneven(self: checkpoint.Writer, meta: Mapping[str, Any]) -> checkpoint.Saved:
        if "fingerprint" in meta and not go_on.is_set():
            if str(self._place).endswith("server-0"):
                raise OSError(28, "No space left on device")
            assert go_on.wait(30.0)
        return commit(self, meta)

    monkeypatch.setattr(checkpoint.Writer, "commit", uneven)
    with job(2, tmp_path / "automatic", tmp_path, None):
        _, step = model_and_step()
        step()
        with pytest.raises(OSError, match="No space left"):
            fleet.save(str(tmp_path / "saved"))
        fleet.save(str(tmp_path / "saved"))
        assert not list((tmp_path / "saved").glob("parts-*"))
        go_on.set()

    assert checkpoint.load(tmp_path / "saved")[1]["step"] == 1


@pytest.mark.usefixtures("elsewhere")
def test_a_save_that_servers_write_elsewhere_is_written_by_trainer_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first save finds it out."""
    with caplog.at_level(logging.WARNING), job(1, tmp_path / "automatic", tmp_path, None):
        _, step = model_and_step()
        for _ in range(2):
            step()
            fleet.save(str(tmp_path / "saved"))

    assert caplog.text.count("trainer 0 writes the checkpoints by itself from now on") == 1
    assert not list((tmp_path / "saved").glob("parts-*"))
    assert checkpoint.load(tmp_path / "saved")[1]["step"] == 2


# ---- a save and the job ----


def test_nobody_waits_for_what_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a server writes the job trains on, begins no other save, and says so; the checkpoint is
    that of its cut; the job's end waits for it.
    """
    written, commit = threading.Event(), checkpoint.Writer.commit

    def slow(self: checkpoint.Writer, meta: Mapping[str, Any]) -> checkpoint.Saved:
        assert "fingerprint" not in meta or written.wait(30.0)
        return commit(self, meta)

    monkeypatch.setattr(checkpoint.Writer, "commit", slow)
    with caplog.at_level(logging.WARNING), job(2, tmp_path, tmp_path, None):
        model = fleet.distributed_model(nn.Linear(1, 3000))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        biases = []
        for x in fleet.shard(DataLoader(IDS.float(), batch_size=4)):
            model(x[:, None]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            biases.append(model.state_dict()["bias"].clone())
        assert optimizer.steps == 4 and not (tmp_path / "checkpoints.json").exists()
        threading.Timer(0.2, written.set).start()  # while the job ends

    assert "no checkpoint after step 2: the one before is being written" in caplog.text
    assert names(tmp_path) == ["step-000001"]
    found, meta = checkpoint.load(tmp_path / "step-000001")
    assert meta["step"] == 1 and torch.equal(found["model/bias"], biases[0])
    assert "step-000001" in (tmp_path / "checkpoints.json").read_text()


def test_a_part_that_cannot_be_written_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes on, the next save is tried, and nothing of the failed one is left."""
    tmp_path.joinpath("step-000003").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        whole, other = run(2, tmp_path, tmp_path, stop=5), run(2, tmp_path, tmp_path)

    assert whole is None and other is not None
    assert "no checkpoint after step 3, the job continues: a server cannot save" in caplog.text
    assert "after 4 steps" in caplog.text
