"""Programs of a job in which some gradients go to servers and others from trainer to trainer, and
programs with recurrent layers: drawn, printed, compared.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import nn

from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
    capture,
    data,
)

SVG = "{http://www.w3.org/2000/svg}"
MIXED = {"0.*": "async", "1.*": "sync", "*": "collective"}


@cache
def single() -> tuple[Program, Program]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, lambda model, x: model(x).mean(), optimizer, (torch.ones(2, 3),))


def transpiled(modes: dict[str, str], servers: int = 2) -> DistributeTranspiler:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"modes": modes}
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=4))
    endpoints = ",".join(f"s{number}:6174" for number in range(servers))
    main, startup = single()
    transpiler.transpile(0, main, endpoints, 2, startup_program=startup, strategy=strategy)
    return transpiler


def drawn(program: Program, path: Path) -> ElementTree.Element:
    program.draw(path)
    return ElementTree.fromstring(path.read_bytes())


def test_servers_and_rings_are_in_one_picture(tmp_path: Path) -> None:
    """A vertical line for each server and for the ring, and what the lanes are, below the title."""
    program = transpiled(MIXED).get_trainer_program()
    picture = drawn(program, tmp_path / "mixed.svg")
    places = {line.findtext(f"{SVG}title"): line.get("x1") for line in picture.iter(f"{SVG}line")}
    paths = [path.get("d", "") for path in picture.iter(f"{SVG}path")]
    ring = float(places["ring 0"] or 0)
    texts = [text.text or "" for text in picture.iter(f"{SVG}text")]
    means = [op for op in program.main.ops if op.type == "c_allreduce_avg"]

    assert list(places) == ["s0:6174", "s1:6174", "ring 0"]
    assert len(means) == 1
    assert len([path for path in paths if path.endswith(f"H{ring - 2:g}")]) == len(means)
    assert len([path for path in paths if path.startswith(f"M{ring - 1:g} ")]) == 1  # the wait
    for words in ("server 1", "2 trainers", "trainer 0 of 2, mixed, 2 servers"):
        assert words in texts
    assert any(text.startswith("lane 0: async") for text in texts)
    assert "collective: mean over trainers, of 2.weight, 2.bias" in texts


def test_many_servers_leave_room_for_the_ring(tmp_path: Path) -> None:
    """Numbers stand in the place of endpoints then."""
    picture = drawn(transpiled(MIXED, 12).get_trainer_program(), tmp_path / "mixed.svg")
    texts = [text.text for text in picture.iter(f"{SVG}text")]

    assert texts.index("11") + 1 == texts.index("r0")


def test_a_startup_program_and_a_servers_are_drawn(tmp_path: Path) -> None:
    """A trainer that begins asks no ring; a server has none."""
    job = transpiled(MIXED)
    begins, serves = job.get_startup_program(), job.get_pserver_program("s0:6174")

    assert len(drawn(begins, tmp_path / "begins.svg").findall(f"{SVG}line")) == 2
    assert not drawn(serves, tmp_path / "serves.svg").findall(f"{SVG}line")


def test_two_mixed_jobs_are_told_apart() -> None:
    """A lane that is gone is one line; a gradient that goes another way is told op by op."""
    mixed, less = (
        transpiled(modes).get_trainer_program()
        for modes in (MIXED, {"0.*": "async", "*": "collective"})
    )
    lines = mixed.diff(less).splitlines()

    assert mixed.diff(transpiled(MIXED).get_trainer_program()) == ""
    assert "plan, lane 1 is gone: sync" in lines
    assert "plan, lane 1 is new: sync" in less.diff(mixed).splitlines()
    assert not [line for line in lines if line.startswith("plan, lane 1:")]
    assert "plan, averaged 1.bias: by the trainers instead of nothing" in lines
    assert any(line.endswith("1.bias = sgd(1.bias@GRAD, lr=0.1)") for line in lines)


def recurrent(layers: int = 1) -> Program:
    torch.manual_seed(0)
    model = nn.GRU(3, 2, layers, batch_first=True)
    program, _ = capture(
        model, lambda model, x: model(x)[0], example=(data("x", [None, "time", 3]),)
    )
    return program


def test_forward_and_recurrent_programs_are_read(tmp_path: Path) -> None:
    """A layer over a free time is one op, in print, in the picture and in a difference."""
    one, two = recurrent(), recurrent(2)
    picture = drawn(one, tmp_path / "forward.svg")
    printed, lines = str(one), one.diff(two).splitlines()

    assert printed.startswith("forward program\n")
    assert printed.count(" = recurrent(x, ") == 1
    assert len(picture.findall(f"{SVG}g")) == len(one.main.ops)
    assert one.diff(recurrent()) == ""
    assert "block 0, weight_hh_l1 is new: parameter float32[6, 2]" in lines
    assert sum("recurrent(" in line for line in lines) >= 1
    assert one.diff(single()[0])
