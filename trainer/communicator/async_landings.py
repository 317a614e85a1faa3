"""What last landed in an async or half-async lane, whose servers other trainers step meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from pserver.transport.arrays import Assignment, checksum
from trainer.communicator.landed_values import LandedValues, difference
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.request_pipeline import Pulled, RequestPipeline

log = logging.getLogger(__name__)


class AsyncLandings(LandedValues):
    """See :class:`~trainer.communicator.lane.Landings`.

    Args:
        slices: of the lane.
        pipeline: its messages.
        drain: waits until the lane has sent everything, and has its answers.
        in_place: values arrive in the parameters themselves.

    Attributes:
        fetching: values arrive in buffers all the same.
    """

    between_steps = True

    def __init__(
        self,
        slices: ParameterSlices,
        pipeline: RequestPipeline,
        drain: Callable[[], None],
        in_place: bool,
    ) -> None:
        super().__init__(slices)
        self.fetching = False
        self._pipeline = pipeline
        self._drain = drain
        self._in_place = in_place
        self._copies = False  # of every landing, because the script writes into parameters

    @property
    def keeps_memory(self) -> bool:
        """See :class:`~trainer.communicator.lane.Landings`, here and below."""
        return not self._in_place

    @property
    def keeps_copies(self) -> bool:
        return self._copies

    def differing(self, variables: Collection[str]) -> dict[str, Assignment]:
        trained = [variable for variable in variables if self.slices.trains(variable)]
        if not self.holds(trained):
            self._take_from_servers(trained)
        found = self.differences(trained)
        if held := self.slices.slices_of(set(variables).difference(trained)):
            found.update(self._differing_held(held))
        return found

    def _differing_held(self, names: Collection[str]) -> dict[str, Assignment]:
        """What of slices that servers only hold is not as they have it."""
        theirs = self._pipeline.checksums(names)
        unlike = [name for name in names if checksum(self.slices.read(name)) != theirs[name]]
        pulled = self._pulled(unlike).values if unlike else {}
        written = {name: difference(self.slices.read(name), pulled[name]) for name in pulled}
        return {name: each for name, each in written.items() if each is not None}

    def _take_from_servers(self, variables: Collection[str]) -> None:
        """Takes the servers' values for what has landed last, as no copy has been kept; keeps
        copies from now on.
        """
        self._copies = True
        self._drain()
        known = self._pipeline.versions
        pulled = self._pulled(None)
        if any(known.get(server, 0) != now for server, now in pulled.versions.items()):
            log.warning(
                "the first write into parameters of this lane (%s): other trainers have stepped "
                "since the last values came, so this trainer's values replace theirs in all of "
                "these parameters; from now on only what was written is assigned",
                ", ".join(sorted(variables)),
            )
        self.copy(self.slices.trained)
        self.note({name: pulled.values[name] for name in self.slices.slices_of(variables)})

    def _pulled(self, names: Collection[str] | None) -> Pulled:
        self.fetching = True
        try:
            return self._pipeline.pull(names)
        finally:
            self.fetching = False
