"""The settings of a strategy that concern a trainer alone: no server and no other trainer needs to
know them, so they are not part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from transpiler.strategy.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How one trainer sends.  Each field is a key of ``a_sync_configs``.

    Attributes:
        runtime_split_send_recv: steps queue whole, and each lane's sending thread cuts them into
            slices.
        soft_wait_ms: see [Note: how far ahead] in async_sender.py.
    """

    runtime_split_send_recv: bool = False
    soft_wait_ms: int = 50


def options_of(strategy: DistributedStrategy | None) -> SendOptions:
    """The options that a strategy asks for; without a strategy the defaults."""
    if strategy is None:
        return SendOptions()
    configs = strategy.a_sync_configs
    return SendOptions(**{field.name: configs[field.name] for field in fields(SendOptions)})
