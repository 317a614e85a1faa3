"""``trainer.serving``, for type checkers: it is one module under both names."""

from trainer.serving import *
