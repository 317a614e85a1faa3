"""Slicing and dispatch."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transpiler.ir.rules import Rule
from transpiler.plan.placement import (
    HashName,
    RoundRobin,
    SizeBalanced,
    SliceSize,
    element_bytes,
    place,
    slice_variable,
)
from transpiler.plan.plan import Plan, differences
from transpiler.plan.planner import plan_parameters

GOLDEN = [  # shape, the slices on 2, 3 and 4 servers with min_block_size 8192
    ((1000,), [1000], [1000], [1000]),
    ((16384,), [8192] * 2, [8192] * 2, [8192] * 2),
    ((24577,), [12289, 12288], [8193, 8193, 8191], [8193, 8193, 8191]),
    ((1000, 1000), [500000] * 2, [334000, 334000, 332000], [250000] * 4),
    ((1000, 64), [32000] * 2, [21376, 21376, 21248], [16000] * 4),
    ((10000, 1), [10000], [10000], [10000]),
    ((1001, 100), [50100, 50000], [33400, 33400, 33300], [25100, 25100, 25100, 24800]),
    ((5, 16384), [49152, 32768], [32768, 32768, 16384], [32768, 32768, 16384]),
    ((130, 127), [8255, 8255], [8255, 8255], [8255, 8255]),
    ((512, 512, 3, 3), [1179648] * 2, [787968, 787968, 783360], [589824] * 4),
    (
        (1000003, 16),
        [8000032, 8000016],
        [5333360, 5333360, 5333328],
        [4000016, 4000016, 4000016, 4000000],
    ),
]


@pytest.mark.parametrize(("shape", "two", "three", "four"), GOLDEN)
def test_slicing(shape: tuple[int, ...], two: list[int], three: list[int], four: list[int]) -> None:
    """Slices are as even as whole rows and min_block_size allow, at most one per server."""
    assert [slice_variable(shape, servers, 8192) for servers in (2, 3, 4)] == [two, three, four]


shapes = st.lists(st.integers(0, 90), max_size=4).map(tuple)


@example((), 4, 8192)
@example((7, 0), 4, 8192)
@example((1, 100000), 4, 8192)
@example((7, 3000), 4, 8192)
@given(shapes, st.integers(1, 9), st.integers(1, 40) | st.just(8192))
def test_slices_are_even_rows(shape: tuple[int, ...], servers: int, least: int) -> None:
    """All elements, in whole rows, at most a slice for each server, and only the last below the
    least size; no smaller size would do.
    """
    sizes = slice_variable(shape, servers, least)
    elements, row = math.prod(shape), math.prod(shape[1:])
    assert sum(sizes) == elements and (len(sizes) == 1 or min(sizes) > 0)
    assert len(sizes) <= servers and all(size >= least for size in sizes[:-1])
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    if elements:
        most = min(servers, max(1, elements // least))
        assert all(size % row == 0 for size in sizes) and len(sizes) <= most
        assert (sizes[0] - row) * most < elements


def test_min_block_size_may_be_any_number_from_one() -> None:
    """Blocks of one element are allowed; 0 servers, block size 0 and negative extents are not."""
    assert slice_variable((5,), 4, 1) == [2, 2, 1]
    assert slice_variable((3,), 8, 1) == [1, 1, 1]
    for servers, least in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            slice_variable((5,), servers, least)
    with pytest.raises(ValueError, match="from 0 up"):
        slice_variable((-1, 2), 1, 1)


def test_round_robin_has_one_cursor_over_all_blocks() -> None:
    """A bias on server 0 makes the first weight block go to server 1 and the next to server 0
    again.
    """
    bias, weight = place(
        [("fc.bias", (1000,), "float32", 0), ("fc.weight", (1000, 1000), "float32", 0)], 2
    )
    assert not bias.split and bias.slices[0].name == "fc.bias" and bias.slices[0].shape == (1000,)
    assert [(s.name, s.begin, s.end, s.shape, s.server) for s in weight.slices] == [
        ("fc.weight.block0", 0, 500000, (500, 1000), 1),
        ("fc.weight.block1", 500000, 1000000, (500, 1000), 0),
    ]
    assert bias.slices[0].server == 0


def test_hashing_is_stable_across_processes() -> None:
    """HashName gives these servers whatever salt Python's own hash has, and depends on the name
    only.
    """
    here = HashName(7).dispatch([SliceSize(f"layer{i}.weight", 8 - i % 8) for i in range(20)])
    assert here == [6, 3, 4, 2, 6, 4, 3, 0, 2, 5, 1, 4, 1, 2, 2, 0, 2, 2, 5, 6]


def test_size_balanced_balances_bytes() -> None:
    """The largest slice goes first, each onto the least loaded server; ties go to the earlier slice
    and the lower server.
    """
    pieces = [
        SliceSize("a", 10),
        SliceSize("b", 70),
        SliceSize("c", 30),
        SliceSize("d", 30),
        SliceSize("e", 0),
    ]
    assert SizeBalanced(2).dispatch(pieces) == [1, 0, 1, 1, 0]
    assert SizeBalanced(3).dispatch([SliceSize(name, 8) for name in "abcd"]) == [0, 1, 2, 0]


def test_size_balanced_counts_bytes_not_elements() -> None:
    """A double weighs twice what a float does."""
    placed = place(
        [("a", (10,), "float64", 0), ("b", (10,), "float32", 0), ("c", (10,), "float32", 0)],
        2,
        method=SizeBalanced,
    )
    assert [p.slices[0].server for p in placed] == [0, 1, 1]


METHODS = [RoundRobin, HashName, SizeBalanced]
variables = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.tuples(shapes, st.sampled_from(["float32", "float64", "int8"]), st.none() | st.just(0)),
    max_size=8,
).map(lambda named: [(name, *facts) for name, facts in named.items()])


@given(variables, st.integers(1, 6), st.integers(1, 500), st.booleans(), st.sampled_from(METHODS))
def test_slices_tile_every_variable(
    named: list[tuple[str, tuple[int, ...], str, int | None]],
    servers: int,
    least: int,
    cuts: bool,
    method: type[RoundRobin],
) -> None:
    """Whatever the method: slices follow one another without gap, their shapes hold their elements,
    and each is on one server, which the method gives.
    """
    whole = frozenset(name for name, *_ in named[::3])
    placed = place(named, servers, least, cuts, method, whole)
    assert placed == place(iter(named), servers, least, cuts, method, whole)
    assert [(p.name, p.shape, p.dtype, p.group) for p in placed] == named
    pieces = [(each, p) for p in placed for each in p.slices]
    assert len({each.name for each, _ in pieces}) == len(pieces)
    for p in placed:
        edges = [0, *(each.end for each in p.slices)]
        assert [each.begin for each in p.slices] == edges[:-1] and edges[-1] == math.prod(p.shape)
        assert all(math.prod(each.shape) == each.end - each.begin for each in p.slices)
        assert all(each.shape[1:] == p.shape[1:] for each in p.slices)
        assert p.split == (len(p.slices) > 1)
        own = [f"{p.name}.block{at}" for at in range(len(p.slices))] if p.split else [p.name]
        assert [each.name for each in p.slices] == own
        assert not p.split or (cuts and p.name not in whole)
    sizes = [
        SliceSize(each.name, (each.end - each.begin) * element_bytes(p.dtype)) for each, p in pieces
    ]
    chosen = [each.server for each, _ in pieces]
    assert chosen == method(servers).dispatch(sizes) and {*chosen} <= {*range(servers)}


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_methods_keep_their_promises(sizes: list[int], servers: int) -> None:
    """Turns go round; a hash knows one name; the fullest server has no more than the others and its
    smallest slice.
    """
    pieces = [SliceSize(f"w{at}", size) for at, size in enumerate(sizes)]
    assert RoundRobin(servers).dispatch(pieces) == [at % servers for at in range(len(sizes))]
    hashed = HashName(servers).dispatch(pieces)
    assert HashName(servers).dispatch([replace(p, nbytes=1) for p in pieces[1:]]) == hashed[1:]
    held: list[list[int]] = [[] for _ in range(servers)]
    for server, size in zip(SizeBalanced(servers).dispatch(pieces), sizes, strict=True):
        held[server].append(size)
    loads = [sum(each) for each in held]
    assert all(sum(each) - min(each) <= min(loads) for each in held if each)


def plan_of(trainers: int, servers: int, least: int, lr: float, shape: int, name: str) -> Plan:
    named = [("a", (shape, 3), "float32", 0), (name, (4,), "float32", None)]
    rules = [Rule("sgd", {"lr": lr, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})]
    return plan_parameters(named, rules, trainers=trainers, servers=servers, min_block_size=least)


facts = st.tuples(
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([1, 6]),
    st.sampled_from([0.1, 0.2]),
    st.integers(1, 2),
    st.sampled_from(["b", "c"]),
)


@given(facts, facts)
def test_plans_have_one_fingerprint_where_they_are_one(one: tuple, other: tuple) -> None:
    """Whatever differs is named."""
    first, second = plan_of(*one), plan_of(*other)
    assert first == plan_of(*one) and first.fingerprint() == plan_of(*one).fingerprint()
    said = differences(first.manifest(), second.manifest(), "trainer 0")
    assert (first == second) == (first.fingerprint() == second.fingerprint()) == (not said)
    if one[3] != other[3]:
        assert f"group 0: lr: {one[3]} (trainer 0 has {other[3]})" in said or "more" in said


def test_slice_var_up_off_leaves_variables_whole() -> None:
    """Without slice_var_up every variable is one slice with its own name and shape."""
    (only,) = place([("w", (100, 100), "float32", 0)], 4, 1, slice_var_up=False)
    assert only.slices[0].name == "w" and only.slices[0].shape == (100, 100) and not only.split


class Last:
    """A user's own method."""

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, pieces: Sequence[SliceSize]) -> list[int]:
        """Everything onto the last server."""
        return [self.servers - 1 for _ in pieces]


class Wrong(Last):
    """A user's own method with a mistake."""

    def dispatch(self, pieces: Sequence[SliceSize]) -> list[int]:
        """One answer too many, and no such server."""
        return [self.servers for _ in range(len(pieces) + 1)]


def test_a_users_own_split_method_works_and_is_checked() -> None:
    """Any class with the interface is a split method; an answer that is no placement names the
    class.
    """
    assert {s.server for s in place([("w", (100,), "float32", 0)], 3, 1, True, Last)[0].slices} == {
        2
    }
    with pytest.raises(ValueError, match="Wrong.dispatch: expected 3 server numbers from 0 to 2"):
        place([("w", (100,), "float32", 0)], 3, 1, True, Wrong)


def test_names_must_differ_and_dtypes_exist() -> None:
    """Two variables, or a variable and a slice, of one name are refused; so is an unknown dtype."""
    with pytest.raises(ValueError, match="w.block0 twice"):
        place([("w", (4,), "float32", 0), ("w.block0", (1,), "float32", 0)], 2, 1)
    with pytest.raises(ValueError, match="'floaty'"):
        place([("w", (4,), "floaty", 0)], 2, 1)
