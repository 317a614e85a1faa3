"""``trainer.nn``, for type checkers: it is one module under both names."""

from trainer.nn import *
