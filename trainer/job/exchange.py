"""Values that the trainers of a job exchange between steps: metrics and decisions, for training
frameworks whose loops need them.

They travel as texts of a barrier on server 0.  That suits a few numbers an epoch; gradients and
parameters never travel this way.
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
    """The exchange of values between the trainers of a job with servers, or in a process that
    trains alone.

    All trainers make the same calls in the same order.  Before an optimizer is distributed they
    cannot reach one another: each acts as if it were the only one.

    Args:
        job: the present job.

    Example::

        Exchange(job).reduce(torch.tensor(0.5), "mean")    # the same on every trainer
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def size(self) -> int:
        """The number of trainers that exchange values: 1 before an optimizer is distributed."""
        return 1 if self._job.communicator is None else self._job.role.trainers

    def barrier(self, name: str) -> None:
        """Waits at a barrier for every trainer."""
        self.gather_texts(name, None)

    def gather_texts(self, name: str, value: Any) -> list[Any]:
        """Exchanges values: gives those of all live trainers, in the order of the trainers.

        Args:
            name: of the exchange, the same on every trainer.
            value: one that JSON can hold; a path becomes a string.

        Raises:
            TypeError: JSON cannot hold it.
            ValueError: it is too large.
            PServerError: a trainer is lost.
        """
        return list(self._texts(name, value).values())

    def _texts(self, name: str, value: Any) -> dict[int, Any]:
        """Exchanges values: gives those of all live trainers, by trainer."""
        if self.size == 1:
            return {self._job.role.trainer_id: value}
        try:
            text = json.dumps(value, default=os.fspath)
        except TypeError as error:
            raise TypeError(
                f"{name}: expected a value that JSON can hold, as trainers exchange texts, got "
                f"{type(value).__name__}: {error}"
            ) from None
        if len(text) * self.size > MOST_BYTES:
            raise ValueError(
                f"{name}: expected at most {MOST_BYTES // self.size} bytes for each of {self.size} "
                f"trainers, got {len(text)}: trainers exchange metrics and decisions here; "
                "larger values go into files"
            )
        optimizer = self._job.optimizer
        assert isinstance(optimizer, DistributedOptimizer), "the communicator is its own"
        texts = optimizer.barrier(name, text)
        return {trainer: bounded_json.loads(texts[trainer]) for trainer in sorted(texts)}

    def gather(self, value: Tensor, name: str = "gather") -> list[Tensor]:
        """Gathers the tensors of all live trainers, in their order, on this tensor's device.

        Args:
            value: of any shape and dtype; the trainers' shapes may differ.
        """
        if self.size == 1:
            return [value]
        found = [_unpacked(packed) for packed in self.gather_texts(name, _packed(value))]
        return [each.to(value.device) for each in found]

    def reduce(self, value: Tensor, kind: str) -> Tensor:
        """Reduces the tensors of the live trainers; the result is equal to the bit on all of them.

        Args:
            value: of the same shape and dtype on every trainer.
            kind: "sum", "mean", "max" or "min".

        Raises:
            ValueError: the kind is unknown.
        """
        if kind not in _REDUCED:
            raise ValueError(f"reduce: expected one of {', '.join(_REDUCED)}, got {kind!r}")
        if self.size == 1:
            return value
        return _REDUCED[kind](torch.stack(self.gather(value, f"reduce {kind}")))

    def first(self, value: Any, source: int = 0) -> Any:
        """Gives all trainers the value of trainer ``source``, which keeps the object itself.

        Raises:
            TypeError: JSON cannot hold it.
            ValueError: it is too large.
            RuntimeError: trainer ``source`` has left the job.
        """
        source %= self._job.role.trainers
        if self.size == 1 or self._job.role.trainer_id == source:
            self._texts("broadcast", value)
            return value
        told = self._texts("broadcast", None)
        if source not in told:
            raise RuntimeError(f"broadcast: trainer {source}, the source, has left the job")
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
