"""The base of all metrics: it keeps states, and merges them over the trainers of the job.

[Note: states of a metric]  A metric keeps two kinds of tensors, in main memory: sums, which are
added up over the trainers, and rows, one a sample, which are concatenated.  A trainer has a state
from its first sample on; a trainer without one counts with zeros, or no rows.  So a trainer without
a sample makes the same calls as any other.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from trainer.collective.values import TrainerValues
from trainer.job.shared_values import present_values

# ---- samples ----
#
# Checks of the arguments of ``update``: predictions, labels and weights of samples become flat
# tensors in main memory.


def flat(name: str, values: Any) -> Tensor:
    """Numbers as one float64 vector.

    Raises:
        ValueError: one is nan.
        TypeError: they are no real numbers.
    """
    tensor = _tensor(name, values)
    check_numbers(name, tensor)
    return tensor.reshape(-1).cpu().to(torch.float64)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Checks that no number is nan.

    Raises:
        ValueError: one is.
    """
    if bool(tensor.isnan().any()):
        place = int(tensor.reshape(-1).isnan().nonzero()[0])
        raise ValueError(f"{name}: expected numbers, got nan at position {place}")


def flat_like(name: str, values: Any, other_name: str, other: Any) -> Tensor:
    """Numbers as one float64 vector, in the shape of ``other`` except for dimensions of 1.

    Raises:
        ValueError: one is nan, or the shapes differ.
        TypeError: they are no real numbers.
    """
    shape, expected = _tensor(name, values).shape, _tensor(other_name, other).shape
    if [n for n in shape if n != 1] != [n for n in expected if n != 1]:
        raise ValueError(
            f"{name}: expected the shape of {other_name}, {list(expected)}, got {list(shape)}"
        )
    return flat(name, values)


def weights_like(weights: Any, other_name: str, other: Any) -> Tensor:
    """One weight a sample; 1 where there are none.

    Raises:
        ValueError: one is below 0 or not finite, or the shapes differ.
    """
    if weights is None:
        return torch.ones(_tensor(other_name, other).numel(), dtype=torch.float64)
    vector = flat_like("weights", weights, other_name, other)
    if vector.numel() and not (bool((vector >= 0).all()) and bool(vector.isfinite().all())):
        raise ValueError(
            f"weights: expected numbers of 0 or more, got {float(vector.min()):g} to "
            f"{float(vector.max()):g}"
        )
    return vector


def classes_like(labels: Any, other_name: str, other: Any) -> Tensor:
    """The mask of positive samples, from labels 0 and 1.

    Raises:
        ValueError: another label, or the shapes differ.
    """
    vector = flat_like("labels", labels, other_name, other)
    wrong = vector[(vector != 0) & (vector != 1)]
    if wrong.numel():
        raise ValueError(f"labels: expected 0 and 1, got {float(wrong[0]):g}")
    return vector == 1


def check_classes(name: str, labels: Any, classes: int) -> None:
    """Checks that every label is one of the classes.

    Raises:
        ValueError: one is not.
    """
    vector = flat(name, labels)
    wrong = vector[(vector < 0) | (vector >= classes) | (vector != vector.floor())]
    if wrong.numel():
        raise ValueError(
            f"{name}: expected classes from 0 to {classes - 1}, got {float(wrong[0]):g}"
        )


def probabilities(preds: Any) -> Tensor:
    """Predictions from 0 to 1, as one float64 vector.

    Raises:
        ValueError: one is outside, or nan.
    """
    vector = flat("preds", preds)
    wrong = vector[(vector < 0) | (vector > 1)]
    if wrong.numel():
        raise ValueError(
            f"preds: expected probabilities from 0 to 1, got {float(wrong[0]):g}: apply a sigmoid "
            "first"
        )
    return vector


def _tensor(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor of numbers: {error}") from None
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    return tensor


# ---- metric ----


class Metric(ABC):
    """A number that is accumulated batch by batch, on each trainer from its own samples.

    ``compute()`` gives it over all samples of all trainers of the job, equal to the bit on each of
    them; all trainers call it.  Where there is no job it is over this process's samples.
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
            PServerError: another trainer was lost.
        """
        return self._everywhere()._value()

    def merge(self, values: TrainerValues) -> None:
        """Merges the samples of all trainers: ``compute()`` then needs no other trainer.

        ``fleet.sync`` calls it.

        Raises:
            RuntimeError: they are merged already, and ``reset()`` has not been called since.
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
        """Replaces the present samples by the result of :meth:`state_dict`.

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
        """The metric over the samples in this process."""

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
        """Checks that the samples are this trainer's own.

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
        """Appends the rows of samples, by name."""
        for name, tensor in rows.items():
            self._rows.setdefault(name, []).append(tensor)

    def _all(self, name: str, dtype: torch.dtype) -> Tensor:
        """The rows of a name."""
        return torch.cat([*self._rows.get(name, ()), torch.empty(0, dtype=dtype)])


def _spelled(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
