"""One trainer of the documentation's nccl2 example: python nccl2_example.py TRAINER_ID ENDPOINTS
RESULTS

It takes STEPS steps and saves its parameters.  Then trainer 1 dies without a word, and trainer 0
writes down what it is told.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ParallelExecutor
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture

STEPS = 4
TRAINERS = 2


def model_and_data() -> tuple[nn.Module, list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """The model as every trainer starts it, and step by step the batches of all trainers."""
    torch.manual_seed(5)
    return nn.Linear(13, 1), [
        [(torch.randn(4, 13), torch.randn(4, 1)) for _ in range(TRAINERS)] for _ in range(STEPS)
    ]


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def wait_for(file: Path) -> None:
    """Until another process has written it."""
    end = time.monotonic() + 30.0
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


def main(trainer_id: int, trainer_endpoints: str, results: str) -> None:
    torch.set_num_threads(1)
    model, data = model_and_data()
    sgd_optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    capture(model, step, sgd_optimizer, data[0][0])
    # nccl2 mode
    trainer_num = TRAINERS
    config = DistributeTranspilerConfig()
    config.mode = "nccl2"
    t = DistributeTranspiler(config=config)
    t.transpile(
        trainer_id=trainer_id,
        trainers=trainer_endpoints,
        current_endpoint=trainer_endpoints.split(",")[trainer_id],
    )
    exe = ParallelExecutor(
        use_cuda=False, loss_name="loss", num_trainers=trainer_num, trainer_id=trainer_id
    )
    for batches in data:
        exe.run(fetch_list=["loss"], feed=batches[trainer_id])
    torch.save(model.state_dict(), f"{results}/{trainer_id}.pt")
    if trainer_id == 1:
        wait_for(Path(results) / "0.pt")  # trainer 0 may still read what this one has sent
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        exe.run(feed=data[0][0])
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)
    exe.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
