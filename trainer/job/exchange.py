"""Values that the trainers of a job tell one another between steps: metrics and decisions, for
training frameworks whose loops ask for them.

They travel as texts of a barrier on server 0.  That is right for a few numbers an epoch; gradients
and parameters never come this way.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from transpiler.files import bounded_json

MOST_BYTES = 3 * 2**20  # of all trainers' texts at one barrier: the control port takes 4 MB
_REDUCED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0, dtype=values.dtype),
    "mean": lambda values: values.sum(0, dtype=values.dtype) / len(values),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}


class Exchange:
    """Where the trainers of a job with servers, or one that trains alone, tell one another values.

    All trainers make the same calls in the same order.  Before an optimizer is distributed they
    cannot reach one another: each is then by itself, as if it were the only one.

    Args:
        job: the present one.

    Example::

        Exchange(job).reduce(torch.tensor(0.5), "mean")    # the same on every trainer
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def size(self) -> int:
        """How many trainers tell one another values: 1 before an optimizer is distributed."""
        return 1 if self._job.communicator is None else self._job.role.trainers

    def barrier(self, name: str) -> None:
        """Waits for every trainer."""
        self.told(name, None)

    def told(self, name: str, value: Any) -> list[Any]:
        """The texts of all present trainers, in the order of the trainers.

        Args:
            name: of the occasion, the same on every trainer.
            value: what JSON can hold; a path becomes a text.

        Raises:
            TypeError: JSON cannot hold it.
            ValueError: it is too large.
            PServerError: a trainer is lost.
        """
        return list(self._texts(name, value).values())

    def _texts(self, name: str, value: Any) -> dict[int, Any]:
        """The same, by trainer."""
        if self.size == 1:
            return {self._job.role.trainer_id: value}
        try:
            text = json.dumps(value, default=os.fspath)
        except TypeError as error:
            raise TypeError(
                f"{name}: expected what JSON can hold, for trainers tell one another texts, got "
                f"{type(value).__name__}: {error}"
            ) from None
        if len(text) * self.size > MOST_BYTES:
            raise ValueError(
                f"{name}: expected at most {MOST_BYTES // self.size} bytes for each of {self.size} "
                f"trainers, got {len(text)}: trainers tell one another metrics and decisions; "
                "larger values go into files"
            )
        optimizer = self._job.optimizer
        assert isinstance(optimizer, DistributedOptimizer), "the communicator is its own"
        texts = optimizer.barrier(name, text)
        return {trainer: bounded_json.loads(texts[trainer]) for trainer in sorted(texts)}

    def gather(self, value: Tensor, name: str = "gather") -> list[Tensor]:
        """The tensor of every trainer that is there, in their order, on this one's device.

        Args:
            value: of any shape and dtype; the trainers' shapes may differ.
        """
        if self.size == 1:
            return [value]
        found = [_unpacked(packed) for packed in self.told(name, _packed(value))]
        return [each.to(value.device) for each in found]

    def reduce(self, value: Tensor, kind: str) -> Tensor:
        """A tensor made of those of the trainers that are there, equal to the bit on all of them.

        Args:
            value: of the same shape and dtype on every trainer.
            kind: "sum", "mean", "max" or "min".

        Raises:
            ValueError: another kind.
        """
        if kind not in _REDUCED:
            raise ValueError(f"reduce: expected one of {', '.join(_REDUCED)}, got {kind!r}")
        if self.size == 1:
            return value
        return _REDUCED[kind](torch.stack(self.gather(value, f"reduce {kind}")))

    def first(self, value: Any, source: int = 0) -> Any:
        """The value of trainer ``source``, which keeps the object itself.

        Raises:
            TypeError: JSON cannot hold it.
        """
        source %= self._job.role.trainers
        if self.size == 1 or self._job.role.trainer_id == source:
            self._texts("broadcast", value)
            return value
        told = self._texts("broadcast", None)
        if source not in told:
            raise RuntimeError(f"broadcast: trainer {source}, whose value it is, has left the job")
        return told[source]


def _packed(value: Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "bytes": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode(),
    }


def _unpacked(packed: Mapping[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(packed["bytes"]))
    dtype = _DTYPES[packed["dtype"]]
    if not data:
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(packed["shape"])
