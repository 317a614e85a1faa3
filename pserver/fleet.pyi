"""``trainer.fleet``, for type checkers: it is one module under both names."""

from trainer.fleet import *
