"""Captures of small models, without the cache that torch has for large ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def uncached() -> Iterator[None]:
    """What torch keeps of each traced op pays from the second layer of a kind on; models of one
    layer are captured in four fifths of the time without it.
    """
    import torch._dynamo.config  # loads the compiler: not where no test of such a file runs

    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):  # type: ignore[attr-defined]
        yield
