"""What ``fleet`` writes behind URLs, and every call that takes a local path only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from torch import nn

from pserver.__main__ import main
from pserver.config import ServerConfig
from pserver.launcher.cluster import Cluster
from tests.support.eager_jobs import Servers, assert_same
from tests.support.fork_server import finished
from trainer import DistributedEmbedding, fleet
from trainer.serving import load_embedding
from transpiler import DistributedStrategy, Program
from transpiler.ir.graph import Block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(3, num_embeddings=9, name="emb")
        self.fc = nn.Linear(3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


def begun(endpoints: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    if endpoints:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
        fleet.init(role)
    else:
        fleet.init()
    torch.manual_seed(seed)
    model = Net()
    fleet.distributed_model(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, fleet.distributed_optimizer(adam)


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model((torch.arange(4) + step) % 9).square().mean().backward()
        optimizer.step()


def values(model: Net) -> list[torch.Tensor]:
    return [model.emb(torch.arange(9)).detach().clone(), model.fc.weight.detach().clone()]


@pytest.mark.parametrize("count", [0, 2], ids=["alone", "2 servers"])
def test_a_job_is_saved_exported_and_resumed_behind_a_url(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, count: int
) -> None:
    """A full save, a delta, an export in both formats: read by a job, by torch, by a lookup; and
    nothing is written to the working directory.
    """
    monkeypatch.chdir(tmp_path)
    endpoints = servers(count) if count else ""
    model, optimizer = begun(endpoints, 1)
    train(model, optimizer, 2)
    fleet.save(f"{url}/saved")
    train(model, optimizer, 1)
    fleet.save(f"{url}/delta", delta=True)
    for name in ("model.pt", "model.safetensors"):
        fleet.export(f"{url}/{name}")
    saved = values(model)
    train(model, optimizer, 2)
    expected = values(model)
    fleet.finish()

    model, optimizer = begun(endpoints, 2)
    assert fleet.load(f"{url}/delta") == 3
    assert_same(values(model), saved)
    train(model, optimizer, 2)
    assert_same(values(model), expected)
    with fsspec.open(f"{url}/model.pt") as file:
        assert torch.equal(torch.load(file, weights_only=True)["fc.weight"], saved[1])
    with fsspec.open(f"{url}/model.safetensors") as file:
        assert torch.equal(safetensors.torch.load(file.read())["fc.weight"], saved[1])
    for name in ("model.pt", "model.safetensors"):
        rows = load_embedding(f"{url}/{name}", "emb")(torch.arange(9))
        assert torch.equal(rows, saved[0])
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_the_same_error_as_on_a_disk(url: str) -> None:
    """A job that looks whether there is a checkpoint to go on from sees no difference."""
    begun("", 1)

    with pytest.raises(FileNotFoundError, match=f"no complete checkpoint in {url}"):
        fleet.load(url)
    with pytest.raises(FileNotFoundError):
        load_embedding(f"{url}/model.pt", "emb")


PROGRAM = Program((Block(0, {}, ()),))
LOCAL_ONLY: dict[str, Callable[[str], object]] = {
    "Program.save": PROGRAM.save,
    "Program.load": Program.load,
    "Program.draw": PROGRAM.draw,
    "save_to_prototxt": lambda url: DistributedStrategy().save_to_prototxt(url),
    "load_from_prototxt": lambda url: DistributedStrategy().load_from_prototxt(url),
    "data_dir": lambda url: ServerConfig(data_dir=url),
    "program": lambda url: ServerConfig(program=url),
    "--data-dir": lambda url: Cluster(__file__, (), ("h:0",), ("",), data_dir=url),
    "--log-dir": lambda url: Cluster(__file__, (), ("h:0",), ("",), log_dir=url),
}
COMMANDS = {
    "serve --config": ["serve", "--once", "--config"],
    "serve --data-dir": ["serve", "--once", "--data-dir"],
    "launch --log-dir": ["launch", "--servers", "1", "--trainers", "1", __file__, "--log-dir"],
    "launch --data-dir": ["launch", "--servers", "1", "--trainers", "1", __file__, "--data-dir"],
}
URLS = ["s3://ann:sesame@bucket/x", "hdfs://host/x", "memory://x", "s3:/bucket/x"]


@pytest.mark.parametrize("given", URLS)
@pytest.mark.parametrize("name", LOCAL_ONLY)
def test_what_takes_a_local_path_refuses_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    """A ValueError that names the call and the URL, without its password; no folder ``s3:``."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=f"{name}: expected a path") as said:
        LOCAL_ONLY[name](given)
    assert "sesame" not in str(said.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_a_url_where_it_takes_a_local_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """With the exit status of a usage error."""
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[name]
    words = command if name.startswith("serve") else [*command[:5], *command[6:]]
    words = [*words, "s3://bucket/x"] + ([] if name.startswith("serve") else [command[5]])

    assert main(words) == 2
    assert "expected a path on this machine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [fleet.save, fleet.load, fleet.export])
def test_a_url_that_pathlib_has_shortened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], object]
) -> None:
    """``Path("s3://bucket/x")`` is ``s3:/bucket/x``, which is a folder."""
    monkeypatch.chdir(tmp_path)
    begun("", 1)

    with pytest.raises(ValueError, match="pathlib takes a slash of a URL away"):
        call(os.fspath(Path("s3://bucket/x")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [fleet.save, fleet.load, fleet.export])
@pytest.mark.parametrize("given", ["", "s3://", "memory://", "memory:///", "file://"])
def test_a_path_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], object], given: str
) -> None:
    """As an unset variable makes it; no folder ``s3:``, and nothing in the working directory."""
    monkeypatch.chdir(tmp_path)
    begun("", 1)

    with pytest.raises(ValueError, match="expected a path, or a URL with a name"):
        call(given)
    assert not list(tmp_path.iterdir())


def test_a_file_at_the_root_of_a_store_is_no_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``memory://model.pt`` has no folder."""
    monkeypatch.chdir(tmp_path)
    begun("", 1)

    fleet.export("memory://model.pt")
    with pytest.raises(ValueError, match="ends in a slash"):
        fleet.export("memory://models/")
    with fsspec.open("memory://model.pt", "rb") as file:
        assert torch.load(file, weights_only=True)
    assert not list(tmp_path.iterdir())


SHARDED = """
import sys, torch
import trainer
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
trainer.init_parallel_env()
model, optimizer, _ = trainer.group_sharded_parallel(model, optimizer, "os")
trainer.save_group_sharded_model(model, "{url}", optimizer)
import fsspec
print(sorted(name.rpartition("/")[2] for name in fsspec.open("{url}/x").fs.ls("{url}", False)))
"""


@pytest.mark.processes
def test_a_sharded_model_is_saved_behind_a_url(tmp_path: Path, url: str) -> None:
    """In a process of its own."""
    done = finished(["-c", SHARDED.replace("{url}", url)], cwd=tmp_path)

    assert done.stdout == "['model.safetensors', 'optimizer.pt']\n", done.stderr
    assert not list(tmp_path.iterdir())
