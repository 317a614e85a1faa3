"""From a strategy to lanes: the update mode of each parameter.

============================================  =====================================================
strategy                                      the mode of all parameters
============================================  =====================================================
none, or ``a_sync=False``                     sync
``a_sync=True``                               async
and ``half_async=True``                       half_async
and ``staleness=s``, ``dc_asgd=lambda``       async with these; ``staleness=0`` is sync
and ``k_steps=k``                             geo; with ``outer_optimizer`` diloco
============================================  =====================================================

In mode "collective", which only ``modes`` gives, servers hold no part of a step: trainers average
the gradients among themselves.

With ``modes`` the first pattern that a parameter's name matches (as a file name of a shell: ``*``,
``?``, ``[...]``; case counts) gives its mode, and parameters that match none have the strategy's
own.  The other keys are the settings of every lane whose mode reads them; a key that no lane reads
raises an error that names the key and what decides the mode.  One error names all such keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transpiler.ir.rules import Rule
from transpiler.plan.modes import ASYNC, COLLECTIVE, DILOCO, GEO, HALF_ASYNC, SYNC, Mode, mode_of
from transpiler.plan.plan import Lane
from transpiler.plan.planner import AUTO, LanePlan, uniform
from transpiler.plan.settings import A_SYNC_CONFIGS, LANE_SETTINGS
from transpiler.strategy.strategy import DistributedStrategy, every_setting

_K_STEPS = ("k_step", "k_steps")  # as a mode: geo, or diloco


def _set_keys(strategy: DistributedStrategy) -> list[str]:
    """The keys of ``a_sync_configs`` that differ from their defaults."""
    return [
        name.removeprefix("a_sync_configs.")
        for name in strategy.unsupported(())
        if name.startswith("a_sync_configs.")
    ]


def _own(strategy: DistributedStrategy) -> tuple[Mode, str]:
    """The mode of parameters that no pattern names, and the setting that chose it."""
    settings = strategy.a_sync_configs
    if not strategy.a_sync:
        return SYNC, "a_sync=False"
    if settings["half_async"]:
        return HALF_ASYNC, "half_async=True"
    if settings["k_steps"]:
        chosen = f"k_steps={settings['k_steps']}"
        outer = settings["outer_optimizer"]
        return (DILOCO, f"{chosen} with outer_optimizer") if outer else (GEO, chosen)
    if settings["staleness"] == 0:
        return ASYNC, "staleness=0"
    return ASYNC, "a_sync=True with k_steps=0"


def _choices(strategy: DistributedStrategy) -> Iterator[tuple[str, Mode]]:
    """(pattern, mode), ending in ``"*"``."""
    settings = strategy.a_sync_configs
    outer = settings["outer_optimizer"]
    for pattern, word in settings["modes"].items():
        yield pattern, (DILOCO if outer else GEO) if word in _K_STEPS else mode_of(word)
        if pattern == "*":
            return
    yield "*", _own(strategy)[0]


def modes_of(strategy: DistributedStrategy) -> tuple[str, ...]:
    """The names of the modes that a strategy gives to some parameters."""
    modes = (_effective(mode, strategy.a_sync_configs) for _, mode in _choices(strategy))
    return tuple(dict.fromkeys(mode.name for mode in modes))


def outer_rule(settings: Mapping[str, Any]) -> Rule:
    """The update rule of an ``outer_optimizer``.

    Args:
        settings: its type, lr and momentum.

    Raises:
        ValueError: Nesterov without momentum, or Adam with it.
    """
    kind, momentum = settings["type"], settings["momentum"]
    said = f"a_sync_configs['outer_optimizer']: type={kind!r} with momentum={momentum:g}"
    if kind == "adam":
        if momentum:
            raise ValueError(f"{said}: expected no momentum, which Adam calls beta1")
        return Rule(
            "adam",
            {"lr": settings["lr"], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
            {"amsgrad": False},
        )
    if kind == "nesterov" and not momentum:
        raise ValueError(f"{said}: expected a momentum above 0")
    hparams = {"lr": settings["lr"], "momentum": momentum, "dampening": 0.0, "weight_decay": 0.0}
    return Rule("momentum" if momentum else "sgd", hparams, {"nesterov": kind == "nesterov"})


def _effective(mode: Mode, settings: Mapping[str, Any]) -> Mode:
    """The mode that a lane gets: async with a staleness of 0 is sync."""
    return SYNC if mode is ASYNC and settings["staleness"] == 0 else mode


def _lane(mode: Mode, settings: Mapping[str, Any], scale: str) -> Lane:
    mode = _effective(mode, settings)
    values: dict[str, Any] = {"merge": AUTO}
    if mode.merges_gradients:
        values["gradient_scale"] = scale
    for setting in LANE_SETTINGS:
        if mode.name in setting.modes:
            value = settings[setting.key]
            values[setting.lane] = outer_rule(value) if setting.lane == "outer" else value
    return Lane(mode.name, **values)


def _has_effect(key: str, modes: Sequence[Mode], own: Mode, settings: Mapping[str, Any]) -> bool:
    """Whether a key of ``a_sync_configs`` has an effect in a job of these modes.

    Args:
        modes: of all parameters; ``own``: of those that no pattern names.
    """
    if key == "half_async" and own is not HALF_ASYNC:  # it chooses the strategy's own mode
        return False
    if key == "staleness" and settings[key] == 0:  # it makes sync mode of async
        return ASYNC in modes
    read_by = A_SYNC_CONFIGS[key].modes
    return any(_effective(mode, settings).name in read_by for mode in modes)


def _lacking(pattern: str, mode: Mode, settings: Mapping[str, Any]) -> str:
    """The error about a setting that a mode of ``modes`` needs; "" if nothing is missing."""
    word = settings["modes"].get(pattern)
    if word is None:
        return ""
    said = f"a_sync_configs: modes[{pattern!r}]={word!r} needs"
    if mode.steps_on_trainer and not settings["k_steps"]:
        return f"{said} k_steps above 0, got k_steps=0"
    if mode.outer_optimizer and not settings["outer_optimizer"]:
        return f"{said} an outer_optimizer, got none"
    return ""


def is_async_unasked(strategy: DistributedStrategy) -> bool:
    """Whether a job is async because ``a_sync`` is True in every new strategy, and nothing that the
    script has assigned says that it knows: neither ``a_sync``, nor a key that sync mode does not
    read.

    Example:
        >>> is_async_unasked(DistributedStrategy())
        True
    """
    knows = [
        "a_sync",
        "a_sync_configs.modes",
        *(
            f"a_sync_configs.{key}"
            for key, each in A_SYNC_CONFIGS.items()
            if SYNC.name not in each.modes
        ),
    ]
    return _own(strategy)[0] is ASYNC and not any(map(strategy.is_set, knows))


def ineffective(strategy: DistributedStrategy) -> list[str]:
    """The settings that have no effect in the modes of a job, or lack another one.

    Returns:
        A sentence for each of them; empty where all act.
    """
    settings: Mapping[str, Any] = strategy.a_sync_configs
    choices = list(_choices(strategy))
    own, chosen = _own(strategy)
    modes = list(dict.fromkeys(mode for _, mode in choices))
    effective = list(dict.fromkeys(_effective(mode, settings).name for mode in modes))
    by = f"modes={dict(settings['modes'])!r}" if settings["modes"] else chosen
    found = [said for pattern, mode in choices if (said := _lacking(pattern, mode, settings))]
    patterns = list(settings["modes"])
    if behind := patterns[patterns.index("*") + 1 :] if "*" in patterns else []:
        found.append(
            f"a_sync_configs['modes']: {', '.join(map(repr, behind))}: has no effect behind '*', "
            "which matches every parameter; the first pattern that matches counts: put '*' last"
        )
    found += [
        f"a_sync_configs: {key}={settings[key]!r} has no effect with {by}, which makes the mode "
        f"{', '.join(effective)}; {_readers(key)}"
        for key in _set_keys(strategy)
        if not _has_effect(key, modes, own, settings)
    ]
    if "outlier_factor" in _set_keys(strategy) and settings["outlier_push"] == "off":
        found.append(
            f"a_sync_configs: outlier_factor={settings['outlier_factor']!r} has no effect with "
            "outlier_push='off', which checks no norms; set 'refuse', 'apply' or 'stop'"
        )
    if strategy.gradient_scale_configs["scale_strategy"] != "avg" and COLLECTIVE in modes:
        found.append(
            "strategy.gradient_scale_configs.scale_strategy: servers scale what they merge, and "
            "mode 'collective' averages gradients among the trainers; leave one of the two out"
        )
    return [*found, *_of_other_modes(strategy, effective, by)]


# What to write in these modes instead.
_INSTEAD = {
    "fp16_allreduce": "; compression={'*': 'float16'} of fleet.distributed_optimizer sends "
    "gradients to servers as float16"
}


def _of_other_modes(strategy: DistributedStrategy, modes: Sequence[str], by: str) -> Iterator[str]:
    """A sentence for each setting beside ``a_sync_configs`` that none of the job's modes reads."""
    settings = dict(every_setting())
    for name in strategy.unsupported(()):
        read_by = () if name.startswith("a_sync") else settings[name].modes
        if read_by and not set(read_by) & set(modes):
            yield (
                f"strategy.{name}: has no effect with {by}, which makes the mode "
                f"{', '.join(dict.fromkeys(modes))}; it is read in mode {', '.join(read_by)}"
                f"{_INSTEAD.get(name, '')}"
            )


def _readers(key: str) -> str:
    if key == "half_async":
        return "it chooses the strategy's own mode, beside a_sync=True"
    return f"it is read in mode {', '.join(A_SYNC_CONFIGS[key].modes)}"


def lanes_of(strategy: DistributedStrategy | None) -> LanePlan:
    """The lanes that a strategy asks for; see the module's docstring.

    Args:
        strategy: None is sync mode for all parameters.

    Raises:
        ValueError: keys contradict each other, or have no effect in any of the modes; the message
            names all of them.
    """
    if strategy is None:
        return uniform(Lane(SYNC.name))
    if found := ineffective(strategy):
        raise ValueError("; ".join(found))
    scale = strategy.gradient_scale_configs["scale_strategy"]
    return LanePlan(
        tuple(
            (pattern, _lane(mode, strategy.a_sync_configs, scale))
            for pattern, mode in _choices(strategy)
        )
    )
