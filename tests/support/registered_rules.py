"""Rules that a user registers, and a small job that they train."""

from __future__ import annotations

from typing import Any

import torch

from transpiler import register_rule

State = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, State]


@register_rule(
    state=["exp_avg", "scale"], scalars=["step"], hparams={"lr": 0.05, "betas": (0.9, 0.99)}
)
def Lion(param: torch.Tensor, grad: torch.Tensor, state: State, hparams: Any) -> Result:
    """Lion with a smooth sign, whose ``sigmoid`` and ``pow`` round otherwise at a tensor's end;
    ``scale`` is the old ``exp_avg``.
    """
    first, second = hparams["betas"]
    step = state["step"] + 1
    mixed = first * state["exp_avg"] + (1 - first) * grad
    update = torch.sign(mixed) * torch.sigmoid(mixed.abs()) * mixed.abs().pow(0.7)
    new = param - hparams["lr"] / (1 - second**step).sqrt() * update
    exp_avg = second * state["exp_avg"] + (1 - second) * grad
    return new, {"exp_avg": exp_avg, "scale": state["exp_avg"], "step": step}


@register_rule(scalars=["largest"], hparams={"lr": 0.05}, norms=True)
def Lars(param: torch.Tensor, grad: torch.Tensor, state: State, hparams: Any) -> Result:
    """Layer-wise rates: the norm of a parameter over that of its gradient."""
    ratio = torch.linalg.vector_norm(param) / (torch.linalg.vector_norm(grad) + 1e-6)
    largest = torch.maximum(state["largest"], grad.abs().max())
    return param - hparams["lr"] * ratio * grad, {"largest": largest}
