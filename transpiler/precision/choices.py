"""What a strategy's ``amp`` and ``amp_configs`` ask for, in one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transpiler.ir.loss_scale import ScaleCourse
from transpiler.precision.op_names import known_op
from transpiler.strategy.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class Precision:
    """How a forward runs with mixed precision.

    Attributes:
        dtype: of the ops in 16 bits.
        pure: parameters and inputs are cast as well.
        guarded: only what is inside ``fp16_guard()`` runs in 16 bits.
        white, black: names of the ops that run in 16 bits, and in 32, whatever torch.autocast does.
        kept: names of variables that stay in 32 bits, with the ops that take them.
        course: of the loss scale; None: the loss is not scaled, as bfloat16 has float32's range.
    """

    dtype: torch.dtype
    pure: bool
    guarded: bool
    white: frozenset[str]
    black: frozenset[str]
    kept: frozenset[str]
    course: ScaleCourse | None

    @property
    def lists(self) -> bool:
        """Whether some ops differ from what torch.autocast does."""
        return bool(self.white or self.black or self.kept)


def precision_of(strategy: DistributedStrategy) -> Precision:
    """What a strategy with ``amp`` asks for.

    Raises:
        ValueError: a list names an op that torch does not have, or both lists name one op.
    """
    settings = strategy.amp_configs
    white = _ops("custom_white_list", settings["custom_white_list"])
    black = _ops("custom_black_list", settings["custom_black_list"])
    if both := sorted(white & black):
        raise ValueError(
            f"strategy.amp_configs: {', '.join(both)}: expected in custom_white_list or in "
            "custom_black_list, got in both"
        )
    bfloat = settings["use_pure_bf16"]
    return Precision(
        torch.bfloat16 if bfloat else torch.float16,
        pure=bfloat or settings["use_pure_fp16"],
        guarded=settings["use_pure_fp16"] and settings["use_fp16_guard"],
        white=white,
        black=black,
        kept=frozenset(settings["custom_black_varnames"]),
        course=None if bfloat else _course(strategy),
    )


def _ops(key: str, names: list[str]) -> frozenset[str]:
    return frozenset(known_op(f"strategy.amp_configs[{key!r}]", name) for name in names)


def _course(strategy: DistributedStrategy) -> ScaleCourse:
    settings = strategy.amp_configs
    return ScaleCourse(
        init=settings["init_loss_scaling"],
        dynamic=settings["use_dynamic_loss_scaling"],
        incr_every=settings["incr_every_n_steps"],
        decr_every=settings["decr_every_n_nan_or_inf"],
        incr_ratio=settings["incr_ratio"],
        decr_ratio=settings["decr_ratio"],
    )
