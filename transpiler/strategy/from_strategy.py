"""From a strategy to lanes: which parameters travel in which mode.

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
raises, naming itself and what decides the mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transpiler.ir.rules import Rule
from transpiler.plan.lane_plan import AUTO, LanePlan, uniform
from transpiler.plan.lanes import READ
from transpiler.plan.plan import Lane
from transpiler.strategy.strategy import DistributedStrategy

# the others do not see the scale of a gradient, or see it squared
SUPPORTED: frozenset[str] = frozenset(
    {
        "a_sync",
        *(
            f"a_sync_configs.{key}"
            for key in (
                "k_steps",
                "max_merge_var_num",
                "send_queue_size",
                "independent_recv_thread",
                "min_send_grad_num_before_recv",
                "thread_pool_size",
                "send_wait_times",
                "launch_barrier",
                "runtime_split_send_recv",
                "merge",
                "half_async",
                "staleness",
                "dc_asgd",
                "outer_optimizer",
                "modes",
                "overlap",
                "embeddings",
            )
        ),
    }
)


# ---- strategies ----


def _set_keys(strategy: DistributedStrategy) -> list[str]:
    """The keys of ``a_sync_configs`` that are not as by default."""
    return [
        name.removeprefix("a_sync_configs.")
        for name in strategy.unsupported(())
        if name.startswith("a_sync_configs.")
    ]


def _own(strategy: DistributedStrategy) -> tuple[str, str]:
    """The mode of parameters that no pattern names, and what chose it."""
    settings = strategy.a_sync_configs
    if not strategy.a_sync:
        return "sync", "a_sync=False"
    if settings["half_async"]:
        return "half_async", "half_async=True"
    if settings["k_steps"]:
        chosen = f"k_steps={settings['k_steps']}"
        return (
            ("diloco", f"{chosen} with outer_optimizer")
            if settings["outer_optimizer"]
            else ("geo", chosen)
        )
    if settings["staleness"] == 0:
        return "async", "staleness=0"
    return "async", "a_sync=True with k_steps=0"


def _words(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
    """(pattern, mode), ending in ``"*"``."""
    settings = strategy.a_sync_configs
    for pattern, word in settings["modes"].items():
        kept = word
        if word in ("k_step", "k_steps"):
            kept = "diloco" if settings["outer_optimizer"] else "geo"
        if kept in ("geo", "diloco") and not settings["k_steps"]:
            raise ValueError(
                f"a_sync_configs: modes[{pattern!r}]={word!r} needs k_steps above 0, got k_steps=0"
            )
        if kept == "diloco" and not settings["outer_optimizer"]:
            raise ValueError(
                f"a_sync_configs: modes[{pattern!r}]={word!r} needs an outer_optimizer, got none"
            )
        yield pattern, kept
        if pattern == "*":
            return
    yield "*", _own(strategy)[0]


def outer_rule(settings: Mapping[str, Any]) -> Rule:
    """The update rule of an ``outer_optimizer``.

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


def _lane(word: str, settings: Mapping[str, Any]) -> Lane:
    if word == "async" and settings["staleness"] == 0:
        word = "sync"
    values = {name: settings[name] for name in READ[word] if name != "outer"}
    outer = outer_rule(settings["outer_optimizer"]) if word == "diloco" else None
    return Lane(word, **{"merge": AUTO, **values}, outer=outer)


def _read(words: Sequence[str], own: str, staleness: int | None) -> set[str]:
    """The keys of ``a_sync_configs`` that have an effect in a job of these modes."""
    barred = staleness == 0 and "async" in words  # async with a staleness of 0 is sync
    read = {name for word in words for name in READ["sync" if barred and word == "async" else word]}
    read |= {"modes", "launch_barrier", "embeddings"} | ({"staleness"} if barred else set())
    read |= {"outer_optimizer"} if "diloco" in words else set()
    read |= {"overlap"} if set(words) - {"geo", "diloco"} else set()
    # where gradients queue, they can be cut later
    read |= {"runtime_split_send_recv"} if read & {"merge"} else set()
    return read | ({"half_async"} if own == "half_async" and own in words else set())


def _check_read(strategy: DistributedStrategy, words: Sequence[str]) -> None:
    """Whether each key that was set has an effect."""
    settings = strategy.a_sync_configs
    own, chosen = _own(strategy)
    read = _read(words, own, settings["staleness"])
    for key in _set_keys(strategy):
        if f"a_sync_configs.{key}" not in SUPPORTED:
            raise ValueError(
                f"a_sync_configs[{key!r}]: this version has no such effect yet; leave it at its "
                "default"
            )
        if key not in read:
            by = f"modes={dict(settings['modes'])!r}" if settings["modes"] else chosen
            raise ValueError(
                f"a_sync_configs: {key}={settings[key]!r} has no effect with {by}, which makes "
                f"the mode {', '.join(words)}"
            )


def lanes_of(strategy: DistributedStrategy | None) -> LanePlan:
    """The lanes that a strategy asks for; see the module's docstring.  Without a strategy a job is
    sync.

    Raises:
        ValueError: two keys contradict each other, or one has no effect in any of the modes; the
            message names both.
    """
    if strategy is None:
        return uniform(Lane("sync"))
    chosen = list(_words(strategy))
    words = list(dict.fromkeys(word for _, word in chosen))
    _check_read(strategy, words)
    return LanePlan(
        tuple((pattern, _lane(word, strategy.a_sync_configs)) for pattern, word in chosen)
    )
