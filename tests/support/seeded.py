"""Values of a seed, also where several threads make models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generator, which all threads share, is this thread's and starts at the seed."""
    with _LOCK:
        torch.manual_seed(seed)
        yield
