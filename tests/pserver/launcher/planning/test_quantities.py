"""What a user types."""

from __future__ import annotations

import pytest

from pserver.launcher.planning.cost import bandwidth, latency, memory


def test_units_are_those_of_links_clocks_and_kubernetes() -> None:
    """Bits of links count by thousands, and are bytes afterwards."""
    assert (bandwidth("--link", "200Mbit"), bandwidth("--link", "2.5Gbit")) == (25e6, 312.5e6)
    assert (latency("--latency", "200us"), latency("--latency", "1 s")) == (
        pytest.approx(0.0002),
        1.0,
    )
    assert (memory("--memory", "8Gi"), memory("--memory", "1G")) == (8 * 2**30, 10**9)


@pytest.mark.parametrize("text", ["", "10", "Gbit", "-1Gbit", "0Mbit", "1GB", "1e3Mbit"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    """The flag is named."""
    with pytest.raises(ValueError, match=r"--link: expected a rate as 200Mbit or 1Gbit, got"):
        bandwidth("--link", text)
