"""Models of the capture suite, and others, divided over two ranks: trained and evaluated, they are
what one process makes of them.

One process computes the two ranks' parts of a batch one after the other, and steps once for both.
Buffers and frozen parameters are those of a rank's own part; random numbers are seeded by step and
part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.hybrid_nets import strategy_of
from tests.support.models import EIGHT, Batch
from tests.support.reading_models import READING
from tests.support.unusual_models import UNUSUAL
from trainer import (
    group_sharded_parallel,
    hybrid_optimizer,
    hybrid_parallel,
    hybrid_state_dict,
)
from trainer.sharding.units import whole_of

MODELS = {make.__name__: make for make in (*EIGHT, *UNUSUAL, *READING)}
STEPS, SAMPLES = 3, 4
Values = dict[str, Tensor]


def loss_of(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


class _Alone:
    """One process in the place of all ranks."""

    def __init__(self, model: nn.Module, step: Any, make: Any) -> None:
        self.model, self._step = model, step
        self.optimizer = make(model)
        self._own: list[Values] = []

    def train(self, number: int, parts: list[Batch]) -> list[Tensor]:
        """A step; each part's loss."""
        losses = []
        self._own = self._own or [self._state() for _ in parts]
        for rank, part in enumerate(parts):
            self._take(self._own[rank])
            torch.manual_seed(10 * number + rank)
            loss = loss_of(self._step(self.model, *part))
            (loss / len(parts)).backward()
            self._own[rank] = self._state()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def evaluate(self, rank: int, batch: Batch) -> Tensor:
        self._take(self._own[rank])
        return evaluated(self.model, self._step, batch)

    def _members(self) -> list[tuple[dict[str, Any], str]]:
        """Buffers, and parameters that do not train."""
        return [
            (table, name)
            for module in self.model.modules()
            for table in (module._buffers, module._parameters)
            for name, tensor in table.items()
            if tensor is not None and (table is module._buffers or not tensor.requires_grad)
        ]

    def _state(self) -> Values:
        return {
            str(place): table[name].detach().clone()
            for place, (table, name) in enumerate(self._members())
        }

    def _take(self, state: Values) -> None:
        with torch.no_grad():
            for place, (table, name) in enumerate(self._members()):
                value = state[str(place)].clone()
                table[name] = (
                    nn.Parameter(value, False) if isinstance(table[name], nn.Parameter) else value
                )


def evaluated(model: nn.Module, step: Any, batch: Batch) -> Tensor:
    """The loss of a batch in evaluation."""
    model.eval()
    torch.manual_seed(99)
    with torch.no_grad():
        loss = loss_of(step(model, *batch))
    model.train()
    return loss.detach()


def _same(found: Values, alone: nn.Module) -> None:
    expected = dict(alone.named_parameters())
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name].detach(), rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


def _train(
    name: str, divide: Callable[[nn.Module, Any], tuple[nn.Module, Any]], values: Any
) -> None:
    """Trains a model divided over all ranks beside one process."""
    torch.manual_seed(0)
    model, step, make, draw = MODELS[name]()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    data = [[draw(SAMPLES) for _ in range(ranks)] for _ in range(STEPS + 1)]
    alone = _Alone(copy.deepcopy(model), step, make)
    model, optimizer = divide(model, make)
    for number, parts in enumerate(data[:STEPS]):
        expected = alone.train(number, parts)[rank]
        torch.manual_seed(10 * number + rank)
        loss = loss_of(step(model, *parts[rank]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    last = alone.evaluate(rank, data[STEPS][rank])
    torch.testing.assert_close(
        evaluated(model, step, data[STEPS][rank]), last, rtol=1e-5, atol=1e-5
    )
    found = values(model)
    _same({key: found[key] for key, _ in alone.model.named_parameters()}, alone.model)


def train_at_level(name: str, level: str) -> None:
    """At a level of ``group_sharded_parallel``, every tensor sharded."""

    def divide(model: nn.Module, make: Any) -> tuple[nn.Module, Any]:
        options: Any = {"segment_size": 1} if level == "p_g_os" else {}
        model, optimizer, _ = group_sharded_parallel(model, make(model), level, **options)
        return model, optimizer

    _train(
        name, divide, lambda model: {k: whole_of(v.detach()) for k, v in model.named_parameters()}
    )


def train_in_direction(name: str, direction: str) -> None:
    """Hybrid, where ranks have samples of their own; "segments": by ``strategy.sharding``."""

    def divide(model: nn.Module, make: Any) -> tuple[nn.Module, Any]:
        segments = direction == "segments"
        strategy = strategy_of(
            **({} if segments else {"dp": 1} | {direction: dist.get_world_size()})
        )
        strategy.sharding = segments
        model = hybrid_parallel(model, strategy)
        return model, hybrid_optimizer(make(model), model)

    _train(name, divide, hybrid_state_dict)
