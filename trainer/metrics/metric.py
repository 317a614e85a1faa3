"""What every metric does: it keeps states, and merges them over the trainers of the job.

[Note: states of a metric]  A metric keeps two kinds of tensors, in main memory: sums, which are
added up over the trainers, and rows, one a sample, which are put together.  A trainer has a state
when its first sample needs it; for one that has none the others take zeros, or no rows.  So a
trainer without a sample takes part like any other.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from trainer.collective.values import TrainerValues
from trainer.job.shared_values import present_values


class Metric(ABC):
    """A number that is gathered batch by batch, on each trainer from its own samples.

    ``compute()`` gives it over all samples of all trainers of the job, equal to the bit on each of
    them; all trainers call it.  Where there is no job it is this process's own.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets every sample."""
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._merged = False

    def compute(self) -> float:
        """The metric over all samples of all trainers; nan where they do not define it.

        Raises:
            ValueError: the trainers call it for different metrics.
            PServerError: another trainer is lost.
        """
        return self._everywhere()._value()

    def merge(self, values: TrainerValues) -> None:
        """Takes in the samples of all trainers: ``compute()`` then needs no other trainer.

        ``fleet.sync`` calls it.

        Raises:
            RuntimeError: they have been taken in before, and ``reset()`` has not been called since.
        """
        self._check_own("merge")
        sums = {name: (list(each.shape), _spelled(each)) for name, each in self._sums.items()}
        rows = {name: _spelled(parts[0]) for name, parts in self._rows.items()}
        told = values.all_gather_object({"metric": repr(self), "sums": sums, "rows": rows})
        names = {each["metric"] for each in told}
        if len(names) > 1:
            raise ValueError(f"expected one metric on all trainers, got {', '.join(sorted(names))}")
        every: dict[str, tuple[list[int], str]] = {}
        for each in told:
            every |= each["sums"]
        for name in sorted(every):
            shape, dtype = every[name]
            own = self._sums.get(name)
            own = torch.zeros(shape, dtype=getattr(torch, dtype)) if own is None else own
            self._sums[name] = values.all_reduce(own)
        dtypes: dict[str, str] = {}
        for each in told:
            dtypes |= each["rows"]
        for name in sorted(dtypes):
            none = torch.empty(0, dtype=getattr(torch, dtypes[name]))
            self._rows[name] = values.all_gather(torch.cat(self._rows.get(name, [none])))
        self._merged = True

    def state_dict(self) -> dict[str, Tensor]:
        """This trainer's samples, as tensors by name."""
        return {
            **{f"sums.{name}": each.clone() for name, each in self._sums.items()},
            **{f"rows.{name}": torch.cat(parts) for name, parts in self._rows.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Takes up what :meth:`state_dict` gave, in the place of the present samples.

        Raises:
            ValueError: it is no state of a metric.
        """
        self.reset()
        for name, tensor in state_dict.items():
            kind, _, own = name.partition(".")
            if kind == "sums":
                self._sums[own] = tensor.clone()
            elif kind == "rows":
                self._rows[own] = [tensor.clone()]
            else:
                raise ValueError(f"expected sums.NAME and rows.NAME, got {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def _value(self) -> float:
        """The metric over the samples that are here."""

    def _everywhere(self) -> Self:
        """This metric with the samples of all trainers."""
        if self._merged:
            return self
        values = present_values()
        if values.size == 1:
            return self
        whole = copy.copy(self)
        whole._sums, whole._rows = dict(self._sums), dict(self._rows)
        whole.merge(values)
        return whole

    def _check_own(self, what: str) -> None:
        """Returns where the samples are this trainer's own.

        Raises:
            RuntimeError: they are all trainers'.
        """
        if self._merged:
            raise RuntimeError(
                f"{type(self).__name__}.{what}: expected this trainer's samples, got those of all "
                "trainers after fleet.sync: call reset() first"
            )

    # ---- states ----

    def _sum(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A state that is added up, to be changed in place."""
        if name not in self._sums:
            self._sums[name] = torch.zeros(shape, dtype=dtype)
        return self._sums[name]

    def _append(self, **rows: Tensor) -> None:
        """Keeps what each sample has of every name."""
        for name, tensor in rows.items():
            self._rows.setdefault(name, []).append(tensor)

    def _all(self, name: str, dtype: torch.dtype) -> Tensor:
        """The rows of a name."""
        return torch.cat([*self._rows.get(name, ()), torch.empty(0, dtype=dtype)])


def _spelled(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
