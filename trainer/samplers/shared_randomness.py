"""The random sources of a pass over data: the same numbers in every process, while data is drawn.

A sampler draws from torch's, random's or numpy's global generator, or from a torch.Generator that
it was given.  Inside the context these are seeded by the pass; outside they have the script's own
states, unchanged.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_LARGEST = 2**63  # seeds are below; numpy's below 2**32


class SharedRandomness:
    """A context in which the random sources continue a pass's own sequence.

    It may be entered repeatedly: each time continues where the last one ended.

    Args:
        seed: of the pass, the same on every trainer.
        generator: a sampler's own, or None.
    """

    def __init__(self, seed: int, generator: torch.Generator | None = None) -> None:
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]
        outside = self._states()
        for each in self._generators:
            each.manual_seed(seed % _LARGEST)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._own = self._states()
        self._restore(outside)

    def _states(self) -> tuple[Any, ...]:
        torchs = [generator.get_state() for generator in self._generators]
        return torchs, random.getstate(), np.random.get_state()

    def _restore(self, states: tuple[Any, ...]) -> None:
        torchs, of_random, of_numpy = states
        for generator, state in zip(self._generators, torchs, strict=True):
            generator.set_state(state)
        random.setstate(of_random)
        np.random.set_state(of_numpy)

    def __enter__(self) -> None:
        self._outside = self._states()
        self._restore(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = self._states()
        self._restore(self._outside)
