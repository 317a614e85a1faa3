"""What a script has said of its training, for whoever reads metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pserver.telemetry.metrics import current


class Reported(Collector):
    """What a trainer has reported: how many samples, and the last value of each name.

    Attributes:
        heard: told the values of each report.
    """

    def __init__(self) -> None:
        self.heard: Callable[[Mapping[str, float]], None] = lambda values: None
        self._samples = 0
        self._values: dict[str, float] = {}

    def add(self, samples: int, values: dict[str, float]) -> None:
        """Counts samples, and takes values in the place of those before."""
        self._samples += samples
        self._values = {**self._values, **values}
        self.heard(values)

    def now(self) -> tuple[int, dict[str, float]]:
        """The samples, and the last value of each name."""
        return self._samples, self._values

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        samples: dict[tuple[str, ...], float] = {(): float(self._samples)}
        yield current("pserver_samples_total", "Samples that this trainer has reported.", samples)
        yield current(
            "pserver_reported",
            "The last value that the script has reported under a name.",
            {(name,): value for name, value in self._values.items()},
            "name",
        )
