"""Whether a script has written into some parameters since its last step: in the lanes whose steps
the script's own optimizer takes.

There what is written leaves with the next message, as a part of what has changed.  Until the next
step nothing lands on it, and files that have the servers' values lack it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.communicator.samples import Samples


class WritesBetween:
    """Compares counters and sampled elements with those at the last :meth:`note`.

    The script's thread calls it.

    Args:
        tensors: the live ones by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._samples = Samples(list(self._tensors.values()))
        self._versions: list[int] = []  # as noted; none before the first note

    def note(self) -> None:
        """A step is over, or values have landed."""
        self._versions = [version(tensor) for tensor in self._tensors.values()]
        self._samples.note(range(len(self._tensors)))

    def names(self) -> list[str]:
        """The tensors that have been written since the last note.

        Of writes that no counter tells of, those into sampled elements.
        """
        if not self._versions:
            return []
        changed = set(self._samples.changed(range(len(self._tensors))))
        return [
            name
            for number, (name, tensor) in enumerate(self._tensors.items())
            if number in changed or version(tensor) != self._versions[number]
        ]


def version(tensor: Tensor) -> int:
    """How many operations have written to a tensor, as torch counts them."""
    return 0 if tensor.is_inference() else tensor._version
