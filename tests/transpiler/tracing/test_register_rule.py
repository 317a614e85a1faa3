"""register_rule: what is captured of an update, and what is refused at which line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.registered_rules import Lars, Lion
from trainer.sharding.optimizer import sharded_rule
from transpiler import register_rule
from transpiler.ir.rules import make, rule_of, state_of
from transpiler.ir.update_block import MOST_OPS

Update = Callable[..., Any]


def registered(update: Update, **settings: Any) -> type[torch.optim.Optimizer]:
    return register_rule(**{"hparams": {"lr": 0.1}, **settings})(update)


def test_the_rule_of_an_optimizer_is_its_block() -> None:
    """Names, present hparams and states; the update itself has no part in a step."""
    optimizer = Lion([torch.zeros(3, requires_grad=True)], lr=0.5)  # type: ignore[call-arg]
    optimizer.param_groups[0]["lr"] = 0.25
    rule = rule_of(optimizer, optimizer.param_groups[0])

    assert rule.type == "registered.Lion"
    assert rule.hparams == {"lr": 0.25, "betas": (0.9, 0.99)}
    assert state_of(rule) == {"exp_avg": True, "scale": True, "step": False}
    assert sharded_rule(optimizer, optimizer.param_groups[0]) == rule


def test_a_rule_with_norms_may_not_be_cut() -> None:
    """Where state is divided among trainers it is refused."""
    optimizer = Lars([torch.zeros(3, requires_grad=True)])

    with pytest.raises(ValueError, match="Lars needs norms of whole tensors"):
        sharded_rule(optimizer, optimizer.param_groups[0])


def test_a_step_is_the_updates() -> None:
    """The block computes what the function computes, of any shape and layout."""

    def update(param: Any, grad: Any, state: Any, hparams: Any) -> Any:
        old = 0.5 * state["old"] + grad.abs().sqrt()
        return torch.where(old > 0.1, param - hparams["lr"] * grad, grad), {"old": old}

    cls = registered(update, state=["old"])
    for shape in ((), (0,), (1,), (3, 5), (200, 400)):
        value = torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape)
        param = value.clone().requires_grad_()
        param.grad = torch.randn(shape[::-1])
        optimizer = cls([param])
        expected, state = param.detach().clone(), {"old": torch.zeros(shape[::-1])}
        for _ in range(3):
            optimizer.step()
            expected, state = update(expected, param.grad, state, {"lr": 0.1})

        assert torch.equal(param, expected), shape
        assert torch.equal(optimizer.state[param]["old"], state["old"]), shape


def test_an_element_has_one_result_wherever_it_is() -> None:
    """Parts of a tensor, and the whole of it under any number of threads."""
    value, grad = torch.randn(40_000), torch.randn(40_000)
    steps: list[torch.Tensor] = []
    for threads, cuts in ((1, [40_000]), (2, [40_000]), (1, [13, 7, 32_770, 7210])):
        torch.set_num_threads(threads)
        try:
            parts = [part.clone().requires_grad_() for part in value.split(cuts)]
            for part, own in zip(parts, grad.split(cuts), strict=True):
                part.grad = own.clone()
            Lion(parts).step()  # type: ignore[call-arg]
        finally:
            torch.set_num_threads(1)
        steps.append(torch.cat([part.detach() for part in parts]))

    assert torch.equal(steps[0], steps[1]) and torch.equal(steps[0], steps[2])


def test_numbers_that_python_refuses() -> None:
    """A rate of 0 divides to nan, on servers as here: it ends no process."""

    def update(param: Any, grad: Any, state: Any, hparams: Any) -> Any:
        return param - grad * (1 / hparams["lr"]) + (hparams["lr"] - 1) ** 0.5

    for rate, finite in ((4, True), (0.0, False), (0.5, False)):
        param = torch.ones(2, requires_grad=True)
        param.grad = torch.ones(2)
        registered(update)([param], lr=rate).step()  # type: ignore[call-arg]

        assert bool(param.isfinite().all()) is finite


def test_old_values_may_change_places() -> None:
    """A new value that is another's old one is that, in whatever order they are written."""

    def update(param: Any, grad: Any, state: Any, hparams: Any) -> Any:
        return state["a"], {"a": state["b"], "b": param}

    param = torch.ones(2, requires_grad=True)
    param.grad = torch.zeros(2)
    optimizer = registered(update, state=["a", "b"])([param])
    for expected in ([0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]):
        optimizer.step()
        state = optimizer.state[param]

        assert [param[0], state["a"][0], state["b"][0]] == expected


