"""The whole life of a model in programs, in parts that can be processes of their own.

::

    python -m tests.support.lives begins  MODEL MODE FOLDER    trains on 2 servers, and saves
    python -m tests.support.lives goes_on MODEL MODE FOLDER    on 3: resumes, trains, evaluates
    python predict.py                                          in FOLDER/served: with the file alone

Each leaves what it has computed in FOLDER.  :func:`alone` is the same life in ordinary torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.life_models import MODELS, Batch, Step, predicting
from trainer import DistributedEmbedding, Executor, save_inference_model
from transpiler import DistributedStrategy, DistributeTranspiler, capture
from transpiler.ir.table_ops import is_sparse

ROOT = Path(__file__).parents[2]
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
batch = load_file("batch.safetensors")
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


def made(name: str, mode: str, seed: int = 7) -> tuple[nn.Module, Step, Any, Any, list[Batch]]:
    """A model, its step, its optimizer and schedule, and its batches: one more than it takes
    steps, to be evaluated on.

    In mode k-step rows have a rule without states: those that a trainer steps by itself are in no
    checkpoint.
    """
    torch.manual_seed(seed)
    model, step, optimizer_of, batch = MODELS[name]()
    if mode == "k-step" and tables_of(model):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    else:
        optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=TOTAL)
    torch.manual_seed(70)
    data = [batch(4 + number % 3) for number in range(TOTAL + 1)]
    return model, predicting(model, step), optimizer, schedule, data


def exactly(model: nn.Module) -> Any:
    """While it lasts torch computes recurrent layers as captured ones are."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.mkldnn.flags(enabled=not recurrent)


def alone(name: str, mode: str) -> Found:
    """By the ordinary loop."""
    model, step, optimizer, schedule, data = made(name, mode)
    found: Found = {}
    with exactly(model):
        for number, batch in enumerate(data[:TOTAL]):
            torch.manual_seed(number)
            loss = step(model, *batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            found[f"loss {number}"] = loss.detach()
        model.eval()
        with torch.no_grad():
            evaluated = step(model, *data[TOTAL])
    return {**found, **{key: evaluated[key].clone() for key in ("loss", "prediction")}}


def run(name: str, mode: str, folder: Path, endpoints: str, resumes: bool, seed: int = 7) -> None:
    """One half of a life, in programs: it trains and saves, or resumes, trains, evaluates and saves
    for inference.
    """
    model, step, optimizer, schedule, data = made(name, mode, seed)
    configs = MODES[mode](model)
    strategy = None if configs is None else DistributedStrategy()
    if strategy is not None:
        strategy.a_sync, strategy.a_sync_configs = True, configs
    with exactly(model), Executor() as executor:
        single, startup = capture(model, step, optimizer, data[0], scheduler=schedule)
        transpiler = DistributeTranspiler()
        transpiler.transpile(0, single, endpoints, 1, startup_program=startup, strategy=strategy)
        main = transpiler.get_trainer_program()
        executor.run(transpiler.get_startup_program())
        at, found = str(folder / "checkpoint"), {}
        if resumes:
            assert executor.load(at, main, schedule) == HALF
        first = HALF if resumes else 0
        for number in range(first, first + HALF):
            torch.manual_seed(number)
            (found[f"loss {number}"],) = executor.run(main, data[number], ["loss"])
            executor.flush()
            schedule.step()
        if resumes:
            test = main.clone(for_test=True)
            outputs = ["loss", "prediction"]
            found.update(zip(outputs, executor.run(test, data[TOTAL], outputs), strict=True))
            save_for_inference(folder / "served", executor, single, data[TOTAL])
        else:
            executor.save(at, main, schedule)
    save_file(found, folder / f"{'goes_on' if resumes else 'begins'}.safetensors")


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
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / "served" / package, ignore=ignored)
    command = [sys.executable, "predict.py"]
    subprocess.run(command, cwd=folder / "served", check=True, timeout=120)
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
