"""``trainer.lightning``, for type checkers: it is one module under both names."""

from trainer.lightning import *
