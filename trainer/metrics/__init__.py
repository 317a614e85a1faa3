"""Metrics of models, over the samples of all trainers of a job::

    from trainer.metrics import AUC, LogLoss, auc

    metric      = AUC() metric.update(model(x).sigmoid(), y)
    curve_area  the area under the ROC curve, from counts of positives and negatives; pure
                arithmetic
    functions   the metrics as functions of the whole job's samples
    ranking     how well scores put positives before negatives
    ratios      metrics that are one weighted sum over another
    samples     what ``update`` takes

A metric is a float; nan where the samples do not define it.  docs/evaluation.md tells more.

In reading order::

    samples      what update takes, checked
    metric       Metric: states, and how they are merged over trainers
    curve_area   the area under the ROC curve, from counts
    ranking      AUC, GroupedAUC
    ratios       means of losses and errors, COPC, shares of right decisions
    functions    the same in one call
"""

from typing import TYPE_CHECKING

from trainer.metrics.functions import accuracy as accuracy
from trainer.metrics.functions import auc as auc
from trainer.metrics.functions import copc as copc
from trainer.metrics.functions import grouped_auc as grouped_auc
from trainer.metrics.functions import logloss as logloss
from trainer.metrics.functions import mae as mae
from trainer.metrics.functions import mean as mean
from trainer.metrics.functions import precision as precision
from trainer.metrics.functions import recall as recall
from trainer.metrics.functions import rmse as rmse
from trainer.metrics.metric import Metric as Metric
from trainer.metrics.ranking import AUC as AUC
from trainer.metrics.ranking import GroupedAUC as GroupedAUC
from trainer.metrics.ratios import COPC as COPC
from trainer.metrics.ratios import MAE as MAE
from trainer.metrics.ratios import RMSE as RMSE
from trainer.metrics.ratios import Accuracy as Accuracy
from trainer.metrics.ratios import LogLoss as LogLoss
from trainer.metrics.ratios import Mean as Mean
from trainer.metrics.ratios import Precision as Precision
from trainer.metrics.ratios import Recall as Recall
from transpiler.names.names import missing as _missing

__all__ = [
    "Accuracy",
    "accuracy",
    "AUC",
    "auc",
    "COPC",
    "copc",
    "grouped_auc",
    "GroupedAUC",
    "LogLoss",
    "logloss",
    "MAE",
    "mae",
    "Mean",
    "mean",
    "Metric",
    "Precision",
    "precision",
    "Recall",
    "recall",
    "RMSE",
    "rmse",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A name that is not here: the error says what to write."""
        raise _missing(__name__, name, __all__)
