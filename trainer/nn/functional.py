"""The functions of ``trainer.nn``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pserver.table.string_ids import string_ids
from trainer.nn.centers import center_loss
from trainer.nn.data_norm import data_norm
from trainer.nn.hierarchical_sigmoid import hsigmoid_loss
from trainer.nn.ids import hash, shard_index
from trainer.nn.noise_contrast import nce
from trainer.nn.ranking import bpr_loss, margin_rank_loss, rank_loss
from trainer.nn.sampled_logits import sampled_softmax_with_cross_entropy
from trainer.nn.selected_rows import (
    get_tensor_from_selected_rows,
    merge_selected_rows,
    selected_rows,
)
from trainer.nn.sequence_shapes import (
    sequence_concat,
    sequence_erase,
    sequence_expand,
    sequence_expand_as,
    sequence_mask,
    sequence_pad,
    sequence_reshape,
    sequence_scatter,
    sequence_slice,
    sequence_unpad,
)
from trainer.nn.sequence_steps import (
    sequence_conv,
    sequence_enumerate,
    sequence_first_step,
    sequence_last_step,
    sequence_pool,
    sequence_reverse,
    sequence_softmax,
)
from trainer.nn.shows import continuous_value_model
from trainer.nn.tags import filter_by_instag
from trainer.nn.teacher_student import teacher_student_sigmoid_loss
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
        """A name that is not here: the error says what to write."""
        raise _missing(__name__, name, __all__)
