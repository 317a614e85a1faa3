"""Learning rates that torch has no scheduler for::

    from trainer.lr import NoamLR, WarmupLR

    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1.0))
    scheduler = NoamLR(optimizer, d_model=512, warmup_steps=4000)
    for x, y in fleet.shard(loader):
        ...
        optimizer.step()       # the servers take this step at the present rate
        scheduler.step()

Each is a ``torch.optim.lr_scheduler.LRScheduler``: it steps every parameter group from the rate
that it was made with, continues from its ``state_dict()``, and is saved with a job's checkpoints.
docs/learning_rates.md has the formulas, and recipes with torch's own schedulers.

::

    schedules  NoamLR, NaturalExpLR, InverseTimeLR, PolynomialDecayLR; PiecewiseLR: a rate for each
               stretch of steps; WarmupLR: a linear warm-up before any other scheduler
"""

from typing import TYPE_CHECKING

from trainer.lr.schedules import InverseTimeLR as InverseTimeLR
from trainer.lr.schedules import NaturalExpLR as NaturalExpLR
from trainer.lr.schedules import NoamLR as NoamLR
from trainer.lr.schedules import PiecewiseLR as PiecewiseLR
from trainer.lr.schedules import PolynomialDecayLR as PolynomialDecayLR
from trainer.lr.schedules import WarmupLR as WarmupLR
from transpiler.names.names import missing as _missing

__all__ = [
    "InverseTimeLR",
    "NaturalExpLR",
    "NoamLR",
    "PiecewiseLR",
    "PolynomialDecayLR",
    "WarmupLR",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raises for an unknown name; the error says what to write."""
        raise _missing(__name__, name, __all__)
