"""Programs as pictures: well-formed, complete, whatever the names are."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from transpiler.formats.svg import svg
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program

SVG = "{http://www.w3.org/2000/svg}"
RULE = Rule(
    "sgd", {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {"maximize": False}
)
PLAN = Plan(
    (Lane("sync"),),
    2,
    2,
    (RULE,),
    (Placement("w", (4, 3), "float32", 0, (Slice("w", 0, 12, (4, 3), 0),)),),
)
HOSTS = ("127.0.0.1:6174", "127.0.0.1:6175")
EVERYONE: dict[str, Argument] = {"endpoints": HOSTS, "trainer_id": 0}

TRAINER = Program(
    (
        Block(
            0,
            freeze({"w@GRAD": Variable("w@GRAD", (4, 3), "float32", Role.GRADIENT, "w")}),
            (
                Op("aten.t", {"self": Ref("x")}, ("w@GRAD",), "train.py:3"),
                Op(
                    "split",
                    {"x": Ref("w@GRAD"), "sections": (6, 6)},
                    ("w@GRAD.block0", "w@GRAD.block1"),
                ),
                Op("send", {"x": (Ref("w@GRAD.block0"), Ref("w@GRAD.block1")), **EVERYONE}),
                Op("send_barrier", EVERYONE),
                Op("recv", {"param": "w", "endpoints": HOSTS}, ("w.block0", "w.block1")),
                Op("fetch_barrier", EVERYONE),
                Op("concat", {"x": (Ref("w.block0"), Ref("w.block1")), "axis": 0}, ("w",)),
            ),
        ),
    ),
    Deployment(PLAN, HOSTS, trainer_id=0),
)


def server(blocks: int) -> Program:
    """A server's program with so many optimize blocks."""
    listen: dict[str, Argument] = {
        "endpoint": HOSTS[0],
        "server_index": 0,
        "trainers": 2,
        "mode": "sync",
    }
    listen["optimize_blocks"] = tuple(range(1, blocks + 1))
    update: dict[str, Argument] = {
        "param": Ref("w"),
        "grad": Ref("w@GRAD"),
        "group": 0,
        **RULE.hparams,
        **RULE.flags,
    }
    ops = (Op("scale", {"x": Ref("w@GRAD"), "scale": 0.5}, ("w@GRAD",)), Op("sgd", update, ("w",)))
    main = Block(0, freeze({}), (Op("listen_and_serv", listen),))
    return Program(
        (main, *(Block(index, freeze({}), ops) for index in range(1, blocks + 1))),
        Deployment(PLAN, HOSTS, server_index=0),
    )


def drawn(program: Program) -> ElementTree.Element:
    return ElementTree.fromstring(svg(program.blocks, program.deployment).encode())


def boxes(picture: ElementTree.Element) -> list[ElementTree.Element]:
    """The groups that are ops."""
    return picture.findall(f"{SVG}g")


