"""The examples in the docstrings of the calls that scripts make: each runs in a process that trains
alone.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer
from trainer import DataParallel, fleet
from trainer.collective.world import leave_parallel_env
from transpiler import ParamAttr, capture, parameter_groups

# what needs no example: data, whose arguments say all, and the original's life-cycle calls
WITHOUT = {
    *("Constant", "Normal", "Uniform", "CountFilterEntry", "ProbabilityEntry", "ShowClickEntry"),
    *("asp", "row_optimizers", "Executor", "DistributedStrategy", "Role", "CloudRoleMaker"),
    *("init_worker", "init_server", "run_server", "stop_worker"),
    "local_cluster",  # starts processes: tests/cluster/test_local_cluster.py, docs/notebook.md
}


def calls() -> dict[str, Any]:
    """What scripts call, by name; the calls that rooms give to fleet are their rooms' own."""
    ours = {name: getattr(trainer, name) for name in trainer.__all__}
    ours |= {name: getattr(fleet, name) for name in fleet.__all__}
    masks = ("set_excluded_layers", "reset_excluded_layers")
    ours |= {name: getattr(trainer.asp, name) for name in masks}
    return {
        name: call
        for name, call in ours.items()
        if name not in WITHOUT and not call.__module__.startswith("trainer.job")
    }


def examples(call: Any) -> list[str]:
    """The code of each ``Example::`` in a docstring."""
    text = inspect.getdoc(call) or ""
    found = re.findall(r"^Example::\n\n((?:(?: {4}.*)?\n)+)", text + "\n", re.MULTILINE)
    return [textwrap.dedent(code) for code in found]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What an example may use without importing it."""
    monkeypatch.chdir(tmp_path)
    yield {
        **{name: getattr(trainer, name) for name in trainer.__all__},
        **{"torch": torch, "nn": nn, "DataLoader": DataLoader, "fleet": fleet, "capture": capture},
        **{"ParamAttr": ParamAttr, "parameter_groups": parameter_groups},
        **{"Slot": fleet.Slot, "Net": lambda: nn.Linear(4, 2), "net": nn.Linear(4, 2)},
    }
    fleet.finish()
    leave_parallel_env()


@pytest.mark.parametrize("name", [name for name in calls() if name != "spawn"])
def test_the_example_runs(name: str, names: dict[str, Any]) -> None:
    """As it stands, alone."""
    found = examples(calls()[name])
    if name == "fused_allreduce_gradients":
        names["model"] = DataParallel(nn.Linear(4, 2))

    assert found, f"{name} has no example"
    for code in found:
        exec(compile(code, name, "exec"), names)
