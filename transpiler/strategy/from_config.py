"""From a transpiler's configuration, and a strategy where there is one, to the lanes of a job.

A configuration without a strategy is turned into the equivalent strategy, so that both lead to a
plan in one way.  With a strategy the configuration decides how programs are cut, and its settings
of modes must agree with the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from transpiler.distribute_config import LANE_FIELDS, NOT_SYNC, DistributeTranspilerConfig
from transpiler.plan.plan import Lane
from transpiler.plan.planner import LanePlan
from transpiler.plan.settings import A_SYNC_CONFIGS
from transpiler.strategy.fields import ASyncConfigs
from transpiler.strategy.from_strategy import ineffective, lanes_of
from transpiler.strategy.refusals import check
from transpiler.strategy.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a configuration and a strategy for a job with servers.

    Attributes:
        lanes: of its parameters and tables.
        runtime_split_send_recv, soft_wait_ms, wait_port: of a trainer's deployment.
        overlap: gradients must leave while backward runs.
    """

    lanes: LanePlan
    runtime_split_send_recv: bool
    soft_wait_ms: int
    wait_port: bool
    overlap: bool


def choices_of(
    config: DistributeTranspilerConfig,
    sync_mode: bool | None = None,
    strategy: DistributedStrategy | None = None,
) -> Choices:
    """The choices of a configuration, and a strategy if there is one.

    Args:
        sync_mode, strategy: the arguments of ``transpile``.

    Raises:
        TypeError: ``sync_mode`` or ``strategy`` has another type.
        ValueError: two settings contradict each other, or one has no effect; the message names all
            of them.
    """
    said = config.sync_requested(sync_mode)
    if strategy is None:
        return _by_configuration(config, said)
    check(strategy, "program")
    lanes, settings = lanes_of(strategy), strategy.a_sync_configs
    found = list(_contradictions(config, said, strategy, lanes))
    if settings["embeddings"]:
        found.append(
            "strategy.a_sync_configs['embeddings'] acts in fleet.init only: capture a model that "
            "has DistributedEmbedding, or nn.Embedding(sparse=True)"
        )
    if found:
        raise ValueError("; ".join(found))
    return Choices(
        lanes,
        config.runtime_split_send_recv or settings["runtime_split_send_recv"],
        settings["soft_wait_ms"],
        config.wait_port and settings["launch_barrier"],
        settings["overlap"],
    )


def _by_configuration(config: DistributeTranspilerConfig, said: bool | None) -> Choices:
    strategy = _strategy_of(config, said)
    if found := ineffective(strategy):
        raise ValueError("; ".join(map(_of_configuration, found)))
    lanes = LanePlan(
        tuple(
            (pattern, _with_queue(lane, config.send_queue_size))
            for pattern, lane in lanes_of(strategy).choices
        )
    )
    if config.runtime_split_send_recv and said is None and not config.completely_not_async:
        if all(lane.kind.merges_gradients for _, lane in lanes.choices):
            raise ValueError(
                "runtime_split_send_recv=True contradicts sync_mode=True, its default: assign "
                "sync_mode=False"
            )
    waits = config.wait_port and config.launch_barrier
    split = config.runtime_split_send_recv
    return Choices(lanes, split, config.soft_wait_ms, waits, config.overlap)


def _with_queue(lane: Lane, slots: int) -> Lane:
    """The lane with the configuration's queue, whose default is not the strategy's."""
    reads = lane.mode in A_SYNC_CONFIGS["send_queue_size"].modes
    return replace(lane, send_queue_size=slots) if reads else lane


def _strategy_of(config: DistributeTranspilerConfig, said: bool | None) -> DistributedStrategy:
    """The strategy that is equivalent to a configuration."""
    keys = [key for key in LANE_FIELDS if key not in ("runtime_split_send_recv", "launch_barrier")]
    configs: dict[str, Any] = {key: getattr(config, key) for key in keys if config.is_set(key)}
    if config.geo_sgd_mode:
        configs["k_steps"] = config.geo_sgd_need_push_nums
    if config.enable_dc_asgd:
        configs.setdefault("dc_asgd", 1.0)
    if config.completely_not_async:
        configs.pop("half_async", None)
    strategy = DistributedStrategy()
    strategy.a_sync = not config.completely_not_async and (
        said is False or any(getattr(config, name) for name in NOT_SYNC)
    )
    strategy.a_sync_configs = cast(ASyncConfigs, configs)
    return strategy


def _of_configuration(sentence: str) -> str:
    """A sentence about a strategy, in the words of a configuration."""
    words = {
        "a_sync_configs: ": "",
        "a_sync=False": "sync_mode=True",
        "a_sync=True": "sync_mode=False",
    }
    for old, new in words.items():
        sentence = sentence.replace(old, new)
    return sentence


def _contradictions(
    config: DistributeTranspilerConfig,
    said: bool | None,
    strategy: DistributedStrategy,
    lanes: LanePlan,
) -> Iterator[str]:
    """A sentence for each assigned field that contradicts the strategy; it names both."""
    settings: Mapping[str, Any] = strategy.a_sync_configs
    sync = all(lane.kind.merges_gradients for _, lane in lanes.choices)
    decides = "a_sync_configs['modes']" if settings["modes"] else "a_sync"
    of_sync = f"{decides}={settings['modes'] or strategy.a_sync!r}"

    def differs(field: str, other: str) -> str:
        own = getattr(config, field)
        return f"{field}={own!r} contradicts strategy.{other}: leave one of them out"

    if said is not None and said != sync:
        yield f"sync_mode={said} contradicts strategy.{of_sync}: leave one of them out"
    if config.completely_not_async and not sync:
        yield differs("completely_not_async", of_sync)
    if config.is_set("wait_port") and config.wait_port != settings["launch_barrier"]:
        yield differs("wait_port", f"a_sync_configs['launch_barrier']={settings['launch_barrier']}")
    beside = {"geo_sgd_mode": "k_steps", "enable_dc_asgd": "dc_asgd"}
    for field, key in beside.items():
        if config.is_set(field) and getattr(config, field) != bool(settings[key]):
            yield differs(field, f"a_sync_configs[{key!r}]={settings[key]!r}")
    if config.geo_sgd_mode and config.geo_sgd_need_push_nums != settings["k_steps"]:
        yield differs("geo_sgd_need_push_nums", f"a_sync_configs['k_steps']={settings['k_steps']}")
    for key in LANE_FIELDS:
        # a program may be cut at run time in modes where a strategy cannot choose that
        alike = key == "runtime_split_send_recv" and not settings[key]
        if config.is_set(key) and getattr(config, key) != settings[key] and not alike:
            yield differs(key, f"a_sync_configs[{key!r}]={settings[key]!r}")
