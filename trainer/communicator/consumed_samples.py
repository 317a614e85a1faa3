"""What a trainer's script has trained on, until a message tells server 0."""

from __future__ import annotations

from collections.abc import Iterable

from pserver.leases.table import EpochRange


class ConsumedSamples:
    """Positions of epochs, on their way from the loader to a step's commit.

    Batches that were given to the script since its last step belong to the next one, so that
    accumulated gradients count with all of their samples.  The script's thread uses it.
    """

    def __init__(self) -> None:
        self._given: list[EpochRange] = []
        self._stepped: list[EpochRange] = []

    def give(self, ranges: Iterable[EpochRange]) -> None:
        """The script gets a batch of these."""
        self._given += ranges

    def step(self) -> None:
        """The script has closed a step: it has consumed all that was given."""
        self._stepped += self._given
        self._given = []

    def take(self) -> tuple[EpochRange, ...]:
        """What the next message says: all that steps have consumed and no message has said."""
        taken, self._stepped = tuple(self._stepped), []
        return taken

    def close(self) -> tuple[EpochRange, ...]:
        """The script has closed a step that is a message of its own: what that says."""
        self.step()
        return self.take()

    def waiting(self, epoch: int) -> int:
        """Positions of an epoch that were given and are in no message."""
        held = [*self._given, *self._stepped]
        return sum(stop - start for number, start, stop in held if number == epoch)

    def drop(self, epoch: int) -> tuple[EpochRange, ...]:
        """What was given of an epoch and is in no step: no later step has it."""
        dropped = tuple(each for each in self._given if each[0] == epoch)
        self._given = [each for each in self._given if each[0] != epoch]
        return dropped
