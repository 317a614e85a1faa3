"""Settings of a strategy about what a step computes: precision, recomputation, optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transpiler.plan.setting import (
    Kind,
    Setting,
    Table,
    above,
    at_least,
    count,
    flag,
    list_of,
    number,
    refuse_range,
    refuse_type,
    table,
    text,
)


def _average() -> Kind:
    words = "True, False, 'avg' or 'sum'"

    def check(name: str, value: Any) -> bool:
        if isinstance(value, str):
            return value == "avg" if value in ("avg", "sum") else refuse_range(name, words, value)
        return value if isinstance(value, bool) else refuse_type(name, words, value)

    return Kind("bool or str", words, check)


COMPUTE_SWITCHES = (
    Setting("amp", False, flag(), "Mixed precision: see ``amp_configs``."),
    Setting("asp", False, flag(), "Structured sparsity: 2 of 4 weights are zero."),
    Setting("qat", False, flag(), "Quantization-aware training: see ``qat_configs``."),
    Setting("recompute", False, flag(), "Activations are computed again in backward."),
    Setting("gradient_merge", False, flag(), "Several steps' gradients make one update."),
    Setting("lars", False, flag(), "The LARS optimizer: see ``lars_configs``."),
    Setting("lamb", False, flag(), "The LAMB optimizer: see ``lamb_configs``."),
    Setting("sync_batch_norm", False, flag(), "Batch norm over the batches of all trainers."),
)

COMPUTE_CONFIGS: Mapping[str, Table] = MappingProxyType(
    {
        "amp_configs": table(
            Setting("init_loss_scaling", 32768.0, above(), "The first loss scale."),
            Setting("use_dynamic_loss_scaling", True, flag(), "The loss scale adapts."),
            Setting("incr_every_n_steps", 1000, count(), "Finite steps before it grows."),
            Setting("decr_every_n_nan_or_inf", 2, count(), "Overflows before it shrinks."),
            Setting("incr_ratio", 2.0, above(1.0), "By which the loss scale grows."),
            Setting(
                "decr_ratio",
                0.5,
                number(lambda value: 0 < value < 1, "above 0 and below 1"),
                "By which the loss scale shrinks.",
            ),
            Setting("custom_white_list", (), list_of(text()), "Ops that run in 16 bits."),
            Setting("custom_black_list", (), list_of(text()), "Ops that run in 32 bits."),
            Setting("custom_black_varnames", (), list_of(text()), "Variables kept in 32 bits."),
            Setting("use_pure_fp16", False, flag(), "Parameters are float16, too."),
            Setting("use_pure_bf16", False, flag(), "Parameters are bfloat16, too."),
            Setting("use_fp16_guard", True, flag(), "Only guarded ops run in float16."),
        ),
        "qat_configs": table(
            Setting("channel_wise_abs_max", True, flag(), "One scale for each channel."),
            Setting("weight_bits", 8, count(2, 16), "Bits of a weight."),
            Setting("activation_bits", 8, count(2, 16), "Bits of an activation."),
            Setting("not_quant_pattern", (), list_of(text()), "Names that stay as they are."),
            Setting("algo", "", text(), "The algorithm's name."),
        ),
        "recompute_configs": table(
            Setting("checkpoints", (), list_of(text()), "Names of activations that are kept."),
            Setting("enable_offload", False, flag(), "Kept activations move to main memory."),
            Setting("checkpoint_shape", (), list_of(count()), "Of an offloaded activation."),
        ),
        "gradient_merge_configs": table(
            Setting("k_steps", 1, count(), "Steps whose gradients make one update."),
            Setting("avg", True, _average(), "The mean over these steps, not the sum."),
        ),
        "lars_configs": table(
            Setting("lars_coeff", 0.001, above(), "The trust coefficient."),
            Setting("lars_weight_decay", 0.0005, at_least(), "Weight decay."),
            Setting("epsilon", 0.0, at_least(), "Added to the denominator."),
            Setting("exclude_from_weight_decay", (), list_of(text()), "Names without decay."),
        ),
        "lamb_configs": table(
            Setting("lamb_weight_decay", 0.01, at_least(), "Weight decay."),
            Setting("exclude_from_weight_decay", (), list_of(text()), "Names without decay."),
        ),
    }
)
