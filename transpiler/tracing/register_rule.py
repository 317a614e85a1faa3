"""register_rule: update rules that users write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transpiler.ir.rule_optimizer import RuleOptimizer, Update
from transpiler.ir.rules import (
    RULES,
    Hparam,
    Registered,
    Rule,
    check_registered,
    registered,
)
from transpiler.ir.update_block import NORMS, states_of
from transpiler.plan.settings import check_flag

Optimizer = type[torch.optim.Optimizer]


def register_rule(
    cls: Optimizer | None = None,
    *,
    state: Sequence[str] = (),
    scalars: Sequence[str] = (),
    hparams: Mapping[str, float | Sequence[float]],
    norms: bool = False,
) -> Callable[[Callable[..., Any]], Optimizer]:
    """Registers an update rule, so that servers can run it.

    The decorated function is ``update(param, grad, state, hparams)``.  It returns the new parameter
    and a dict of the new states; without states the new parameter alone.  It is pure, and works
    element by element.  It is captured once, here, as a list of ops; servers get the list and never
    the function.  Trainers that run by themselves, and a single process, run the same list.

    Call it in every trainer, before the optimizer is wrapped or captured.  Servers need no call.

    Args:
        cls: the optimizer class whose ``step`` does the same; two steps of it are compared with the
            function's, to the bit.  None: a class is made that takes the hparams as keyword
            arguments.
        state: names of states of the parameter's shape and dtype.
        scalars: names of states that are one float32 number, such as "step".  All states begin as
            0; those of ``cls`` have the same names.
        hparams: name -> default: a number, or a tuple of numbers.  They are keys of the parameter
            groups, and a schedule may move them.
        norms: whether the update may use the sum, mean, norm, max or min of a whole tensor.  A
            parameter with such a rule is kept whole on one server.

    Returns:
        The decorator, which returns the optimizer class.

    Raises:
        TypeError: ``norms`` is not a bool.
        ValueError: the update is not a list of ops that a server accepts; the message names the
            line.  Or the steps of ``cls`` differ.

    Example::

        @register_rule(state=["velocity"], hparams={"lr": 0.01, "beta": 0.9})
        def SignMomentum(param, grad, state, hparams):
            velocity = hparams["beta"] * state["velocity"] + (1 - hparams["beta"]) * grad
            return param - hparams["lr"] * torch.sign(velocity), {"velocity": velocity}

        optimizer = SignMomentum(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    """
    check_flag("register_rule: norms", norms)
    given: dict[str, Hparam] = {
        name: tuple(map(float, value)) if isinstance(value, Iterable) else float(value)
        for name, value in hparams.items()
    }

    def register(update: Callable[..., Any]) -> Optimizer:
        # it loads torch's compiler front end
        from transpiler.tracing.trace_rule import trace_rule

        name = re.sub(r"\W", "_", cls.__name__ if cls is not None else update.__name__)[:64]
        if cls is not None and any(cls is spec.cls for spec in RULES.values()):
            raise ValueError(f"register_rule: {name} has a rule already")
        try:
            block = trace_rule(update, state, scalars, given)
            rule = Rule(f"registered.{name}", given, {}, block)
            check_registered(rule)
        except ValueError as error:
            raise ValueError(f"register_rule, {name}: {error}") from error
        found = next((op for op in block.ops if op.type in NORMS), None)
        if found is not None and not norms:
            raise ValueError(
                f"register_rule, {name}: {found.location}: the update computes a number of a whole "
                "tensor, so no parameter of it may be cut: set norms=True"
            )
        if cls is not None:
            _compare(cls, rule)
        result = _made(name, rule) if cls is None else cls
        registered[result] = Registered(rule.type, block)
        return result

    return register


def _made(name: str, rule: Rule) -> Optimizer:
    """An optimizer class that runs the rule."""

    def __init__(self: RuleOptimizer, params: Iterable[Any], **hparams: Hparam) -> None:
        odd = sorted(set(hparams) - set(rule.hparams))
        if odd:
            known = ", ".join(rule.hparams) or "none"
            raise TypeError(f"{name}: expected keyword arguments among {known}; got {odd[0]}")
        assert rule.update is not None
        RuleOptimizer.__init__(self, params, rule.update, {**rule.hparams, **hparams})

    return type(name, (RuleOptimizer,), {"__init__": __init__})


def _compare(cls: Callable[..., torch.optim.Optimizer], rule: Rule) -> None:
    """Takes two steps of the class and of the rule.

    Raises:
        ValueError: they differ, or the class keeps other states.
    """
    assert rule.update is not None
    shaped, update = states_of(rule.update), Update(rule.update)
    param = torch.linspace(-1.0, 1.0, 6).requires_grad_()
    mine, states = param.detach().clone(), dict[str, Tensor]()
    for name, like in shaped.items():
        states[name] = torch.zeros(6) if like else torch.zeros(())
    optimizer = cls([param], **rule.hparams)
    for step in (1, 2):
        param.grad = torch.linspace(0.5, -0.7, 6) / step
        with torch.no_grad():
            results = update(mine, param.grad, states, rule.hparams)
        optimizer.step()
        mine, states = results.pop("param"), results
        kept = {
            key: torch.as_tensor(value)
            for key, value in optimizer.state[param].items()
            if value is not None
        }
        if set(kept) != set(states):
            raise ValueError(
                f"register_rule, {rule.type}: expected the class's states "
                f"{', '.join(sorted(kept)) or 'none'}, got {', '.join(sorted(states)) or 'none'}"
            )
        pairs = {"param": (param.detach(), mine)}
        pairs |= {name: (kept[name], value) for name, value in states.items()}
        for name, (theirs, own) in pairs.items():
            if theirs.shape != own.shape or not torch.equal(theirs.to(own.dtype), own):
                raise ValueError(
                    f"register_rule, {rule.type}: after step {step} of the class, {name!r} is "
                    f"{theirs.tolist()}, and of the update {own.tolist()}"
                )
