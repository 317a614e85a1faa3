"""The transpiler by hand, role by role, without fleet and ``pserver launch``.

Start one process for each role; each captures and transpiles the same program and runs its own
part::

    export PSERVER_ENDPOINTS=127.0.0.1:6174,127.0.0.1:6175 TRAINERS=2
    script=trainer/examples/transpiler_by_hand.py
    TRAINING_ROLE=PSERVER CURRENT_ENDPOINT=127.0.0.1:6174 python $script &
    TRAINING_ROLE=PSERVER CURRENT_ENDPOINT=127.0.0.1:6175 python $script &
    TRAINING_ROLE=TRAINER TRAINER_ID=1 python $script &
    TRAINING_ROLE=TRAINER TRAINER_ID=0 python $script

Without TRAINING_ROLE the captured program runs as it is, single-node.  --device cuda computes on a
GPU, --print shows the programs.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from pserver import DistributeTranspiler, Executor, capture
from trainer.environment.environment import CloudRoleMaker, Role

parser = argparse.ArgumentParser(
    description="Fits a straight line, with the roles given by the environment.",
    allow_abbrev=False,
)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--device", default="cpu")
parser.add_argument(
    "--print", action="store_true", dest="show", help="print this role's programs first"
)


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One batch's loss."""
    return F.mse_loss(model(x), y)


def batch(number: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of y = 3 x0 - 2 x1 + 1."""
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(number))
    return x.to(device), (x @ torch.tensor([[3.0], [-2.0]]) + 1).to(device)


if __name__ == "__main__":
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    main, startup = capture(model, step, optimizer, batch(0, arguments.device))
    # by the environment; a variable that is missing is an error that names it
    me = CloudRoleMaker()
    transpiler, executor = DistributeTranspiler(), Executor(device=arguments.device)
    if me.role is not Role.SINGLE:
        transpiler.transpile(
            me.trainer_id, main, ",".join(me.server_endpoints), me.trainers, startup_program=startup
        )
    if me.role is Role.PSERVER:
        main, startup = transpiler.get_pserver_programs(me.current_endpoint)
    elif me.role is Role.TRAINER:
        main, startup = transpiler.get_trainer_program(), transpiler.get_startup_program()
    if arguments.show:
        print(startup, main, sep="\n")
    executor.run(startup)  # a trainer receives the parameters here
    if me.role is Role.PSERVER:
        executor.run(main)  # serves until its job ends
    else:
        for number in range(arguments.steps):
            (loss,) = executor.run(
                main,
                feed=batch(number * me.trainers + me.trainer_id, arguments.device),
                fetch_list=["loss"],
            )
        executor.close()
        weights = ", ".join(f"{value:.3f}" for value in model.weight.flatten().tolist())
        print(f"loss {loss.item():.6f}  weight {weights}  bias {model.bias.item():.3f}")
