"""Importing the packages changes nothing in torch, and brings no more than is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

STATE = """
import sys, torch

def state():
    optim, module = sys.modules["torch.optim.optimizer"], sys.modules["torch.nn.modules.module"]
    tables = {
        f"{each.__name__}.{name}": list(value)
        for each in (optim, module)
        for name, value in vars(each).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    assert len(tables) >= 10, tables
    return tables | {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "modes": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "precision": torch.get_float32_matmul_precision(),
    }
"""
IMPORTED = (
    STATE
    + """
import importlib, pkgutil
from torch.library import Library

registered, before, make = set(), state(), Library.__init__

def noted(self, ns, *rest):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(("torch.library", "torch._library")):
        frame = frame.f_back
    registered.add((frame.f_globals["__name__"].partition(".")[0], ns))
    make(self, ns, *rest)

Library.__init__ = noted
for package in ("trainer", "transpiler", "pserver"):
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    for name in [each.name for each in found]:
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:  # of an extra that is not installed
                assert error.name in ("accelerate", "lightning", "transformers"), error
assert state() == before, (before, state())
ours = {(package, ns) for package, ns in registered if package not in ("torch", "transformers")}
assert ours == {("transpiler", "pserver")}, ours
"""
)
FRAMEWORKS = ("lightning", "transformers", "accelerate", "torchmetrics", "ray", "sklearn")
# by import statement, what it must not bring: each takes long, and comes with the first name, call
# or kind of process that needs it
LATE = {
    "import trainer": ("grpc", "prometheus_client", "pserver.client", "pserver.service"),
    "from trainer import fleet": (
        "grpc_reflection.v1alpha",
        "pserver.job",
        "pserver.lane",
        "pserver.launcher.processes",
        "pserver.service",
    ),
    "from pserver import fleet, DistributedEmbedding, DistributedStrategy": ("pserver.service",),
}
ALWAYS_LATE = ("numba", "numpy.typing", "pyarrow", "rich", "torch._dynamo", "yaml", *FRAMEWORKS)
DENSE = """
import subprocess, sys, torch
from trainer import fleet
command = [sys.executable, "-m", "pserver", "serve", "--once"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
endpoint = server.stdout.readline().split()[3]
fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[endpoint]))
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
fleet.finish()
assert server.wait(20) == 0
print(*(name for name in ("numba", "lightning", "transformers") if name in sys.modules))
"""
PROXIES = (
    STATE
    + """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from trainer.embedding.proxy import ProxyParameter

before, barrier = state(), Barrier(8)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda _: (barrier.wait(), ProxyParameter()), range(8)))
changed = {name: len(value) for name, value in state().items() if value != before[name]}
print(sorted(changed.items()))
"""
)


def run(script: str) -> str:
    """What a script prints in a process of its own, which has imported nothing of ours."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_importing_every_module_leaves_torch_as_it_was() -> None:
    """No hook, thread count, default or mode changes; ops are registered in our namespace alone."""
    run(IMPORTED)


@pytest.mark.processes
@pytest.mark.parametrize("statement", LATE)
def test_an_import_brings_only_what_it_needs(statement: str) -> None:
    """No compiler, no server, no display and no framework: public names take 0.3 s beside torch."""
    late = (*LATE[statement], *ALWAYS_LATE)

    assert run(f"import torch, sys\n{statement}\nprint(*({set(late)} & set(sys.modules)))") == ""


@pytest.mark.processes
def test_a_job_without_tables_brings_no_compiler() -> None:
    """numba takes 80 MB and a second."""
    assert run(DENSE) == ""


@pytest.mark.processes
def test_the_first_proxy_parameter_registers_the_step_hooks_once() -> None:
    """Two hooks of optimizers, however many threads make one at the same time."""
    assert run(PROXIES) == str(
        [
            ("torch.optim.optimizer._global_optimizer_post_hooks", 1),
            ("torch.optim.optimizer._global_optimizer_pre_hooks", 1),
        ]
    )
