"""The order of the samples in one pass over a DataLoader: the same in every process.

The loader's sampler, or batch sampler, decides which samples there are.  It draws with the random
sources of :mod:`trainer.samplers.shared_randomness`.  It may also draw from a source of its own, so
its draws are compared between the trainers (:mod:`trainer.samplers.passes`): no trainer uses
another order.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from trainer.samplers.passes import Compare
from trainer.samplers.shared_randomness import SharedRandomness

SAME_BATCHES = (
    "every trainer must read the same batches in the same order, of which fleet.shard gives each "
    "its part: draw from torch's, random's or numpy's global generator, which fleet.shard seeds, "
    "or seed alike on every trainer; iterate over data that is divided already without "
    "fleet.shard; and every trainer must call fleet.shard equally often"
)
# attributes that identify samplers that give a part only: torch's, and accelerate's
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))


def divides(sampler: Any) -> bool:
    """Whether a sampler, or the one inside a batch sampler, gives one rank's part only."""
    return any(
        getattr(sampler, size, 1) not in (None, 1) and hasattr(sampler, place)
        for size, place in _PARTS
    ) or (getattr(sampler, "sampler", None) is not None and divides(sampler.sampler))


def refuse_parts(sampler: Any) -> None:
    """Refuses a sampler that gives a part of the samples, of which the rest is not known.

    Raises:
        ValueError: it does; the message says what to write.
    """
    if divides(sampler) and type(sampler) is not DistributedSampler:
        raise ValueError(
            f"fleet.shard: expected a sampler of all samples, got {type(sampler).__name__}, which "
            "gives one rank's part: leave it out (DataLoader(data, batch_size, shuffle=True)), and "
            "fleet.shard gives each trainer its part; or keep it, and iterate over the loader "
            "without fleet.shard"
        )


def base_seed(sampler: Any, seed: int | None) -> int:
    """The seed of a loader's first pass: the caller's, that of the sampler's generator, or 0."""
    generator = _generator(sampler)
    return generator.initial_seed() if seed is None and generator is not None else seed or 0


def randomness_of(sampler: Any, seed: int) -> SharedRandomness:
    """The random sources that a sampler draws from, seeded."""
    return SharedRandomness(seed, _generator(sampler))


def _generator(sampler: Any) -> torch.Generator | None:
    """The generator of a sampler or loader, or of the sampler inside a batch sampler."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def drawn(
    sampler: Iterable[Any], samples: int, seed: int | None, number: int, compare: Compare
) -> Sequence[Any] | None:
    """All draws of a sampler in a pass.

    Args:
        samples: of the data set.
        seed: the caller's; with one even a loader in order is shuffled.
        number: of the pass.
        compare: see :meth:`~trainer.samplers.passes.Passes.compare`.

    Returns:
        Indices, or a batch sampler's lists; None for a sampler without a length, which may have no
        end: see :func:`drawn_by_and_by`.

    Raises:
        ValueError: another trainer has drawn something else.
    """
    base = base_seed(sampler, seed)
    if type(sampler) is DistributedSampler:
        order: Sequence[Any] = _whole(sampler, samples)
    elif _permutes(sampler, samples) or (seed is not None and _is_in_order(sampler, samples)):
        generator = torch.Generator().manual_seed((base + number) % 2**63)
        order = torch.randperm(samples, generator=generator).tolist()
    elif _is_in_order(sampler, samples):
        order = range(samples)
    elif _sized(sampler):
        with randomness_of(sampler, base + number):
            order = list(sampler)
    else:
        return None
    said = f"{len(order)} draws, checksum {checksum(order)}"
    compare(f"pass {number}", said, advice(sampler))
    return order


def drawn_by_and_by(
    sampler: Iterable[Any], many: int, seed: int | None, number: int, compare: Compare
) -> Iterator[list[Any]]:
    """The draws of a sampler in a pass, ``many`` at a time, the last ones fewer.

    Raises:
        ValueError: another trainer has drawn something else.
    """
    randomness = randomness_of(sampler, base_seed(sampler, seed) + number)
    with randomness:
        draws = iter(sampler)
    count = 0
    while True:
        with randomness:
            window = list(islice(draws, many))
        if not window:
            return
        count += 1
        if is_compared(count):
            said = f"draws, checksum {checksum(window)}"
            compare(f"pass {number}, step {count}", said, advice(sampler))
        yield window


def is_compared(count: int) -> bool:
    """Whether the ``count``-th of many draws is compared: 1, 2, 4, 8, ..."""
    return count & (count - 1) == 0


def _permutes(sampler: Any, samples: int) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == samples
    )


def _is_in_order(sampler: Any, samples: int) -> bool:
    return type(sampler) is SequentialSampler and len(sampler) == samples


def _sized(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def _whole(sampler: DistributedSampler[Any], samples: int) -> Sequence[int]:
    """The order that a DistributedSampler divides among its ranks, without the samples that it
    repeats or leaves out to make the parts equal.
    """
    if not sampler.shuffle:
        return range(samples)
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    return torch.randperm(samples, generator=generator).tolist()


def advice(sampler: Any) -> str:
    """The advice for trainers whose draws differ."""
    return (
        f"{type(sampler).__name__} must draw alike in every process: let it draw from torch's, "
        "random's or numpy's global generator, which fleet.shard seeds, or seed its own with the "
        "same number on every trainer; a sampler that gives each rank its part must be left out; "
        "and every trainer must call fleet.shard equally often"
    )


# ---- checksums ----

_SAMPLED_BYTES = 2**16  # of each tensor


def checksum(draws: Sequence[Any]) -> str:
    """The checksum of draws: of indices by their values, of anything else by its repr."""
    if isinstance(draws, range):
        return f"of {draws}"
    try:
        packed = array("q", draws).tobytes()
    except (TypeError, OverflowError):
        packed = repr([list(each) if isinstance(each, tuple) else each for each in draws]).encode()
    return f"{zlib.crc32(packed):08x}"


def checksum_of_batch(value: Any, start: int = 0) -> int:
    """The checksum of a batch's tensors, arrays, numbers and texts; of other objects by their
    types.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return zlib.crc32(str((value.dtype, tuple(value.shape))).encode(), start)
        start = zlib.crc32(str((value.dtype, tuple(value.shape))).encode(), start)
        flat = value.detach().cpu().contiguous().flatten()
        flat = flat[: _SAMPLED_BYTES // max(1, flat.element_size())]
        return zlib.crc32(flat.view(torch.uint8).numpy().data, start)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return zlib.crc32(value.tobytes()[:_SAMPLED_BYTES], start)
    if isinstance(value, dict):
        for key, item in value.items():
            start = checksum_of_batch(item, checksum_of_batch(key, start))
        return start
    if isinstance(value, list | tuple):
        for item in value:
            start = checksum_of_batch(item, start)
        return start
    plain = isinstance(value, str | bytes | int | float | None)
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode(), start)
