"""``trainer.metrics``, for type checkers: it is one module under both names."""

from trainer.metrics import *
