"""A process of servers steps every optimizer without torch's compiler, and has it when it asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pserver.service.eager_only import without_compiler

without_compiler()
import torch
from transpiler.ir.rules import RULES, Rule, make

real = "torch._dynamo.eval_frame"
for name in RULES:
    optimizer = make(Rule(name, {"lr": 0.1}), [p := torch.ones(4)])
    p.grad = torch.ones(4)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert real not in sys.modules, name
print(len(RULES), "optimizers")
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(), real in sys.modules)
import torch._dynamo.config
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.__name__)
"""


@pytest.mark.processes
def test_optimizers_step_without_the_compiler_and_a_script_may_compile() -> None:
    """A process of its own, in which nothing has imported the compiler."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )

    assert run.returncode == 0, run.stderr
    optimizers, compiled, module = run.stdout.splitlines()
    assert int(optimizers.split()[0]) > 10
    assert compiled == "2.0 True" and module == "True torch._dynamo"
