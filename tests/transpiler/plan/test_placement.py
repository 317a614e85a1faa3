"""Slicing and dispatch."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from transpiler.plan.placement import (
    HashName,
    RoundRobin,
    SizeBalanced,
    SliceSize,
    place,
    slice_variable,
)

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


@pytest.mark.parametrize(
    ("shape", "servers", "sizes"),
    [
        ((), 4, [1]),
        ((0,), 4, [0]),
        ((0, 7), 4, [0]),
        ((7, 0), 4, [0]),
        ((1, 100000), 4, [100000]),
        ((7, 3000), 4, [12000, 9000]),
    ],
)
def test_slicing_of_odd_shapes(shape: tuple[int, ...], servers: int, sizes: list[int]) -> None:
    """A scalar is one slice of 1, an empty variable one of 0; a row is never cut."""
    assert slice_variable(shape, servers, 8192) == sizes


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


@pytest.mark.processes
def test_hashing_is_stable_across_processes() -> None:
    """HashName gives the same servers whatever salt Python's own hash has, and depends on the name
    only.
    """
    code = (
        "from transpiler.plan.placement import HashName, SliceSize;"
        "print(HashName(7).dispatch([SliceSize(f'layer{i}.weight', i) for i in range(20)]))"
    )
    answers = set()
    for salt in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": salt,
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        answers.add(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True
            ).stdout
        )
    here = HashName(7).dispatch([SliceSize(f"layer{i}.weight", 0) for i in range(20)])
    assert answers == {f"{here}\n".encode()}
    assert set(here) == set(range(7))


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
    uneven = [(f"w{i}", (100, 10 * (i % 7) + 1), "float32", 0) for i in range(40)]
    loads = dict.fromkeys(range(3), 0)
    for placement in place(uneven, 3, method=SizeBalanced):
        for piece in placement.slices:
            loads[piece.server] += piece.end - piece.begin
    assert max(loads.values()) - min(loads.values()) <= 100 * 61


def test_size_balanced_counts_bytes_not_elements() -> None:
    """A double weighs twice what a float does."""
    placed = place(
        [("a", (10,), "float64", 0), ("b", (10,), "float32", 0), ("c", (10,), "float32", 0)],
        2,
        method=SizeBalanced,
    )
    assert [p.slices[0].server for p in placed] == [0, 1, 1]


@pytest.mark.parametrize("method", [RoundRobin, HashName, SizeBalanced])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_slices_tile_every_variable(method: type[RoundRobin], servers: int) -> None:
    """Whatever the method: slices follow one another without gap, and their shapes hold their
    elements.
    """
    shapes = [(), (0,), (3,), (100, 7), (11, 5, 2), (1, 50)]
    for placement in place(
        [(f"v{i}", s, "float32", None) for i, s in enumerate(shapes)], servers, 10, True, method
    ):
        edges = [0, *(s.end for s in placement.slices)]
        assert [s.begin for s in placement.slices] == edges[:-1] and edges[-1] == math.prod(
            placement.shape
        )
        assert all(
            math.prod(s.shape) == s.end - s.begin and 0 <= s.server < servers
            for s in placement.slices
        )
        assert placement.split == (len(placement.slices) > 1)


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
