"""Promises about docs/concepts/walks.md: it names what there is, and what a step really calls."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.pages import ROOT
from tests.support.sources import module_of, modules_graph
from trainer import DistributedEmbedding, fleet, row_optimizers
from transpiler import DistributedStrategy

PAGE = ROOT / "docs" / "concepts" / "walks.md"
NAMED = re.compile(r"`((?:transpiler|pserver|trainer)/[\w/]+\.py)(?::\s+([\w.]+))?`")
# the trainer's half of a step: each file calls what it imports, or its imports do
HALF = ("trainer/optimizer.py", "trainer/gradients/", "trainer/communicator/", "trainer/senders/")
HALF += ("pserver/client/",)
UP = {  # but for what a request is given for the memory of its values, for news, and by interfaces
    "trainer/senders/sync_lane.py: SyncSender._destination",
    "trainer/senders/served_rows.py: _into.<locals>.destination",
    "trainer/senders/live_trainers.py: LiveTrainers.learn",
    "trainer/senders/served_rows.py: WrittenTables.close",
    "trainer/senders/served_rows.py: WrittenTables.forget",
}
Servers = Callable[[int], str]


def named(text: str) -> list[tuple[str, str]]:
    """The files that a text names, each with a class or function of it, or ""."""
    return NAMED.findall(text)


def defined(file: str) -> set[str]:
    """The classes, functions and methods of a file."""
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def test_every_file_and_name_of_the_walks_is_there() -> None:
    """Each file exists, and defines the class, function or method that stands behind it."""
    places = named(PAGE.read_text(encoding="utf-8"))

    assert len(places) > 80
    assert [file for file, _ in places if not (ROOT / file).exists()] == []
    assert [f"{file}: {name}" for file, name in places if name and name not in defined(file)] == []


class Calls:
    """The functions of ours that are called while ``on`` is set.

    Attributes:
        seen: each of them.
    """

    def __init__(self) -> None:
        self.on = threading.Event()
        self.seen: set[str] = set()
        self._pairs: set[tuple[str, str, str]] = set()  # a call, its file, and the caller's

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Notes a call, as ``sys.setprofile`` reports it."""
        file = file_of(frame)
        if event == "call" and self.on.is_set() and file:
            name = f"{file}: {frame.f_code.co_qualname}"
            self.seen.add(name)
            self._pairs.add((name, file, file_of(frame.f_back)))

    @property
    def up(self) -> set[str]:
        """Those of the trainer's half that a file below theirs calls."""
        return {
            name
            for name, file, caller in self._pairs
            if file != caller
            and file.startswith(HALF)
            and caller.startswith(HALF)
            and module(file) not in below(module(caller))
        }


def file_of(frame: FrameType | None) -> str:
    """The file of a function of ours, from the root; "": it is none."""
    file, root = "" if frame is None else frame.f_code.co_filename, f"{ROOT}/"
    return file.removeprefix(root) if file.startswith(root) else ""


def module(file: str) -> str:
    """The module of a file."""
    return module_of(ROOT / file)


@functools.cache
def below(name: str) -> frozenset[str]:
    """The modules that a module imports, and those that they import."""
    own = modules_graph()[name]
    return frozenset(own).union(*(below(other) for other in own))


@contextmanager
def calls() -> Iterator[Calls]:
    """Notes calls, in whichever thread that begins in this context, and in this one."""
    found = Calls()

    threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Net(nn.Module):
    """A table, small layers, and one that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = DistributedEmbedding(4, optimizer=row_optimizers.Adagrad(lr=0.1))
        self.layers = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.rows(ids))
        return out


def test_a_step_calls_all_that_the_walks_name(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync step of two servers over TCP and a barrier go through every function of the walks, and
    no file of the trainer's half calls one above it.
    """
    monkeypatch.setenv("PSERVER_TRANSPORT", "tcp")
    strategy = DistributedStrategy()
    strategy.a_sync = False
    with calls() as found:
        endpoints = servers(2).split(",")
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
        fleet.init(role, strategy=strategy)
        model = fleet.distributed_model(Net())
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
        for step in range(2):
            if step == 1:  # the first one makes buffers and rows
                found.on.set()
            model(torch.arange(32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fleet.barrier_worker()
        found.on.clear()
        fleet.finish()
    walks = PAGE.read_text(encoding="utf-8").partition("## Where the walks differ")[0]
    # the thread of a stream has been in there since before the step
    before = "pserver/service/tensors.py: TensorService.serve"
    expected = {f"{file}: {name}" for file, name in named(walks) if name} - {before}

    assert sorted(expected - found.seen) == []
    assert sorted(found.up - UP) == []
