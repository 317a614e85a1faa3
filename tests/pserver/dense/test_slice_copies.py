"""Promises of the copies that a save makes of slices and their states."""

from __future__ import annotations

import weakref

import pytest
import torch

from pserver.dense.slices import SliceCopies, SliceStore
from pserver.errors import Unprepared
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.files.files import pieces
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment

ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
RULES = {
    "adam": Rule("adam", ADAM, {"amsgrad": False, "maximize": False}),
    "momentum": Rule(
        "momentum",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0},
        {"nesterov": False},
    ),
}


def store(rule: Rule) -> SliceStore:
    named = [
        ("w", (700, 110), "float32", 0),
        ("h", (41, 3), "bfloat16", 0),
        ("mean", (3,), "float64", None),
    ]
    plan = plan_parameters(named, [rule], mode="sync", trainers=1, servers=1)
    return SliceStore(pserver_program(Deployment(plan, ("h:1",), server_index=0)))


def step(of: SliceStore, rule: Rule, seed: int) -> None:
    torch.manual_seed(seed)
    for update in of.updates.values():
        update.update(torch.randn_like(update.value), rule.hparams)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_copies_are_of_the_moment_in_which_they_are_taken(kind: str, steps_before: int) -> None:
    """Updates between the making of the memory and the copies are in them, later ones are not; a
    state that came into being meanwhile is there, too.
    """
    of = store(RULES[kind])
    for seed in range(steps_before):
        step(of, RULES[kind], seed)
    copies = SliceCopies(of)
    step(of, RULES[kind], 7)
    expected = {name: tensor.clone() for name, tensor in of.tensors()}
    copies.copy()
    step(of, RULES[kind], 8)
    found = copies.copies

    assert found.keys() == expected.keys() and len(expected) > 3
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_what_was_written_is_given_up() -> None:
    """Tensor by tensor: memory falls as a save is written."""
    of = store(RULES["adam"])
    step(of, RULES["adam"], 0)
    copies = SliceCopies(of)
    copies.copy()
    whole = dict.fromkeys(copies.copies)
    references = {name: weakref.ref(tensor) for name, tensor in copies.copies.items()}
    held = [sum(each() is not None for each in references.values()) for _ in pieces(copies.copies)]

    assert held == [len(whole) - number for number in (0, *range(len(whole)))] and len(whole) > 5
    assert not copies.copies and all(each() is None for each in references.values())


@pytest.mark.parametrize("kind", RULES)
def test_values_that_are_loaded_without_states_begin_anew(kind: str) -> None:
    """As of a server's files of before the first step: what the server had learned is gone."""
    of, new = store(RULES[kind]), store(RULES[kind])
    before = {name: tensor.clone() for name, tensor in of.tensors()}
    step(of, RULES[kind], 0)
    of.load(before)
    assert dict(of.tensors()).keys() == before.keys()
    for each in (of, new):
        step(each, RULES[kind], 1)
    for name, tensor in new.tensors():
        assert torch.equal(of.copy(name), tensor), name


def test_no_slice_that_is_not_updated_begins_anew() -> None:
    """A trainer of another plan."""
    with pytest.raises(Unprepared, match="no slice 'mean.block0' is updated"):
        store(RULES["adam"]).loaded(["mean.block0"])
