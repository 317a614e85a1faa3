"""A small transformer that is divided in every direction: its plan, its batches, its strategy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from transpiler.strategy.strategy import DistributedStrategy

WIDTH, HEADS, TIME, SYMBOLS = 16, 4, 8, 12


PLAN = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}


class Block(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.head_size = heads, WIDTH // heads
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # softmax does not see it: its gradient would be rounding errors
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = (
            part(x).view(batch, time, -1, self.head_size).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, -1))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A transformer that is told its positions."""

    def __init__(self, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        h = self.symbols(x) + self.places(places)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """16 sequences each: symbols, positions, what comes next."""
    source = torch.Generator().manual_seed(4)
    text = [torch.randint(0, SYMBOLS, (16, TIME + 1), generator=source) for _ in range(count)]
    return [
        (
            x[:, :-1].contiguous(),
            torch.arange(TIME).expand(16, -1).contiguous(),
            x[:, 1:].contiguous(),
        )
        for x in text
    ]


def strategy_of(
    order: Any = None, micro: int = 2, in_update: bool = False, **degrees: int
) -> DistributedStrategy:
    """These degrees; ``in_update``: replicas reduce there."""
    strategy = DistributedStrategy()
    if in_update:
        strategy.sharding, strategy.sharding_configs = True, {"pp_allreduce_in_optimize": True}
    configs: dict[str, Any] = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    strategy.hybrid_configs = configs | ({"order": order} if order else {})
    if degrees.get("pp", 1) > 1 or micro != 2:
        strategy.pipeline_configs = {"accumulate_steps": micro}
    return strategy
