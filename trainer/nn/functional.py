"""The functions of ``trainer.nn``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pserver.table.string_ids import string_ids
from trainer.nn.recommend import (
    bpr_loss,
    center_loss,
    continuous_value_model,
    data_norm,
    filter_by_instag,
    get_tensor_from_selected_rows,
    hash,
    margin_rank_loss,
    merge_selected_rows,
    rank_loss,
    selected_rows,
    shard_index,
    teacher_student_sigmoid_loss,
)
from trainer.nn.sampled import hsigmoid_loss, nce, sampled_softmax_with_cross_entropy
from trainer.nn.sequence import (
    sequence_concat,
    sequence_conv,
    sequence_enumerate,
    sequence_erase,
    sequence_expand,
    sequence_expand_as,
    sequence_first_step,
    sequence_last_step,
    sequence_mask,
    sequence_pad,
    sequence_pool,
    sequence_reshape,
    sequence_reverse,
    sequence_scatter,
    sequence_slice,
    sequence_softmax,
    sequence_unpad,
)
from transpiler.names.names import missing as _missing

__all__ = [
    "bpr_loss",
    "center_loss",
    "continuous_value_model",
    "data_norm",
    "filter_by_instag",
    "get_tensor_from_selected_rows",
    "hash",
    "hsigmoid_loss",
    "margin_rank_loss",
    "merge_selected_rows",
    "nce",
    "rank_loss",
    "sampled_softmax_with_cross_entropy",
    "selected_rows",
    "sequence_concat",
    "sequence_conv",
    "sequence_enumerate",
    "sequence_erase",
    "sequence_expand",
    "sequence_expand_as",
    "sequence_first_step",
    "sequence_last_step",
    "sequence_mask",
    "sequence_pad",
    "sequence_pool",
    "sequence_reshape",
    "sequence_reverse",
    "sequence_scatter",
    "sequence_slice",
    "sequence_softmax",
    "sequence_unpad",
    "shard_index",
    "string_ids",
    "teacher_student_sigmoid_loss",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raises an error for an unknown name, which says what to write."""
        raise _missing(__name__, name, __all__)
