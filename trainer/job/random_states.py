"""The states of a trainer's random sources, in a form for checkpoints: torch's on the CPU and on
its GPU, and the global ones of random and numpy.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The present states, as JSON can hold them."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state().numpy()),
        # an unused GPU has no state, and asking for it would take GPU memory
        "cuda": _text(torch.cuda.get_rng_state().numpy()) if _uses_gpu() else None,
        "random": [version, _text(np.array(words, np.uint32)), gauss],
        "numpy": [kind, _text(keys), position, has_gauss, cached],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores the states that :func:`random_states` gave."""
    torch.set_rng_state(torch.from_numpy(_array(states["torch"], np.uint8)))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(states["cuda"], np.uint8)))
    version, words, gauss = states["random"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, _array(keys, np.uint32), *rest))


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's own


def _text(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _array(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
