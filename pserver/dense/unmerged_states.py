"""The states of servers that a checkpoint of whole tensors does not have.

Whole tensors are those of the script's optimizers: the states of an outer optimizer are not among
them, and a number that every slice has, the count of its steps, is there once.  After a server was
lost and has come back, its slices have taken fewer steps than those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PREFIX = "server/"  # in a checkpoint, before the variable's name


def unmerged_states(
    slices: Sequence[Mapping[str, str]], held: Mapping[str, torch.Tensor], outer: bool
) -> dict[str, torch.Tensor]:
    """Those states of one parameter that whole tensors do not have, as a checkpoint names them.

    Args:
        slices: of each slice the variables of its states, by the state's name.
        held: the states that servers have made, by variable.
        outer: they are an outer optimizer's, and the script's has others.
    """
    found: dict[str, torch.Tensor] = {}
    for own in slices:
        for state, variable in own.items():
            tensor = held.get(variable)
            if tensor is not None and (outer or _apart(tensor, held.get(slices[0][state]))):
                found[f"{PREFIX}{variable}"] = tensor
    return found


def _apart(tensor: torch.Tensor, first: torch.Tensor | None) -> bool:
    """Whether a number is not that of the first slice."""
    return tensor.dim() == 0 and (first is None or not torch.equal(tensor, first))
