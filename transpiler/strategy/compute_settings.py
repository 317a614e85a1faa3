"""Settings of a strategy about the computation of a step: precision, recomputation, optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from transpiler.plan.modes import EVERY_MODE
from transpiler.plan.settings import (
    Setting,
    Table,
    ValueKind,
    above,
    at_least,
    count,
    flag,
    list_of,
    number,
    one_of,
    refuse_range,
    refuse_type,
    table,
    text,
)


def _average() -> ValueKind:
    words = "True, False, 'avg' or 'sum'"

    def check(name: str, value: Any) -> bool:
        if isinstance(value, str):
            return value == "avg" if value in ("avg", "sum") else refuse_range(name, words, value)
        is_flag = isinstance(value, bool | np.bool_)
        return bool(value) if is_flag else refuse_type(name, words, value)

    return ValueKind("bool or str", words, check, f"bool | {one_of('avg', 'sum')}", "bool")


_EVERY_MODE = tuple(mode.name for mode in EVERY_MODE)
_PROGRAMS = ("program", "collective_program")
# of scripts, when a model is registered
_in_models = partial(Setting, modes=_EVERY_MODE, jobs=("collective",), early=True)
_at_steps = partial(Setting, modes=_EVERY_MODE, jobs=("collective", *_PROGRAMS))
_SCALE = number(lambda value: 1e-30 <= value <= 1e38, "from 1e-30 to 1e38")  # of a float32
_EXCLUDED = "Parts of names of parameters, or of their modules' types, that have no decay."


def everywhere(key: str, default: Any, kind: ValueKind, sentence: str) -> Setting:
    """A setting that jobs and programs of every kind read."""
    jobs = ("collective", "hybrid", "program", "collective_program")
    return Setting(key, default, kind, sentence, _EVERY_MODE, jobs)


def _amp(key: str, default: Any, kind: ValueKind, sentence: str) -> Setting:
    """A setting of mixed precision, which all kinds of jobs read but those with a divided model."""
    return Setting(
        key, default, kind, sentence, _EVERY_MODE, ("collective", *_PROGRAMS), early=True
    )


COMPUTE_SWITCHES = (
    _amp("amp", False, flag(), "Mixed precision: see ``amp_configs``."),
    Setting(
        "asp",
        False,
        flag(),
        "Structured sparsity: 2 of 4 weights are zero.",
        _EVERY_MODE,
        ("collective", "program", "collective_program"),
        early=True,
    ),
    Setting("qat", False, flag(), "Quantization-aware training: see ``qat_configs``."),
    _in_models(
        "recompute",
        False,
        flag(),
        "Activations are computed again in backward.",
        jobs=("collective", *_PROGRAMS),
    ),
    _at_steps(
        "gradient_merge",
        False,
        flag(),
        "Several steps' gradients make one update.",
    ),
    everywhere("lars", False, flag(), "LARS in place of SGD with momentum: ``lars_configs``."),
    everywhere("lamb", False, flag(), "LAMB in place of Adam: see ``lamb_configs``."),
    Setting(
        "sync_batch_norm",
        False,
        flag(),
        "Batch norm over the batches of all trainers.",
        modes=("sync", "collective"),
        jobs=("collective",),
        early=True,
    ),
)

COMPUTE_CONFIGS: Mapping[str, Table] = MappingProxyType(
    {
        "amp_configs": table(
            _amp("init_loss_scaling", 32768.0, _SCALE, "The first loss scale."),
            _amp("use_dynamic_loss_scaling", True, flag(), "The loss scale adapts."),
            _amp("incr_every_n_steps", 1000, count(), "Finite steps in a row before it grows."),
            _amp("decr_every_n_nan_or_inf", 2, count(), "Overflows in a row before it shrinks."),
            _amp("incr_ratio", 2.0, above(1.0), "By which the loss scale grows."),
            _amp(
                "decr_ratio",
                0.5,
                number(lambda value: 0 < value < 1, "above 0 and below 1"),
                "By which the loss scale shrinks.",
            ),
            _amp("custom_white_list", (), list_of(text()), "Ops that run in 16 bits."),
            _amp("custom_black_list", (), list_of(text()), "Ops that run in 32 bits."),
            _amp("custom_black_varnames", (), list_of(text()), "Variables kept in 32 bits."),
            _amp("use_pure_fp16", False, flag(), "Parameters are float16, too."),
            _amp("use_pure_bf16", False, flag(), "Parameters are bfloat16, too."),
            _amp("use_fp16_guard", True, flag(), "Only guarded ops run in float16."),
        ),
        "qat_configs": table(
            Setting("channel_wise_abs_max", True, flag(), "One scale for each channel."),
            Setting("weight_bits", 8, count(2, 16), "Bits of a weight."),
            Setting("activation_bits", 8, count(2, 16), "Bits of an activation."),
            Setting("not_quant_pattern", (), list_of(text()), "Names that stay as they are."),
            Setting("algo", "", text(), "The algorithm's name."),
        ),
        "recompute_configs": table(
            _in_models(
                "checkpoints",
                (),
                list_of(text()),
                "Names of modules that are recomputed; in programs, of tensors that are kept.",
                jobs=("collective", *_PROGRAMS),
            ),
            _in_models("enable_offload", False, flag(), "Kept activations move to main memory."),
            _in_models("checkpoint_shape", (), list_of(count()), "Of an offloaded activation."),
        ),
        "gradient_merge_configs": table(
            _at_steps("k_steps", 1, count(), "Steps whose gradients make one update."),
            _at_steps("avg", True, _average(), "The mean over these steps, not the sum."),
        ),
        "lars_configs": table(
            everywhere("lars_coeff", 0.001, above(), "The trust coefficient."),
            everywhere("lars_weight_decay", 0.0005, at_least(), "Weight decay."),
            everywhere("epsilon", 0.0, at_least(), "Added to the denominator."),
            everywhere("exclude_from_weight_decay", (), list_of(text()), _EXCLUDED),
        ),
        "lamb_configs": table(
            everywhere("lamb_weight_decay", 0.01, at_least(), "Weight decay."),
            everywhere("exclude_from_weight_decay", (), list_of(text()), _EXCLUDED),
        ),
    }
)
