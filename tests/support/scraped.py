"""Metrics as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """One page.

    Args:
        text: of the page.
    """

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = [each for family in self.families for each in family.samples]

    @classmethod
    def of(cls, port: int, host: str = "127.0.0.1") -> Scraped:
        """The page of a process of this host."""
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as page:
            return cls(page.read().decode())

    def labels(self) -> list[Mapping[str, str]]:
        """Those of every sample."""
        return [sample.labels for sample in self._samples]

    def value(self, name: str, /, **labels: str) -> float:
        """Of the only sample of this name with these labels, among others."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, f"{name} {labels}: {len(found)} samples"
        return found[0]
