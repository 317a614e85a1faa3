"""A trainer whose script has its own handler of SIGTERM: it sets a flag, and the script saves and
leaves by itself.

::

    python own_handlers.py MODE WHEN

MODE is one of ``MODES``.  WHEN is when the handler is installed: before ``fleet.init``, after it,
or after it as Lightning does, calling the one that it has found.  Trainer 0 gets SIGTERM in step
``AT``, all others none.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainer import fleet

AT, STEPS = 5, 40
MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {"send_queue_size": 1},
    "diloco": {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
}
WAITS = "waits"  # a mode: nobody sends a signal but the one who has started this

came: list[int] = []


def install(calls: bool) -> None:
    """Installs the handler.

    Args:
        calls: it calls the one that it has found.
    """
    found = signal.getsignal(signal.SIGTERM)

    def noted(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if calls and callable(found):
            found(number, frame)

    signal.signal(signal.SIGTERM, noted)


def main(mode: str, when: str) -> None:
    """Trains until a trainer has got the signal, saves, and finishes."""
    if when == "before":
        install(False)
    strategy = fleet.DistributedStrategy()
    configs = MODES.get(mode)
    strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(torch.nn.Linear(4, 4))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if when != "before":
        install(when == "calling")
    step = stopped = 0
    while not stopped and (mode == WAITS or step < STEPS):
        step += 1
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if step == AT:
            print("trains", flush=True)
        if step == AT and fleet.worker_index() == 0 and mode != WAITS:
            os.kill(os.getpid(), signal.SIGTERM)
        stopped = int(fleet.all_reduce(torch.tensor(float(bool(came))), op="max").item())
    fleet.save("saved")
    fleet.finish()
    whole = Path("saved/checkpoint.json").exists()
    print(f"left after {AT if step == AT else 'some'} of {step} steps, saved {whole}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
