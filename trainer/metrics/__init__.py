"""Metrics of models, over the samples of all trainers of a job::

    from trainer.metrics import AUC, LogLoss, auc

    metric   Metric: checks of samples, states, and their merge over trainers
    metrics  AUC, GroupedAUC, means of losses and errors, COPC, accuracy; each as a function, too

A metric is a float; nan where the samples do not define it.  docs/evaluation.md has more.

In reading order::

    metric   checks of samples; Metric: states, and their merge over trainers
    metrics  the area under the ROC curve, from counts; AUC, GroupedAUC; means of losses and errors,
             COPC, shares of right decisions; each as a function
"""

from typing import TYPE_CHECKING

from trainer.metrics.metric import Metric as Metric
from trainer.metrics.metrics import AUC as AUC
from trainer.metrics.metrics import COPC as COPC
from trainer.metrics.metrics import MAE as MAE
from trainer.metrics.metrics import RMSE as RMSE
from trainer.metrics.metrics import Accuracy as Accuracy
from trainer.metrics.metrics import GroupedAUC as GroupedAUC
from trainer.metrics.metrics import LogLoss as LogLoss
from trainer.metrics.metrics import Mean as Mean
from trainer.metrics.metrics import Precision as Precision
from trainer.metrics.metrics import Recall as Recall
from trainer.metrics.metrics import accuracy as accuracy
from trainer.metrics.metrics import auc as auc
from trainer.metrics.metrics import copc as copc
from trainer.metrics.metrics import grouped_auc as grouped_auc
from trainer.metrics.metrics import logloss as logloss
from trainer.metrics.metrics import mae as mae
from trainer.metrics.metrics import mean as mean
from trainer.metrics.metrics import precision as precision
from trainer.metrics.metrics import recall as recall
from trainer.metrics.metrics import rmse as rmse
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
        """Raises for an unknown name; the error says what to write."""
        raise _missing(__name__, name, __all__)