class Theirs(torch.optim.Optimizer):
    """An optimizer that somebody else wrote."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A velocity."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("v", torch.zeros_like(param))
                state["v"] = group["beta"] * state["v"] + param.grad
                param.sub_(group["lr"] * state["v"])


def theirs(param: Any, grad: Any, state: Any, hparams: Any) -> Any:
    """What ``Theirs`` does."""
    velocity = hparams["beta"] * state["v"] + grad
    return param - hparams["lr"] * velocity, {"v": velocity}


BOTH = {"lr": 0.1, "beta": 0.5}


def test_a_class_of_ones_own() -> None:
    """It keeps its step; servers get the block, once two steps of both have agreed."""
    assert registered(theirs, cls=Theirs, state=["v"], hparams=BOTH) is Theirs
    optimizer = Theirs([torch.zeros(2)])
    rule = rule_of(optimizer, optimizer.param_groups[0])

    assert rule.hparams == BOTH and type(make(rule, [torch.zeros(2)])) is not Theirs


def test_a_class_that_steps_otherwise_is_refused() -> None:
    """By value, by state, and where the table has its rule already."""

    def other(param: Any, grad: Any, state: Any, hparams: Any) -> Any:
        return param - grad, {"v": state["v"] + grad}

    with pytest.raises(ValueError, match="after step 1 of the class, 'param' is"):
        registered(other, cls=Theirs, state=["v"], hparams=BOTH)
    with pytest.raises(ValueError, match="expected the class's states v, got w"):
        registered(
            lambda param, grad, state, hparams: (param, {"w": grad}),
            cls=Theirs,
            state=["w"],
            hparams=BOTH,
        )
    with pytest.raises(ValueError, match="SGD has a rule already"):
        registered(lambda param, grad, state, hparams: param, cls=torch.optim.SGD)


def test_a_subclass_with_a_step_of_its_own_is_told_of_register_rule() -> None:
    """Nobody knows what it does."""

    class Mine(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Nothing."""

    optimizer = Mine([torch.zeros(2)])

    with pytest.raises(ValueError, match="subclass of Adam whose step may differ.*register_rule"):
        rule_of(optimizer, optimizer.param_groups[0])


LINE = r"test_register_rule.py:\d+"
REFUSED: dict[str, tuple[Update, str]] = {
    "a view": (lambda p, g, s, h: p.view(2, 3), rf"'aten.view' \({LINE}\).*element by element"),
    "a part": (lambda p, g, s, h: p[:2], rf"'aten.slice.Tensor' \({LINE}\)"),
    "a neighbour": (lambda p, g, s, h: p.cumsum(0), rf"'aten.cumsum' \({LINE}\)"),
    "random": (lambda p, g, s, h: p + torch.rand_like(p), rf"'aten.rand_like' \({LINE}\)"),
    "a norm": (lambda p, g, s, h: p / p.norm(), rf"{LINE}: .*norms=True"),
    "in place": (lambda p, g, s, h: p.mul_(2), "changes 'param' in place: return the new value"),
    "a branch on an hparam": (
        lambda p, g, s, h: p if h["lr"] > 0 else g,
        rf"{LINE}: the update decides by a number.*torch.where",
    ),
    "a branch on a value": (
        lambda p, g, s, h: p if g.mean() > 0 else g,
        rf"{LINE}: the update decides by a number",
    ),
    "a dtype": (lambda p, g, s, h: p.float() + g, rf"{LINE}: .*leave out the conversion"),
    "a constant": (lambda p, g, s, h: p + torch.ones(6), "expected"),
    "no tensor": (lambda p, g, s, h: 1.0, "expected it to return the parameter, tensors"),
    "an unknown state": (lambda p, g, s, h: p + s["m"], rf"{LINE}: KeyError: 'm'"),
    "too many ops": (
        lambda p, g, s, h: sum((g * i for i in range(MOST_OPS)), p),
        "expected 256 ops or fewer, got",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_rule_is_refused(name: str) -> None:
    """At the line of the update."""
    update, why = REFUSED[name]

    with pytest.raises(ValueError, match=why):
        registered(update)


def test_unknown_keywords_of_a_made_class() -> None:
    """As any class says it."""
    with pytest.raises(TypeError, match="Lion: expected keyword arguments among lr, betas; got x"):
        Lion([torch.zeros(2)], x=1)  # type: ignore[call-arg]
