"""``trainer.lr``, for type checkers: it is one module under both names."""

from trainer.lr import *
