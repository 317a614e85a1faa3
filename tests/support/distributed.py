"""A captured program, and what a transpiler makes of it: what the tests of distribute share."""

from typing import Any

import torch
from torch import Tensor, nn

from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.plan.plan import Plan
from transpiler.program import Program

ONE, TWO, THREE = "h:1", "h:1,h:2", "h:1,h:2,h:3"


class Net(nn.Module):
    """A sliced weight, biases, running statistics, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        result: Tensor = self.out(self.norm(self.fc(x))) * self.frozen
        return result


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The training step."""
    return nn.functional.cross_entropy(model(x), y)


def captured(clip: Any = None, lr: float = 0.1) -> tuple[Program, Program, Net]:
    """Single-node programs: Adam with two groups, of which the second has no gradient."""
    torch.manual_seed(0)
    model = Net()
    used = [
        parameter
        for name, parameter in model.named_parameters()
        if name not in ("unused", "frozen")
    ]
    optimizer = torch.optim.Adam([{"params": used}, {"params": [model.unused], "lr": 0.5}], lr=lr)
    program, startup = capture(
        model, step, optimizer, (torch.randn(6, 8), torch.randint(0, 2, (6,))), grad_clip=clip
    )
    return program, startup, model


Single = tuple[Program, Program, Net]


def transpiled(
    single: Single, pservers: str = TWO, trainers: int = 2, trainer_id: int = 0, **settings: Any
) -> DistributeTranspiler:
    """A transpiler that has transpiled, with small slices; ``sync_mode`` goes to transpile, the
    rest to the configuration.
    """
    sync_mode = settings.pop("sync_mode", None)
    transpiler = DistributeTranspiler(
        DistributeTranspilerConfig(**{"min_block_size": 6, **settings})
    )
    transpiler.transpile(trainer_id, single[0], pservers, trainers, sync_mode, single[1])
    return transpiler


def plan_in(program: Program) -> Plan:
    """The plan that a program carries."""
    assert program.deployment is not None
    return program.deployment.plan


def types(program: Program, block: int = 0) -> list[str]:
    """The op types of a block, without compute."""
    return [
        op.type for op in program.blocks[block].ops if not op.type.startswith(("aten.", "sym."))
    ]


def programs_of(transpiler: DistributeTranspiler, pservers: str = TWO) -> list[Program]:
    """Every program of the job."""
    pairs = [transpiler.get_pserver_programs(endpoint) for endpoint in pservers.split(",")]
    return [
        transpiler.get_trainer_program(),
        transpiler.get_startup_program(),
        *(p for pair in pairs for p in pair),
    ]
