"""A trainer of a cluster with a planned fault: trains a few steps in a mode, saves, and finishes.

::

    python faulty_trainer.py MODE

In the fault's phase trainer 1 strikes itself, or tells the server that is the victim:

=========  =================================================================
starting   before ``fleet.init``; where launch has not started it, when a server
           knows that it will join
joining    it has joined one server, and trainer 0 all of them
stepping   in its third step: gradients are on their way, and not committed
saving     in ``fleet.save``, which trainer 0 has not ended
finishing  before it tells the first server that it has finished
=========  =================================================================
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import fault_marks
import torch
from torch import nn

from pserver.control.control_client import ControlClient
from tests.support.load import patiently
from trainer import fleet

ME = int(os.environ["TRAINER_ID"])
STEPS, FAULT_STEP = 6, 3
OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
TOGETHER = {"lost_trainer": "go_on"}
MODES: dict[str, dict[str, Any]] = {
    "sync": TOGETHER,
    "async": {},
    "half_async": {"half_async": True},
    "staleness": {"staleness": 2},
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 2, "outer_optimizer": OUTER},
    "tables": TOGETHER,
    "mixed": {"modes": {"rows*": "async", "*": "collective"}, **TOGETHER},
}
_here: list[str] = []  # the phases that have come
_joined: list[ControlClient] = []  # where trainer 0 has been let in
_known = threading.Event()  # a server knows that this trainer will join


def phase(name: str) -> None:
    """The phase of this name has come, for the first time."""
    if name in _here:
        return
    _here.append(name)
    if name == fault_marks.PHASE and ME == 1:
        if fault_marks.VICTIM == "trainer":
            fault_marks.strike()
        else:
            fault_marks.ask_to_strike()
            fault_marks.wait_until_struck()


def before(call: Callable[..., Any], name: str, when: Callable[..., bool]) -> Callable[..., Any]:
    """``call``, before which a phase comes."""

    def calling(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            phase(name)
        return call(*arguments, **named)

    return calling


def announced(self: ControlClient, *arguments: Any, **named: Any) -> Any:
    """``ControlClient.announce``, which says that a server knows of this trainer."""
    reply = _announce(self, *arguments, **named)
    _known.set()
    return reply


def joined(self: ControlClient, *arguments: Any, **named: Any) -> Any:
    """``ControlClient.join``, after which the phase comes."""
    reply = _join(self, *arguments, **named)
    if reply.ready and ME == 0:
        _joined.append(self)
        if len(_joined) == len(os.environ["PSERVER_ENDPOINTS"].split(",")):
            fault_marks.say_joined()
    elif reply.ready:
        fault_marks.wait_until_joined()  # whoever is lost now, somebody knows of him
        phase("joining")
    return reply


def embedding() -> nn.Module:
    """A table; imports numba."""
    from trainer import DistributedEmbedding, row_optimizers

    return DistributedEmbedding(4, optimizer=row_optimizers.Adagrad(lr=0.1))


class Net(nn.Module):
    """Two layers, below them the rows of a table where the mode has one."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.rows = embedding() if tables else None
        self.hidden, self.out = nn.Linear(4, 300), nn.Linear(300, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids[:, None] * torch.ones(4) / 40 if self.rows is None else self.rows(ids)
        out: torch.Tensor = self.out(self.hidden(x))
        return out


def digest(model: Net) -> str:
    """Of every bit that the servers hold."""
    with torch.no_grad():
        values = [parameter.flatten() for parameter in model.hidden.parameters()]
        if model.rows is not None:
            values.append(model.rows(torch.arange(40)).flatten())
        return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()


def main(mode: str) -> None:
    """The whole job."""
    torch.manual_seed(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = MODES[mode] is not TOGETHER, MODES[mode]
    if "FAULT_LAUNCHED" in os.environ:
        phase("starting")
    fleet.init(strategy=strategy)
    patiently(_known.wait, fault_marks.PATIENCE)
    phase("starting")
    model = fleet.distributed_model(Net(tables=mode in ("tables", "mixed")))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    communicator = optimizer.communicator
    communicator.close_step = before(
        communicator.close_step, "stepping", lambda *_: optimizer.steps == FAULT_STEP - 1
    )
    optimizer.barrier = before(optimizer.barrier, "saving", lambda name, *_: name == "saved")
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + ME)
        optimizer.zero_grad()
        model(torch.randint(0, 40, (30,), generator=generator)).square().mean().backward()
        optimizer.step()
    fleet.save("checkpoint")
    print("values", digest(model), flush=True)
    fleet.finish()


if __name__ == "__main__":
    _announce, _join = ControlClient.announce, ControlClient.join
    ControlClient.announce = announced  # type: ignore[method-assign]
    ControlClient.join = joined  # type: ignore[method-assign]
    ControlClient.finish = before(ControlClient.finish, "finishing", lambda *_: True)  # type: ignore[method-assign]
    main(sys.argv[1])
