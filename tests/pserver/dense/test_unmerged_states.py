"""Promises about the states of servers that whole tensors do not have."""

from __future__ import annotations

import torch

from pserver.dense.slices import unmerged_states

SLICES = [{"exp_avg": f"w@exp_avg.{at}", "step": f"w@step.{at}"} for at in range(3)]


def held(*steps: float) -> dict[str, torch.Tensor]:
    found = {own["exp_avg"]: torch.ones(2) for own in SLICES}
    return found | {
        own["step"]: torch.tensor(each) for own, each in zip(SLICES, steps, strict=True)
    }


def test_a_count_is_named_where_it_is_not_that_of_the_first_slice() -> None:
    """Nothing where all have taken the same steps; a state that no step has made is left out."""
    assert unmerged_states(SLICES, held(7.0, 7.0, 7.0), outer=False) == {}
    found = unmerged_states(SLICES, held(7.0, 5.0, 7.0), outer=False)
    assert {name: float(each) for name, each in found.items()} == {"server/w@step.1": 5.0}
    later = {name: each for name, each in held(7.0, 5.0, 7.0).items() if not name.endswith("0")}
    assert unmerged_states(SLICES, later, outer=False).keys() == {
        "server/w@step.1",
        "server/w@step.2",
    }


def test_all_of_an_outer_optimizer_are_named() -> None:
    """The script's own optimizer may have states of the same names."""
    whole = held(7.0, 7.0, 7.0)
    found = unmerged_states(SLICES, whole, outer=True)

    assert found == {f"server/{name}": each for name, each in whole.items()}
