"""The constant labels of a process: which job, which run of it, which process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SHORT = 12  # digits of a fingerprint that name a job


class Labelled(Collector):
    """All metrics of some collectors, with more labels.

    Args:
        labels: called for each page.
        collectors: called for each page.
    """

    def __init__(
        self,
        labels: Callable[[], Mapping[str, str]],
        collectors: Callable[[], Iterable[Collector]],
    ) -> None:
        self._labels, self._collectors = labels, collectors

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`.  When something was first counted is not shown."""
        labels = self._labels()
        for collector in self._collectors():
            for metric in collector.collect():
                metric.samples = [
                    sample._replace(labels={**labels, **sample.labels})
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield metric


def public_name(incarnation: str) -> str:
    """What shows which start of a process it is, and does not tell the secret that its calls
    repeat.
    """
    return hashlib.sha256(incarnation.encode()).hexdigest()[:SHORT]


def job_labels(
    name: str, fingerprint: str, run: str, incarnation: str, process: str
) -> dict[str, str]:
    """The labels of all metrics of a process.

    Args:
        name: the job's, of PSERVER_JOB or ``--job``; "": the first digits of its plan's
            fingerprint.
        run: the same on all processes that have joined one another.
        incarnation: of this process.
        process: "server 0", "trainer 1".

    Example:
        >>> job_labels("", "0123456789abcdef", "r", "i", "server 0")["job"]
        '0123456789ab'
    """
    return {
        "job": name or fingerprint[:SHORT],
        "run": run,
        "incarnation": incarnation,
        "process": process,
    }


def build_info(torch: str) -> Metric:
    """What a process runs.

    Args:
        torch: its version.
    """
    try:
        own = version("pserver")
    except PackageNotFoundError:  # a folder that nobody has installed
        own = ""
    return current(
        "pserver_build_info",
        "Versions; always 1.",
        {(own, python_version(), torch): 1.0},
        *("pserver", "python", "torch"),
    )


def current(
    name: str, documentation: str, values: Mapping[tuple[str, ...], float], *labels: str
) -> Metric:
    """A gauge, or with a name that ends with "_total" a counter, as it is now.

    Args:
        values: by the values of the labels.

    Example:
        >>> [sample.value for sample in current("rows", "", {("emb",): 3.0}, "table").samples]
        [3.0]
    """
    counted = name.endswith("_total")
    kind = "counter" if counted else "gauge"
    metric = Metric(name.removesuffix("_total"), documentation, kind)
    metric.samples = [
        Sample(name, dict(zip(labels, key, strict=True)), value) for key, value in values.items()
    ]
    return metric
