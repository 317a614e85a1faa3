"""Losses and layers of models that rank and recommend, as modules; ``trainer.nn.functional`` has
the functions.

::

    from trainer import nn as field

    loss = field.BPRLoss()(scores, chosen).mean()

Names and arguments are those of PaddlePaddle's layers.  Each docstring cites the paper; what a
program can hold works in ``capture``, and what it cannot raises there and says what to write.

In reading order::

    labels                labels, checked
    ranking               bpr_loss, rank_loss, margin_rank_loss
    teacher_student       a click and a teacher's score in one label
    centers               center_loss
    shows                 continuous_value_model: shows and clicks as features
    data_norm             features by statistics that accumulate
    ids                   hash, shard_index
    samplers              where negative classes come from
    sampled_logits        sampled softmax over given logits
    noise_contrast        nce
    hierarchical_sigmoid  hsigmoid_loss
    ragged                sequences as (values, offsets), or nested
    sequence_steps        pool, softmax, reverse, enumerate, conv
    sequence_shapes       expand, concat, pad, unpad, slice, erase, reshape, scatter, mask
    tags                  filter_by_instag
    selected_rows         the gradient of some rows, as ids and rows
    frequencies           how often an id occurs in a stream of batches
    sampled_softmax       softmax over classes that are rows of a table on servers
    functional            all functions

The room may import embedding.
"""

from typing import TYPE_CHECKING

from trainer.nn import functional
from trainer.nn.centers import CenterLoss
from trainer.nn.data_norm import DataNorm
from trainer.nn.frequencies import StreamingFrequency
from trainer.nn.hierarchical_sigmoid import HSigmoidLoss
from trainer.nn.noise_contrast import NCE
from trainer.nn.ranking import BPRLoss, MarginRankLoss, RankLoss
from trainer.nn.sampled_logits import SampledSoftmaxWithCrossEntropy
from trainer.nn.sampled_softmax import SampledSoftmax
from trainer.nn.selected_rows import SelectedRows
from trainer.nn.sequence_steps import SequenceConv, SequencePool, SequenceSoftmax
from trainer.nn.shows import ContinuousValueModel
from trainer.nn.teacher_student import TeacherStudentSigmoidLoss
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
        """A name that is not here: the error says what to write."""
        raise _missing(__name__, name, __all__)
