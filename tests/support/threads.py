"""Plays of several trainers of one process, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from tests.support.load import patiently

PATIENCE = 60.0  # seconds for what several trainers do side by side


def at_once(*plays: Callable[[], Any]) -> list[Any]:
    """Calls each in a thread of its own; returns their results, or raises the first failure."""
    pool = ThreadPoolExecutor(len(plays))
    try:
        running: list[Future[Any]] = [pool.submit(_with_one_thread, play) for play in plays]
        done = patiently(lambda left: wait(running, left, FIRST_EXCEPTION).done or False, PATIENCE)
        for each in done or ():
            each.result()
        return [each.result(timeout=0) for each in running]
    finally:
        pool.shutdown(wait=False)


def _with_one_thread(play: Callable[[], Any]) -> Any:
    torch.set_num_threads(1)
    return play()
