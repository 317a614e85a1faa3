"""``trainer.nn.functional``, for type checkers: it is one module under both names."""

from trainer.nn.functional import *
