"""The whole life of a model in programs, in parts that can be processes of their own.

::

    python -m tests.support.lives begins  MODEL MODE FOLDER    trains on 2 servers, and saves
    python -m tests.support.lives goes_on MODEL MODE FOLDER    on 3: resumes, trains, evaluates
    python predict.py                                          in FOLDER/served: with the file alone

Each leaves what it has computed in FOLDER.  :func:`alone` is the same life in ordinary torch.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support import load
from tests.support.life_models import MODELS, Batch, Step
from trainer import DistributedEmbedding, Executor, save_inference_model
from transpiler import DistributedStrategy, DistributeTranspiler, Program, capture
from transpiler.ir.table_ops import is_sparse

ROOT = Path(__file__).parents[2]
OUTPUTS = ["loss", "prediction"]
HALF, TOTAL = 4, 8  # steps; both are whole numbers of k
MODES: dict[str, Callable[[nn.Module], dict[str, Any] | None]] = {
    "sync": lambda model: None,
    "async": lambda model: {"send_queue_size": 8},
    "k-step": lambda model: {"k_steps": 2},
    "mixed": lambda model: {"modes": mixed(model), "k_steps": 2, "send_queue_size": 8},
}
Found = dict[str, Tensor]

PREDICT = """
import sys, torch, trainer
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
assert trainer.__file__.startswith(sys.path[0]), "of the copy beside this script"
program, feeds, fetches = trainer.load_inference_model("model.program")
# in memory of its own: where a tensor begins can change the last bit of a product
batch = {name: tensor.clone() for name, tensor in load_file("batch.safetensors").items()}
with trainer.Executor() as executor:
    found = executor.run(program, {name: batch[name] for name in feeds}, fetches)
save_file(dict(zip(fetches, found)), "prediction.safetensors")
"""


def tables_of(model: nn.Module) -> list[str]:
    """The names of the tables."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, DistributedEmbedding) or is_sparse(module)
    ]


def mixed(model: nn.Module) -> dict[str, str]:
    """Tables and one parameter async, another k-step, all others sync."""
    tables = tables_of(model)
    first, second, *_ = (
        name
        for name, each in model.named_parameters()
        if each.requires_grad and name.rpartition(".")[0] not in tables
    )
    patterns = [f"{name}*" for name in tables]
    return {**dict.fromkeys((*patterns, first), "async"), second: "geo", "*": "sync"}


class Training(NamedTuple):
    """What one optimizer trains, with its schedule; a model's optimizers step in turn.

    Attributes:
        step: gives "loss" and "prediction".
        inputs: how many of a batch's tensors it takes, from the last one.
        label: of what it computes: " of optimizer 1".
    """

    step: Step
    optimizer: torch.optim.Optimizer
    schedule: Any
    inputs: int
    label: str

    def of(self, batch: Batch) -> Batch:
        """Its part of a batch."""
        return batch[-self.inputs :]


def made(name: str, seed: int = 7) -> tuple[nn.Module, list[Training], list[Batch]]:
    """A model, what trains it, and its batches: one more than it takes steps, to be evaluated
    on.
    """
    torch.manual_seed(seed)
    model, trained, batch = MODELS[name]()
    found = []
    for number, each in enumerate(trained):
        optimizer = each.optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=TOTAL)
        label = f" of optimizer {number}" if number else ""
        found.append(Training(each.step, optimizer, schedule, each.inputs, label))
    torch.manual_seed(70)
    return model, found, [batch(4 + number % 3) for number in range(TOTAL + 1)]


