"""How one process runs its part of a job: the Executor for programs, fleet for eager scripts."""

from trainer.executor import Executor as Executor

__all__ = ["Executor"]
