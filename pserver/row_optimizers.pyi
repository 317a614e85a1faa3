"""``trainer.row_optimizers``, for type checkers: it is one module under both names."""

from trainer.row_optimizers import *
