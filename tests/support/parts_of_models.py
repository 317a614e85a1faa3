"""A collective job's model that a script calls as a whole, or a part of it by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from trainer import fleet


class Parts(nn.Module):
    """A model with another method than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """What a forward does."""
        out: torch.Tensor = self.layer(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def whole_and_part() -> None:
    """A step with the model as a whole, a second one with the same gradients, one without any; then
    one with a part of it, which raises.
    """
    fleet.init(is_collective=True)
    model = fleet.distributed_model(Parts())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((2, 4), 1.0 + dist.get_rank())
    for _ in range(2):
        model(x).mean().backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    mine = model.layer.weight.detach().clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both), both
    with torch.no_grad():
        model(x)  # leads to no gradient
    model.encode(x).mean().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "call the model itself, model(...), not its layers" in str(error), error
        assert torch.equal(model.layer.weight, mine)
    else:
        raise AssertionError("the step was taken")
    optimizer.zero_grad()
    fleet.finish()
