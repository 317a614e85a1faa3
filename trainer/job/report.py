"""``fleet.report``: how training goes, in the script's own numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from trainer.job.current import present


def report(samples: int = 0, **values: Any) -> None:
    """Tells whoever watches the job, or reads this trainer's metrics, how training goes.

    It costs microseconds: the last values travel with heartbeats, once a second and up to 64 of
    them, for ``pserver status`` and ``pserver web``; metrics are read where PSERVER_METRICS says.

    Args:
        samples: that this trainer has trained on since the last call; they are added up.
        values: numbers by name, or tensors of one element, as of now: ``loss=0.3, auc=0.8``.

    Raises:
        ValueError: the number of samples is below 0, or a value has more than one element.
        TypeError: a value is no number.

    Example::

        for batch in fleet.shard(loader):
            ...
            optimizer.step()
            fleet.report(samples=len(batch), loss=loss)
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise ValueError(f"fleet.report: samples: expected a number of 0 or more, got {samples!r}")
    present().reported.add(samples, {name: _number(name, value) for name, value in values.items()})


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item"):  # a tensor, or a number of numpy's
        if math.prod(getattr(value, "shape", ())) != 1:
            raise ValueError(
                f"fleet.report: {name}: expected one number, got shape {tuple(value.shape)}"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"fleet.report: {name}: expected a number, got {value!r}")
    return float(value)
