"""Which gradients are means over all trainers: each that a step applies bears a mark, which a
backward that averages it sets, and one that only adds to it takes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


class GradientMarks:
    """The marks of one job's parameters.  Backward sets them, in autograd's thread; the script's
    thread looks at them at each step.
    """

    def __init__(self) -> None:
        self._buckets: dict[object, list[tuple[int, ...]]] = {}  # ids of parameters, by reducer
        self._hooks: dict[object, list[Any]] = {}
        # in the order in which backward came to them, since their last mean
        self._grown: list[Tensor] = []
        self._left: list[tuple[int, ...]] = []  # buckets of the backward that runs
        self._means: set[int] = set()  # since the last step
        self._applied: dict[int, tuple[int, int]] = {}  # the gradients of the last step

    def follow(self, reducer: object, buckets: Sequence[Sequence[Tensor]]) -> None:
        """From now on these parameters are averaged by a reducer, and no others are.

        Args:
            reducer: whose they are; any object.
            buckets: those that travel together, by their numbers.
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
        """A reducer averages nothing any more."""
        self._buckets.pop(reducer, None)
        for hook in self._hooks.pop(reducer, ()):
            hook.remove()

    def left(self, reducer: object, bucket: int) -> None:
        """A bucket of the backward that runs is on its way."""
        self._left.append(self._buckets[reducer][bucket])

    def end(self) -> None:
        """A backward has ended, and what was on its way is there."""
        for bucket in self._left:
            self._means.update(bucket)
        now = {each for bucket in self._left for each in bucket}
        self._left.clear()
        # the list itself stays: hooks append to it
        self._grown[:] = [each for each in self._grown if id(each) not in now]

    def without(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Those whose gradient is no mean over all trainers.  One that was there at the last step,
        and has not changed, was looked at then.
        """
        grown = {id(each) for each in self._grown}
        for parameter in parameters:
            key = id(parameter)
            if parameter.grad is None or (key in self._means and key not in grown):
                continue
            if key in grown or self._applied.get(key) != _known(parameter.grad):
                yield parameter

    def applied(self, parameters: Iterable[Tensor]) -> None:
        """A step has been taken with the gradients of these as they are."""
        self._means.clear()
        self._grown.clear()
        self._applied = {id(p): _known(p.grad) for p in parameters if p.grad is not None}


def _known(gradient: Tensor) -> tuple[int, int]:
    """The place and version of a gradient, which another or a changed one does not have."""
    held = gradient._values() if gradient.is_sparse else gradient
    return held.data_ptr(), gradient._version
