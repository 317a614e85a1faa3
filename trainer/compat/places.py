"""The devices that a process may compute on, by the original's names.

A process computes on one device, so a place is what an Executor takes as its ``device``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cpu_places(device_count: int | None = None) -> list[torch.device]:
    """The CPU, as a list of one place: torch computes on all cores of a process together.

    Args:
        device_count: 1, or None.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is another number.

    Example::

        executor = Executor(cpu_places()[0])
        executor.close()
    """
    if device_count is None:
        device_count = 1
    if not isinstance(device_count, int) or isinstance(device_count, bool):
        raise TypeError(f"cpu_places: expected a whole number, got {device_count!r}")
    if device_count != 1:
        raise ValueError(
            f"cpu_places: expected 1, got {device_count}: the CPU is one place of a process; "
            "several trainers are several processes (pserver launch --trainers)"
        )
    return [torch.device("cpu")]


def cuda_places(device_ids: Sequence[int] | None = None) -> list[torch.device]:
    """The GPUs of this process, as places.

    Args:
        device_ids: their numbers, among those that CUDA_VISIBLE_DEVICES leaves; None: all.

    Raises:
        TypeError: it is no list of whole numbers.
        ValueError: there is no such GPU.

    Example::

        place = cuda_places()[0] if torch.cuda.is_available() else cpu_places()[0]
        executor = Executor(place)
        executor.close()
    """
    count = torch.cuda.device_count()
    if device_ids is None:
        if not count:
            raise ValueError("cuda_places: expected a GPU, this process has none")
        return [torch.device("cuda", number) for number in range(count)]
    if isinstance(device_ids, str) or not isinstance(device_ids, Sequence):
        raise TypeError(f"cuda_places: expected a list of whole numbers, got {device_ids!r}")
    for number in device_ids:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"cuda_places: expected whole numbers, got {number!r}")
        if not 0 <= number < count:
            raise ValueError(
                f"cuda_places: expected the number of a GPU that exists, got {number} with "
                f"{count} GPUs"
            )
    return [torch.device("cuda", number) for number in device_ids]
