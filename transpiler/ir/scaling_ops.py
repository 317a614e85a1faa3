"""The ops of a program's loss scale, named as the original names them: schemas and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from transpiler.ir.graph import Op, Ref
from transpiler.ir.loss_scale import LossScale, ScaleCourse
from transpiler.ir.schema import COUNT, NUMBER, VARIABLE, VARIABLES, ArgumentKind, Parameter, Schema
from transpiler.ir.sparse_rows import SparseRows, on_rows, rows_of


def _schema(results: int | None, least: int, **kinds: ArgumentKind) -> Schema:
    parameters = {name: Parameter(kind) for name, kind in kinds.items()}
    return Schema(MappingProxyType(parameters), results, least)


CHECK, UPDATE = "check_finite_and_unscale", "update_loss_scaling"


SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        # x without the loss scale; the last result is whether some element of x is not finite, and
        # then no update is made
        CHECK: _schema(None, 2, x=VARIABLES, scale=VARIABLE),
        # gives scale, good_steps and bad_steps their next values
        UPDATE: _schema(
            3,
            0,
            found_infinite=VARIABLE,
            scale=VARIABLE,
            good_steps=VARIABLE,
            bad_steps=VARIABLE,
            incr_every_n_steps=COUNT,
            decr_every_n_nan_or_inf=COUNT,
            incr_ratio=NUMBER,
            decr_ratio=NUMBER,
        ),
    }
)


def found_infinite(ops: Sequence[Op]) -> str:
    """The variable that says whether these ops' updates are skipped; "" where they never are."""
    return next((op.outputs[-1] for op in ops if op.type == CHECK), "")


def unscaled_from(op: Op) -> dict[str, str]:
    """The scaled gradient of each gradient that a check gives, by the gradient's name."""
    given = op.arguments["x"]
    assert isinstance(given, tuple), "the catalogue checks it"
    scaled = [each.name for each in given if isinstance(each, Ref)]
    return dict(zip(op.outputs[:-1], scaled, strict=True))


def check_finite_and_unscale(
    op: Op, x: Sequence[Tensor | SparseRows], scale: Tensor
) -> list[Tensor | SparseRows]:
    """The gradients divided by the scale; at the end whether one is not finite, bool []."""
    inverse = scale.double().reciprocal().float()
    norm = get_total_norm([rows_of(each) for each in x], float("inf"))
    gradients = [on_rows(lambda rows: rows * inverse.to(rows.device), each) for each in x]
    return [*gradients, norm.isfinite().logical_not()]


def update_loss_scaling(
    op: Op,
    found_infinite: Tensor,
    scale: Tensor,
    good_steps: Tensor,
    bad_steps: Tensor,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int,
    incr_ratio: float,
    decr_ratio: float,
) -> list[Tensor]:
    """The next scale, and the counters of finite steps and of overflows in a row."""
    course = ScaleCourse(
        1.0, True, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio
    )
    present = LossScale(course)
    present.load({"value": float(scale), "good": int(good_steps), "bad": int(bad_steps)})
    present.update(bool(found_infinite))
    state = present.state()
    held = {"value": scale, "good": good_steps, "bad": bad_steps}
    return [torch.full_like(held[key], state[key]) for key in held]


KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {CHECK: check_finite_and_unscale, UPDATE: update_loss_scaling}
)
