"""Losses and layers of models that rank and recommend, as modules; ``trainer.nn.functional`` has
the functions.

::

    from trainer import nn as field

    loss = field.BPRLoss()(scores, chosen).mean()

Names and arguments are those of PaddlePaddle's layers.  Each docstring cites the paper.  Functions
that a program can hold work in ``capture``; the others raise an error there that says what to
write.

In reading order::

    sequence    expand, concat, pad, unpad, slice, erase, reshape, scatter, mask; labels, checked;
                sequences as (values, offsets), or nested; pool, softmax, reverse, enumerate, conv
    recommend   hash, shard_index
    sampled     softmax over classes that are rows of a table on servers
    functional  all functions

The room may import embedding.
"""

from typing import TYPE_CHECKING

from trainer.nn import functional
from trainer.nn.recommend import (
    BPRLoss,
    CenterLoss,
    ContinuousValueModel,
    DataNorm,
    MarginRankLoss,
    RankLoss,
    SelectedRows,
    TeacherStudentSigmoidLoss,
)
from trainer.nn.sampled import (
    NCE,
    HSigmoidLoss,
    SampledSoftmax,
    SampledSoftmaxWithCrossEntropy,
    StreamingFrequency,
)
from trainer.nn.sequence import SequenceConv, SequencePool, SequenceSoftmax
from transpiler.names.names import missing as _missing

__all__ = [
    "BPRLoss",
    "CenterLoss",
    "ContinuousValueModel",
    "DataNorm",
    "functional",
    "HSigmoidLoss",
    "MarginRankLoss",
    "NCE",
    "RankLoss",
    "SampledSoftmax",
    "SampledSoftmaxWithCrossEntropy",
    "SelectedRows",
    "SequenceConv",
    "SequencePool",
    "SequenceSoftmax",
    "StreamingFrequency",
    "TeacherStudentSigmoidLoss",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raises an error for an unknown name, which says what to write."""
        raise _missing(__name__, name, __all__)
