"""The same training as ``digits.py``, as a program: captured once, transpiled for this trainer, run
step by step.

The servers' programs need not be made here: trainer 0 installs them.  ``transpiler_by_hand.py``
shows both roles.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pserver import DistributeTranspiler, Executor, capture, fleet
from trainer.examples.display import Display


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One batch's loss: the captured function."""
    return F.cross_entropy(model(images), labels)


def train(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], epochs: int) -> None:
    """Trains ``model``: its tensors are the program's variables."""
    images, labels = next(iter(loader))
    program, startup = capture(
        model, step, torch.optim.Adam(model.parameters(), lr=2e-3), (images, labels)
    )
    if endpoints := ",".join(fleet.server_endpoints()):
        transpiler = DistributeTranspiler()
        transpiler.transpile(
            fleet.worker_index(), program, endpoints, fleet.worker_num(), startup_program=startup
        )
        program, startup = transpiler.get_trainer_program(), transpiler.get_startup_program()
    executor = Executor(device=str(images.device))
    executor.run(startup)
    display = Display(epochs, executor.transport)
    for _ in range(epochs):
        for images, labels in fleet.shard(loader, progress=display.live):
            (loss,) = executor.run(program, feed=(images, labels), fetch_list=["loss"])
            display.step(loss, len(images))
        display.epoch()
    executor.close()
