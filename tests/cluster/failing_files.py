"""Files that fail on one trainer only: every trainer gets the error, and the job goes on.

``failing_files.py DISK``: a small file system, on which a checkpoint has room and two have none.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import fleet

DISK = Path(sys.argv[1])
COLLECTIVE = "RANK" in os.environ


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 100)).square().mean().backward()
    optimizer.step()


def raised(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__} {error}"
    raise AssertionError(f"expected {kinds}")


def fill() -> None:
    """No byte is left: of the disk, or of what this process may write to one file."""
    if not os.path.ismount(DISK):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        return
    with open(DISK / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def full_disk(saved: str, me: int) -> None:
    """Trainer 0 has no room: both get the OSError that says so, and no file is left."""
    if me == 0:
        fill()
    fleet.barrier_worker()
    for call in (
        lambda: fleet.save(saved),
        lambda: fleet.export(str(DISK / "model.pt")),
        lambda: fleet.export(str(DISK / "model.safetensors")),
    ):
        said = raised(call, OSError)
        print(said)
        assert "No space" in said or "too large" in said, said
        assert me == 0 or "trainer 0" in said, said
    fleet.barrier_worker()
    assert sorted(p.name for p in DISK.iterdir() if p.name != "filler") == ["saved"]


def torn_on_one(own: Path, me: int) -> None:
    """Trainer 1's copy is torn, or missing."""
    if me == 1:
        os.truncate(next(own.glob("tensors-*")), 50)
    print(raised(lambda: fleet.load(str(own)), ValueError))
    if me == 1:
        shutil.rmtree(own)
    print(raised(lambda: fleet.load(str(own)), FileNotFoundError))


def own_paths(me: int) -> None:
    """Each trainer names another path: nothing is written."""
    for call in (
        lambda: fleet.save(f"mine-{me}"),
        lambda: fleet.export(f"mine-{me}.pt"),
    ):
        said = raised(call, ValueError)
        assert "got the path 'mine-0" in said and "the path 'mine-1" in said, said
    assert not list(Path().glob("mine*"))


def interrupted(optimizer: Any, saved: str, me: int) -> None:
    """Control-C while trainer 0 saves."""

    def interrupt(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    if me == 0:
        hook = optimizer.register_state_dict_pre_hook(interrupt)
    print(raised(lambda: fleet.save(saved), KeyboardInterrupt, RuntimeError))
    if me == 0:
        hook.remove()


def main() -> None:
    fleet.init(is_collective=COLLECTIVE)
    me = fleet.worker_index()
    torch.manual_seed(me)
    model = fleet.distributed_model(nn.Linear(100, 100))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    step(model, optimizer)
    saved, own = str(DISK / "saved"), Path(f"own-{me}")
    fleet.save(saved)
    shutil.copytree(saved, own, ignore=shutil.ignore_patterns(".lock"))
    step(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    full_disk(saved, me)
    torn_on_one(own, me)
    own_paths(me)
    interrupted(optimizer, saved, me)

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    step(model, optimizer)
    assert not torch.equal(model.weight, before["weight"])
    assert fleet.load(saved) == 1
    step(model, optimizer)
    assert torch.equal(model.weight, before["weight"])
    fleet.finish()
    print("went on")


main()