def lines(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [
        path for path in picture.findall(f"{SVG}path") if "line" in path.get("class", "").split()
    ]


def written(picture: ElementTree.Element) -> str:
    return "\n".join(text.text or "" for text in picture.iter(f"{SVG}text"))


def test_a_trainer_program_shows_its_ops_and_what_crosses_the_wire() -> None:
    """One box for each op in order, one line for each server, one arrow for each exchange with each
    of them.
    """
    picture = drawn(TRAINER)
    arrows, arcs = [], []
    for line in lines(picture):
        (arrows if "H" in line.get("d", "") else arcs).append(line)

    assert [
        str(box.findtext(f"{SVG}title")).split("(")[0].split(" = ")[-1] for box in boxes(picture)
    ] == [op.type for op in TRAINER.main.ops]
    assert len(picture.findall(f"{SVG}line")) == 2
    assert len(arrows) == 2 * 4  # send, its barrier, recv, its barrier; two servers each
    assert len(arcs) == 3  # computed -> split -> send, recv -> concat
    assert all(host in written(picture) for host in HOSTS)
    assert "train.py:3" in str(boxes(picture)[0].findtext(f"{SVG}title"))


def test_an_arrow_points_the_way_the_tensor_goes() -> None:
    """A send's arrow ends at the server, a recv's at the op."""

    def ends(line: ElementTree.Element) -> tuple[float, float]:
        start, end = line.get("d", "").removeprefix("M").split("H")
        return float(start.split()[0]), float(end)

    arrows = [ends(line) for line in lines(drawn(TRAINER)) if "H" in line.get("d", "")]

    assert all(start < end for start, end in arrows[:4])
    assert all(start > end for start, end in arrows[4:6])


def test_a_server_program_shows_a_panel_for_each_block() -> None:
    """Each optimize block has a panel with its title and is joined to listen_and_serv."""
    picture = drawn(server(40))

    assert len(picture.findall(f"{SVG}rect[@class='panel']")) == 41
    assert len(lines(picture)) == 40
    assert len(boxes(picture)) == 81
    assert "block 40: w" in written(picture)


NASTY = "<script>alert(\"1\")</script> & 'x' ]]> \x00\x1b\ud800 \u00e9"


def test_names_are_escaped() -> None:
    """Names with markup, control characters or lone surrogates leave the picture well-formed, and
    nothing in it but text.
    """
    op = Op("aten.relu", {"self": Ref(NASTY)}, (NASTY,), NASTY)
    send = Op("send", {"x": (Ref(NASTY),), "endpoints": (NASTY,), "trainer_id": 0})
    variables = {NASTY: Variable(NASTY, (NASTY, 3), "float32")}
    text = svg([Block(0, freeze(variables), (op, send))], None)

    picture = ElementTree.fromstring(text.encode())
    assert picture.find(f".//{SVG}script") is None
    assert "<script>alert" in str(boxes(picture)[0].findtext(f"{SVG}title"))
    assert "<script" not in text


@pytest.mark.parametrize("count", [0, 1, 100, 2000])
def test_a_program_of_any_length_is_drawn_whole(count: int) -> None:
    """No op, one op or two thousand: every one has its box, inside the picture and below the one
    before.
    """
    ops = tuple(
        Op("aten.relu", {"self": Ref("x" * 300)}, (f"v{number}",)) for number in range(count)
    )
    picture = drawn(Program((Block(0, freeze({}), ops),)))
    tops = [float(str(box.find(f"{SVG}rect").get("y"))) for box in boxes(picture)]  # each has one

    assert len(tops) == count
    assert tops == sorted(set(tops))
    assert all(0 < top < float(str(picture.get("height"))) for top in tops)
    assert all(len(text.text or "") < 100 for text in picture.iter(f"{SVG}text"))


def test_a_hundred_servers_fit() -> None:
    """Many servers stand close, by number, inside the picture."""
    hosts = tuple(f"10.0.0.{number}:6174" for number in range(100))
    send = Op(
        "send",
        {
            "x": tuple(Ref(f"g{number}") for number in range(100)),
            "endpoints": hosts,
            "trainer_id": 0,
        },
    )
    picture = drawn(Program((Block(0, freeze({}), (send,)),)))
    places = [float(str(line.get("x1"))) for line in picture.findall(f"{SVG}line")]

    assert len(places) == 100
    assert max(places) < float(str(picture.get("width")))
    assert "99" in written(picture)


def test_a_picture_is_written_to_a_file(tmp_path: Path) -> None:
    """Program.draw writes the same picture every time, with no package of the system."""
    TRAINER.draw(tmp_path / "a.svg")
    TRAINER.draw(str(tmp_path / "b.svg"))

    assert (
        (tmp_path / "a.svg").read_bytes()
        == (tmp_path / "b.svg").read_bytes()
        == svg(TRAINER.blocks, TRAINER.deployment).encode()
    )


def test_a_broken_op_is_drawn_too() -> None:
    """A picture is for finding out what is wrong, so it never refuses."""
    broken = (
        Op("explode", {"now": True}),
        Op("send", {"x": 3}),
        Op("listen_and_serv", {"optimize_blocks": 7}),
        Op("recv"),
    )

    assert len(boxes(drawn(Program((Block(0, freeze({}), broken), Block(1, freeze({}), ())))))) == 4