def exactly(model: nn.Module) -> Any:
    """While it lasts torch computes recurrent layers as captured ones are."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.mkldnn.flags(enabled=not recurrent)


def alone(name: str) -> Found:
    """By the ordinary loop."""
    model, trainings, data = made(name)
    found: Found = {}
    with exactly(model):
        for number, batch in enumerate(data[:TOTAL]):
            for each in trainings:
                torch.manual_seed(number)
                loss = each.step(model, *each.of(batch))["loss"]
                each.optimizer.zero_grad()
                loss.backward()
                each.optimizer.step()
                each.schedule.step()
                found[f"loss {number}{each.label}"] = loss.detach()
        model.eval()
        with torch.no_grad():
            for each in trainings:
                evaluated = each.step(model, *each.of(data[TOTAL]))
                for key in OUTPUTS:
                    found[f"{key}{each.label}"] = evaluated[key].clone()
    return found


def run(name: str, mode: str, folder: Path, endpoints: str, resumes: bool, seed: int = 7) -> None:
    """One half of a life, in programs: it trains and saves, or resumes, trains, evaluates and saves
    for inference.
    """
    model, trainings, data = made(name, seed)
    with exactly(model), Executor() as executor:
        singles, transpiler = transpiled(model, mode, trainings, data[0], endpoints)
        mains = transpiler.get_trainer_program()
        for startup in transpiler.get_startup_program():
            executor.run(startup)
        at, found = str(folder / "checkpoint"), {}
        schedules = [each.schedule for each in trainings]
        if resumes:
            assert executor.load(at, mains, schedules) == HALF
        first = HALF if resumes else 0
        for number in range(first, first + HALF):
            for each, main in zip(trainings, mains, strict=True):
                torch.manual_seed(number)
                (loss,) = executor.run(main, each.of(data[number]), ["loss"])
                executor.flush()
                each.schedule.step()
                found[f"loss {number}{each.label}"] = loss
        if resumes:
            for each, main in zip(trainings, mains, strict=True):
                batch = each.of(data[TOTAL])
                for key, value in zip(
                    OUTPUTS, executor.run(main.clone(for_test=True), batch, OUTPUTS), strict=True
                ):
                    found[f"{key}{each.label}"] = value
            last = trainings[-1]
            save_for_inference(folder / "served", executor, singles[-1], last.of(data[TOTAL]))
        else:
            executor.save(at, mains, schedules)
    save_file(found, folder / f"{'goes_on' if resumes else 'begins'}.safetensors")


def transpiled(
    model: nn.Module, mode: str, trainings: list[Training], batch: Batch, endpoints: str
) -> tuple[list[Program], DistributeTranspiler]:
    """The single-node programs, one for each optimizer, and what they were transpiled by."""
    configs = MODES[mode](model)
    strategy = None if configs is None else DistributedStrategy()
    if strategy is not None:
        strategy.a_sync, strategy.a_sync_configs = True, configs
    singles, startups = zip(
        *(
            capture(model, each.step, each.optimizer, each.of(batch), scheduler=each.schedule)
            for each in trainings
        ),
        strict=True,
    )
    transpiler = DistributeTranspiler()
    transpiler.transpile(
        0, list(singles), endpoints, 1, startup_program=list(startups), strategy=strategy
    )
    return list(singles), transpiler


def save_for_inference(folder: Path, executor: Executor, program: Any, batch: Batch) -> None:
    """The model's file, the batch to predict of, and the script that does."""
    feeds = [each.name for each in program.main.variables.values() if each.role.name == "INPUT"]
    folder.mkdir(exist_ok=True)
    save_inference_model(folder / "model.program", feeds, ["prediction"], executor, program)
    save_file(dict(zip(feeds, batch, strict=True)), folder / "batch.safetensors")
    (folder / "predict.py").write_text(PREDICT)


def predicted(folder: Path) -> Tensor:
    """By a process that has the file and the installed packages, and nothing of the training."""
    shutil.rmtree(folder / "checkpoint")
    for package in ("transpiler", "pserver", "trainer"):
        (folder / "served" / package).symlink_to(ROOT / package)
    command = [sys.executable, "predict.py"]
    load.run(command, cwd=folder / "served", check=True, timeout=120)
    return load_file(folder / "served" / "prediction.safetensors")["prediction"]


def main() -> None:
    """One part of a life, as a process with servers of its own."""
    part, name, mode, folder = sys.argv[1:]
    torch.set_num_threads(1)
    resumes = part == "goes_on"
    with ExitStack() as stack:
        running = [
            stack.enter_context(Server(ServerConfig(keep_failed_seconds=0.0)))
            for _ in range(3 if resumes else 2)
        ]
        endpoints = ",".join(server.endpoint for server in running)
        run(name, mode, Path(folder), endpoints, resumes, seed=8 if resumes else 7)


if __name__ == "__main__":
    main()
