"""Lowered code runs the ops it was given, in their order, and says which op failed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from transpiler.ir.graph import Literal, Op, Ref, Symbol
from transpiler.lower import free_inputs, lower

CPU = torch.device("cpu")


def test_ops_without_results_stay_in_their_place():
    """Communication ops run exactly once each, in the order of the program, although nobody reads a
    result of theirs.
    """
    seen = []

    def note(op, **arguments):
        seen.append(
            (
                op.type,
                {key: value for key, value in arguments.items() if not isinstance(value, list)},
            )
        )
        return [torch.full((2,), 7.0)] if op.type == "recv" else None

    ops = [
        Op("aten.add.Tensor", {"self": Ref("x"), "other": 1}, ("y",)),
        Op("send", {"x": (Ref("y"),), "endpoints": ("h:1",), "trainer_id": 0}),
        Op("send_barrier", {"endpoints": ("h:1",), "trainer_id": 0}),
        Op("recv", {"param": "w", "endpoints": ("h:1",)}, ("w",)),
        Op("fetch_barrier", {"endpoints": ("h:1",), "trainer_id": 0}),
        Op("aten.mul.Tensor", {"self": Ref("y"), "other": Ref("w")}, ("z",)),
    ]
    kinds = ("send", "send_barrier", "recv", "fetch_barrier")
    (z,) = lower(ops, ["z"], CPU, {kind: note for kind in kinds})({"x": torch.ones(2)})
    assert [kind for kind, _ in seen] == list(kinds) and seen[2][1] == {"param": "w"}
    assert torch.equal(z, torch.full((2,), 14.0))


def test_words_constants_sizes_and_aliases():
    """Symbols become torch's words, literals tensors, sym ops whole numbers, assign a second
    name.
    """
    value = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    ops = [
        Op("assign_value", {"value": Literal("int16", (2, 2), value.numpy().tobytes())}, ("c",)),
        Op("sym.size", {"x": Ref("x"), "dim": 0}, ("n",)),
        Op("sym.mul", {"a": Ref("n"), "b": 2}, ("m",)),
        Op(
            "aten.full",
            {"size": (Ref("m"),), "fill_value": 1.5, "dtype": Symbol("dtype", "float64")},
            ("f",),
        ),
        Op("aten.zeros", {"size": (1,), "device": Symbol("device", "executor")}, ("d",)),
        Op("assign", {"x": Ref("f")}, ("g",)),
    ]
    c, m, f, d, g = lower(ops, ["c", "m", "f", "d", "g"], CPU)({"x": torch.zeros(3, 1)})
    assert torch.equal(c, value) and m == 6 and f.shape == (6,) and f.dtype is torch.float64
    assert d.device == CPU and g is f


def test_results_that_nobody_reads_have_no_name():
    """An op with several results gives those that are named, in the schema's order."""
    ops = [
        Op("aten.max.dim", {"self": Ref("x"), "dim": 0}, ("", "where")),
        Op("aten.unbind.int", {"self": Ref("x")}, ("a", "", "b")),
    ]
    where, a, b = lower(ops, ["where", "a", "b"], CPU)({"x": torch.tensor([1.0, 3.0, 2.0])})
    assert int(where) == 1 and float(a) == 1.0 and float(b) == 2.0


def test_slices_are_split_by_rows_and_put_together_again():
    """split cuts elements of a vector and whole rows of anything larger; concat is its inverse."""
    for x, sections in ((torch.arange(7.0), (4, 3)), (torch.arange(10.0).reshape(5, 2), (6, 4))):
        ops = [
            Op("split", {"x": Ref("x"), "sections": sections}, ("a", "b")),
            Op("concat", {"x": (Ref("a"), Ref("b")), "axis": 0}, ("whole",)),
        ]
        a, b, whole = lower(ops, ["a", "b", "whole"], CPU)({"x": x})
        assert (a.numel(), b.numel()) == sections and torch.equal(whole, x)


def test_in_place_and_random_ops_run_although_nobody_reads_them():
    """Lowering drops nothing: a buffer is updated, and random numbers are drawn, also where the
    result is unused.
    """
    ops = [
        Op("aten.add_.Tensor", {"self": Ref("count"), "other": 1}, ("unused",)),
        Op("aten.rand_like", {"self": Ref("count")}, ("noise",)),
    ]
    count = torch.zeros(3)
    torch.manual_seed(0)
    lower(ops, [], CPU)({"count": count})
    drawn = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(count, torch.ones(3)) and torch.equal(drawn, torch.rand(1))


def test_an_intermediate_is_freed_after_its_last_use():
    """Generated code holds a tensor no longer than the ops that read it."""
    alive: list[weakref.ref] = []

    def watch(op, x):
        alive.append(weakref.ref(x))
        return x.sum()

    def look(op, x):
        gc.collect()
        assert alive[0]() is None
        return x

    ops = [
        Op("aten.add.Tensor", {"self": Ref("x"), "other": 1}, ("big",)),
        Op("scale", {"x": Ref("big")}, ("small",)),
        Op("clip", {"x": Ref("small")}, ("end",)),
    ]
    (end,) = lower(ops, ["end"], CPU, {"scale": watch, "clip": look})({"x": torch.zeros(4)})
    assert float(end) == 4.0


def test_a_failing_op_is_named_with_its_line():
    """An exception keeps its type, and its message names the op and the line of the user's code."""
    ops = [
        Op("aten.add.Tensor", {"self": Ref("x"), "other": 1}, ("y",), "train.py:11"),
        Op("aten.mm", {"self": Ref("y"), "mat2": Ref("y")}, ("z",), "train.py:12"),
    ]
    with pytest.raises(RuntimeError, match="While executing aten.mm at train.py:12"):
        lower(ops, ["z"], CPU)({"x": torch.zeros(2, 3)})

    def broken(op, **arguments):
        raise KeyError(op.type)

    with pytest.raises(KeyError) as caught:
        lower(
            [Op("send_barrier", {"endpoints": (), "trainer_id": 0})],
            [],
            CPU,
            {"send_barrier": broken},
        )({})
    assert "While executing send_barrier" in str(caught.value) + "".join(
        getattr(caught.value, "__notes__", [])
    )


def test_an_op_without_meaning_is_refused():
    """An op of ours that has no kernel here, or an aten op that torch lacks, is refused before
    anything runs.
    """
    with pytest.raises(ValueError, match="'send'.*without a kernel"):
        lower([Op("send", {"x": (Ref("x"),)})], [], CPU)
    with pytest.raises(ValueError, match="no such op"):
        lower([Op("aten.no_such_thing", {"self": Ref("x")}, ("y",))], ["y"], CPU)


def test_inputs_are_what_is_read_before_it_is_defined():
    """free_inputs lists names in the order of their first use; an output that no op defines passes
    through.
    """
    ops = [
        Op("aten.mm", {"self": Ref("a"), "mat2": Ref("b")}, ("c",)),
        Op("aten.mm", {"self": Ref("c"), "mat2": Ref("a")}, ("d",)),
    ]
    assert free_inputs(ops) == ["a", "b"]
    lowered = lower(ops, ["d", "e"], CPU)
    assert lowered.inputs == ("a", "b", "e")
