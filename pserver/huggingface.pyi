"""``trainer.huggingface``, for type checkers: it is one module under both names."""

from trainer.huggingface import *
