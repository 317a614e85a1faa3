"""Histograms, with the buckets that all processes share, so that they can be added up."""

from __future__ import annotations

from prometheus_client import Histogram

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


def in_seconds(name: str, documentation: str, *labels: str) -> Histogram:
    """A histogram of durations from half a millisecond to two minutes."""
    return Histogram(name, documentation, labels, registry=None, buckets=SECONDS)


def in_steps(name: str, documentation: str, *labels: str) -> Histogram:
    """A histogram of numbers of steps."""
    return Histogram(name, documentation, labels, registry=None, buckets=STEPS)
