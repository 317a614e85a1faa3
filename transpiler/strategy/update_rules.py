"""The optimizers that replace the script's: ``lars``, ``lamb`` and ``adam_d2sum``.

==============  =====================  ========================================================
switch          in the place of        what it takes from it
==============  =====================  ========================================================
``lars``        SGD with momentum      rate and momentum
``lamb``        Adam                   rate, betas and eps
``adam_d2sum``  Adam                   the rate; its decays are its own
==============  =====================  ========================================================

The two optimizers share their groups, so schedulers keep working.  A group with some parameters
excluded from weight decay is divided: the excluded ones are a group of their own behind all others,
which follows the first one's rate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.dgc import FollowingOptimizer, Group
from transpiler.optim.optim import LAMB, LARS, AdamD2Sum
from transpiler.strategy.strategy import DistributedStrategy

log = logging.getLogger(__name__)

_BIASES = frozenset({".b", ".b_0"})  # endings of the original's names of biases


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of an optimizer by one switch.

    Attributes:
        replaces: the class, and no subclass.
        words: the replaced optimizer, for messages.
        cls: of the optimizer that steps.
        follows: the hparams that it takes from the replaced one.
        settings: hparam -> key of the switch's configuration.
        unset: options of the replaced optimizer that have no meaning for the new one, and what they
            must be.
    """

    replaces: type[torch.optim.Optimizer]
    words: str
    cls: type[FollowingOptimizer]
    follows: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    unset: Mapping[str, Any] = field(default_factory=dict)


_ADAM = {"weight_decay": 0, "amsgrad": False, "maximize": False}

REPLACEMENTS: Mapping[str, Replacement] = MappingProxyType(
    {
        "lars": Replacement(
            torch.optim.SGD,
            "torch.optim.SGD with momentum",
            LARS,
            ("lr", "momentum"),
            {"lars_coeff": "lars_coeff", "weight_decay": "lars_weight_decay", "eps": "epsilon"},
            {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False},
        ),
        "lamb": Replacement(
            torch.optim.Adam,
            "torch.optim.Adam",
            LAMB,
            ("lr", "betas", "eps"),
            {"weight_decay": "lamb_weight_decay"},
            _ADAM,
        ),
        "adam_d2sum": Replacement(
            torch.optim.Adam,
            "torch.optim.Adam",
            AdamD2Sum,
            ("lr",),
            unset={**_ADAM, "betas": (0.9, 0.999), "eps": 1e-8},
        ),
    }
)


def rule_contradictions(strategy: DistributedStrategy) -> list[str]:
    """A sentence for every two switches of which at most one can act, and for each configuration
    whose switch is off.
    """
    chosen = [name for name in REPLACEMENTS if getattr(strategy, name)]
    found = []
    if len(chosen) > 1:
        names = " and ".join(f"strategy.{name}" for name in chosen)
        found.append(f"{names}: each replaces the optimizer, so one of them can act; set one")
    for name in strategy.unsupported(()):
        switch = name.partition("_configs.")[0]
        if switch in REPLACEMENTS and switch != name and not getattr(strategy, switch):
            found.append(f"strategy.{name}: has no effect without {switch}=True")
    return found


def replaced(
    optimizer: torch.optim.Optimizer,
    strategy: DistributedStrategy | None,
    names: Mapping[Any, str],
    types: Mapping[str, str],
    apart: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer that replaces the given one by a strategy; otherwise the given one.

    Args:
        names: of its parameters.
        types: of the modules that have them, as ``module_types`` gives them.
        apart: the given optimizer stays in use, too, and keeps its groups as they are.

    Raises:
        ValueError: it is of another class than the switch replaces, or has options that have no
            meaning for the new one, or states.
    """
    switch = next((name for name in REPLACEMENTS if strategy and getattr(strategy, name)), None)
    if strategy is None or switch is None:
        return optimizer
    how = REPLACEMENTS[switch]
    _check(optimizer, switch, how)
    configs = getattr(strategy, f"{switch}_configs") if how.settings else {}
    settings = {name: configs[key] for name, key in how.settings.items()}
    patterns = configs.get("exclude_from_weight_decay", ())
    named = [(name, types.get(name, "")) for name in names.values()]
    excluded = {
        parameter: both[0]
        for parameter, both in zip(names, named, strict=True)
        if any(_matches(pattern, *both) for pattern in patterns)
    }
    pairs = _groups(optimizer, settings, excluded, apart)
    made: FollowingOptimizer = how.cls([group for _, group in pairs])  # type: ignore[call-arg]
    if not apart:
        optimizer.param_groups[:] = made.param_groups
        made.param_groups = optimizer.param_groups
    made.follow([leader for leader, _ in pairs], how.follows)
    # a scheduler that was made for the given one asks whether that one has stepped
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
    mine = {each for group in made.param_groups for each in group["params"]}
    spared = [name for parameter, name in excluded.items() if parameter in mine]
    if idle := [each for each in patterns if not any(_matches(each, *both) for both in named)]:
        log.warning(
            "strategy.%s_configs['exclude_from_weight_decay']: %s: no name of this optimizer's "
            "parameters, and no type of their modules, has this in it",
            switch,
            ", ".join(map(repr, idle)),
        )
    log.info(
        "strategy.%s: %s steps in place of %s; without weight decay: %s",
        switch,
        how.cls.__name__,
        type(optimizer).__name__,
        ", ".join(spared) or "nothing",
    )
    return made


def _matches(pattern: str, name: str, module_type: str) -> bool:
    """Whether a pattern excludes a parameter."""
    if pattern in _BIASES:
        return "bias" in name.rpartition(".")[2]
    return pattern in name or pattern in module_type


def _check(optimizer: torch.optim.Optimizer, switch: str, how: Replacement) -> None:
    cls = type(optimizer)
    without = how.cls is LARS and not all(g.get("momentum") for g in optimizer.param_groups)
    if cls is not how.replaces or without:
        got = f"{cls.__name__} without momentum" if cls is how.replaces else cls.__name__
        raise ValueError(
            f"strategy.{switch}: expected {how.words}, which {how.cls.__name__} replaces, got {got}"
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, value in how.unset.items():
            got = group.get(key, value)
            if (tuple(got) if isinstance(got, list) else got) != value:
                own = how.settings.get(key)
                instead = f", and set {switch}_configs[{own!r}]" if own else ""
                raise ValueError(
                    f"strategy.{switch}: group {index} of the optimizer: {key}: expected {value}, "
                    f"because {how.cls.__name__} does not read it, got {got}: leave it at its "
                    f"default{instead}"
                )
    if optimizer.state:
        raise ValueError(
            f"strategy.{switch}: expected an optimizer without states, because those of "
            f"{how.cls.__name__} differ, got states of {len(optimizer.state)} parameters"
        )


def _groups(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    excluded: Mapping[Tensor, str],
    apart: bool,
) -> list[tuple[Group, Group]]:
    """Each group with the one that it follows; excluded parameters have groups of their own."""
    pairs, divided = [], []
    for leader in optimizer.param_groups:
        group: Group = dict(leader) if apart else leader
        group.update(settings)
        spared = [each for each in group["params"] if each in excluded]
        if spared and len(spared) < len(group["params"]):
            group["params"] = [each for each in group["params"] if each not in excluded]
            divided.append((leader, {**group, "params": spared, "weight_decay": 0.0}))
        elif spared:
            group["weight_decay"] = 0.0
        pairs.append((leader, group))
    return [*pairs, *divided]
