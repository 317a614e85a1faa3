"""``fs_client_param``: any file system of fsspec, with a user and a password that nothing shows."""

from __future__ import annotations

import io
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from pserver.storage.place import place_at
from pserver.storage.remote import Login, options_of
from tests.support.eager_jobs import batches, net, train
from trainer import fleet
from transpiler import DistributedStrategy

PASSWORD = "se/same!"
URI = "guarded://host"


class Guarded(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in memory behind a user and a password; its errors quote what it was told."""

    protocol = "guarded"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False

    def __init__(self, username: str = "", password: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._told = f"{URI.replace('host', f'{username}:{password}@host')}"
        if (username, password) != ("ann", PASSWORD):
            raise PermissionError(f"guarded: no entry for {self._told}")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "broken" in path:
            raise OSError(f"no space left at {self._told}/{path}, password {self._told}")
        return super()._open(path, mode, **options)

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        if "broken" in rpath:
            raise RuntimeError(f"no space left at {self._told}/{rpath}, with {PASSWORD}")
        super().put_file(lpath, rpath, *args, **options)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    Guarded.store.clear()
    yield
    fleet.finish()


def strategy(**settings: str) -> DistributedStrategy:
    made = DistributedStrategy()
    made.fs_client_param = {"uri": URI, "user": "ann", "passwd": PASSWORD, **settings}
    return made


def begun(seed: int, given: DistributedStrategy | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    fleet.init(strategy=given)
    model = fleet.distributed_model(net(seed))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, fleet.distributed_optimizer(sgd)


@pytest.mark.observes("fs_client_param.uri", "fs_client_param.user", "fs_client_param.passwd")
def test_a_job_saves_loads_and_exports_with_its_password(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a file system that lets nobody else in; a job without the password is refused there, and
    nothing that is printed, logged or raised has it.
    """
    caplog.set_level(logging.DEBUG)
    model, optimizer = begun(1, strategy())
    train(model, optimizer, batches(2))
    fleet.save(f"{URI}/saved")
    fleet.export(f"{URI}/model.pt")
    expected = [each.detach().clone() for each in model.parameters()]
    raised = io.StringIO()
    with pytest.raises(OSError, match="no space left") as broken:
        fleet.export(f"{URI}/broken/model.pt")
    raised.write("".join(traceback.format_exception(broken.value)))
    print(
        place_at(f"{URI}/saved"), repr(place_at(f"{URI}/saved")), strategy(), Login(URI, "a", "b")
    )
    fleet.finish()

    model, optimizer = begun(2, strategy())
    assert fleet.load(f"{URI}/saved") == 2
    assert all(map(torch.equal, model.parameters(), expected))
    fleet.finish()
    assert options_of(f"{URI}/saved") == {}
    begun(2, None)
    with pytest.raises(PermissionError, match="no entry") as refused:
        fleet.load(f"{URI}/saved")
    raised.write("".join(traceback.format_exception(refused.value)))

    captured = capfd.readouterr()
    said = captured.out + captured.err + caplog.text + raised.getvalue()
    lines = [line for line in said.splitlines() if PASSWORD in line]
    assert not lines and "no space left" in said


def test_another_host_does_not_get_the_password() -> None:
    """A login acts on its own URL, and below it."""
    fleet.init(strategy=strategy(uri=f"{URI}/folder"))

    assert options_of(f"{URI}/folder/job") == {"username": "ann", "password": PASSWORD}
    assert options_of(f"{URI}/folder2/job") == options_of("guarded://elsewhere/folder") == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uri": "host"}, "expected a URL"),
        ({"uri": "memory://job"}, "memory:// takes no user"),
        ({"uri": "nowhere://job"}, "nowhere"),
        ({"hadoop_bin": "/usr/bin/hadoop"}, "hadoop_bin acts with a uri of hdfs://"),
        ({"uri": ""}, "has no effect without fs_client_param.uri"),
        ({"user": "", "passwd": ""}, "has no effect without fs_client_param"),
    ],
)
def test_what_cannot_act_is_refused(settings: dict[str, str], message: str) -> None:
    """When the job starts; there is no job afterwards."""
    with pytest.raises(ValueError, match=message) as raised:
        fleet.init(strategy=strategy(**settings))
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(RuntimeError, match="call fleet.init"):
        fleet.barrier_worker()


@pytest.mark.processes
@pytest.mark.observes("fs_client_param.hadoop_bin")
def test_hadoop_is_found_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow finds Hadoop's library and classes by two variables, which the command knows."""
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    monkeypatch.setenv("CLASSPATH", "mine.jar")
    command = tmp_path / "hadoop-3" / "bin" / "hadoop"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "$1,$2,$0.jar"\n')
    command.chmod(0o755)
    made = DistributedStrategy()
    made.fs_client_param = {"uri": "hdfs://host:9000", "hadoop_bin": str(command)}
    fleet.init(strategy=made)

    assert os.environ["HADOOP_HOME"] == str(tmp_path / "hadoop-3")
    assert os.environ["CLASSPATH"] == f"classpath,--glob,{command}.jar"
    fleet.finish()
    assert "HADOOP_HOME" not in os.environ and os.environ["CLASSPATH"] == "mine.jar"

    made.fs_client_param = {"uri": "hdfs://host:9000", "hadoop_bin": str(tmp_path / "none")}
    with pytest.raises(ValueError, match="expected a command that answers"):
        fleet.init(strategy=made)
