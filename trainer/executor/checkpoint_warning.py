"""Programs do not save by themselves, whatever the environment asks for."""

from __future__ import annotations

import logging
from functools import cache

from trainer.environment.environment import Connection

log = logging.getLogger(__name__)


def warn_of_checkpoint(connection: Connection) -> None:
    """Says so, once, where the environment asks for it."""
    if connection.checkpoint:
        _warn(connection.checkpoint)


@cache
def _warn(path: str) -> None:
    log.warning(
        "PSERVER_CHECKPOINT: programs do not save to %s by themselves: call Executor.save", path
    )
