"""Gradient validation: marks of the gradients that are means over all trainers.  A backward that
averages a gradient sets its mark, and a backward that only adds to it removes the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


class GradientMarks:
    """The marks of one job's parameters.  Backward sets them, in autograd's thread; the script's
    thread checks them at each step.
    """

    def __init__(self) -> None:
        self._buckets: dict[object, list[tuple[int, ...]]] = {}  # ids of parameters, by reducer
        self._hooks: dict[object, list[Any]] = {}
        # parameters with grown gradients since their last mean, in the order of backward
        self._grown: list[Tensor] = []
        self._left: list[tuple[int, ...]] = []  # buckets of the backward that runs
        self._means: set[int] = set()  # since the last step
        self._applied: dict[int, tuple[int, int]] = {}  # the gradients of the last step

    def follow(self, reducer: object, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Notes the parameters that a reducer averages from now on, in place of its earlier ones.

        Args:
            reducer: the reducer of the parameters; any object.
            buckets: the parameters that travel together, by the buckets' numbers.
        """
        self.drop(reducer)
        self._buckets[reducer] = [tuple(map(id, bucket)) for bucket in buckets]
        self._hooks[reducer] = [
            # torch has no types here; a list's own method costs backward the least
            parameter.register_post_accumulate_grad_hook(self._grown.append)  # type: ignore[no-untyped-call]
            for bucket in buckets
            for parameter in bucket
        ]

    def drop(self, reducer: object) -> None:
        """Forgets a reducer, which averages no more."""
        self._buckets.pop(reducer, None)
        for hook in self._hooks.pop(reducer, ()):
            hook.remove()

    def left(self, reducer: object, bucket: int) -> None:
        """Notes a bucket of the present backward that is on its way."""
        self._left.append(self._buckets[reducer][bucket])

    def end(self) -> None:
        """Marks the gradients of a backward that has ended: their buckets have arrived."""
        for bucket in self._left:
            self._means.update(bucket)
        now = {each for bucket in self._left for each in bucket}
        self._left.clear()
        # the list itself stays: hooks append to it
        self._grown[:] = [each for each in self._grown if id(each) not in now]

    def without(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """The parameters whose gradient is not a mean over all trainers.  A gradient that has not
        changed since the last step was checked then.
        """
        grown = {id(each) for each in self._grown}
        for parameter in parameters:
            key = id(parameter)
            if parameter.grad is None or (key in self._means and key not in grown):
                continue
            if key in grown or self._applied.get(key) != _known(parameter.grad):
                yield parameter

    def applied(self, parameters: Iterable[Tensor]) -> None:
        """Notes that a step has been taken with the present gradients of these parameters."""
        self._means.clear()
        self._grown.clear()
        self._applied = {id(p): _known(p.grad) for p in parameters if p.grad is not None}


def _known(gradient: Tensor) -> tuple[int, int]:
    """The memory and version of a gradient; another or a changed gradient has others."""
    held = gradient._values() if gradient.is_sparse else gradient
    return held.data_ptr(), gradient._version
