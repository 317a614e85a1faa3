"""Plans and stages of a hybrid model: where it is cut, and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.hybrid_nets import PLAN, Net, batches
from trainer.hybrid import device_guard
from trainer.hybrid.pipeline import stages_of
from trainer.hybrid.tensor import planned


@pytest.mark.parametrize(
    ("plan", "degree", "words"),
    [
        (PLAN, 3, "blocks.0.query: out_features 16 does not divide evenly by mp_degree 3"),
        ({"head": "colwise"}, 8, "head: out_features 12 does not divide evenly"),
        ({"*.up": "colwise", "*.nothing": "rowwise"}, 2, r"'\*.nothing' matches no module"),
        ({"*.up": "columns"}, 2, "expected one of 'colwise'"),
        ({"*.norm": "colwise"}, 2, "cuts a Linear or an Embedding, got LayerNorm"),
        ({"*.query": "colwise"}, 8, "blocks.0: num_heads 4 does not divide evenly by mp_degree 8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, str], degree: int, words: str) -> None:
    """Widths and heads that do not divide, patterns that match nothing, words that mean nothing."""
    with pytest.raises(ValueError, match=words):
        planned(Net(), plan, degree)


class Guarded(Net):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with device_guard("gpu:0"):
            h = self.blocks[0](self.symbols(x))
        with device_guard("gpu:1"):
            moved = self.places(places)
            middle = self.blocks[1](h + moved)
        with device_guard("gpu:2"):
            return self.head(middle + h)


def test_stages_are_marked_by_names_or_by_device_guard() -> None:
    """Stages one after the other compute what the model does; values skip stages; each parameter is
    in one.
    """
    x, places, _ = batches(1)[0]
    for model, begins, inputs in (
        (Net(), ["blocks.1", "head"], [("x", "places"), (), ()]),
        (Guarded(), [], [("x",), ("places",), ()]),
    ):
        stages = stages_of(model, begins, 3)
        assert [stage.inputs for stage in stages] == inputs
        given = {"x": x, "places": places}
        value: Any = ()
        for stage in stages:
            value = value if isinstance(value, tuple) else (value,)
            value = stage.module(*value, **{name: given[name] for name in stage.inputs})
        assert torch.equal(value, model(x, places))
        names = [name for stage in stages for name, _ in stage.module.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


class Backwards(Net):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with device_guard(1):
            h = self.symbols(x)
        with device_guard(0):
            return self.head(h)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.symbols.weight


class Branches(Net):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, places) if x.sum() > 0 else super().forward(x, places)


@pytest.mark.parametrize(
    ("model", "begins", "words"),
    [
        (Net(), ["blocks.7"], "no module 'blocks.7'"),
        (Net(), ["head", "blocks.1"], "in the order blocks.1, head"),
        (
            Net(),
            ["blocks.1"],
            r"pp_degree 3: expected stages 0 to 2, got 0, 1 by stages=\['blocks.1'\]",
        ),
        (Net(), [], "got 0 by device_guard"),
        (Backwards(), [], "belongs to stage 0, and follows an op that belongs to stage 1"),
        (Tied(), ["blocks.1", "head"], "'symbols.weight' is used in stages 0 and 2"),
        (Branches(), ["blocks.1", "head"], "cannot be traced with torch.fx"),
    ],
)
def test_stages_that_cannot_be_are_refused(model: nn.Module, begins: list[str], words: str) -> None:
    """The message says what the model does instead."""
    with pytest.raises(ValueError, match=words):
        stages_of(model, begins, 3)


def test_device_guard_takes_a_stages_number() -> None:
    """A number, alone or after a colon."""
    with pytest.raises(ValueError, match="expected a stage's number"), device_guard("gpu"):
        pass
