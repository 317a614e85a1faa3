"""Programs of trainers without servers as messages, files, text and pictures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.collectives import FOUR, GRAD, KINDS, Single, of_type, pair, transpiled
from transpiler.formats.text import plan_text
from transpiler.program import Program


@pytest.mark.parametrize("kind", KINDS)
def test_programs_travel_whole_and_are_the_same_everywhere(
    single: Single, kind: str, tmp_path: Path
) -> None:
    """Messages and files give the same program back; all trainers' programs have one fingerprint,
    at any address, and other modes have others; what wait_port says is recorded.
    """
    for number, program in enumerate(pair(single, FOUR, **KINDS[kind])):
        assert Program.from_proto(program.to_proto()) == program
        program.save(tmp_path / f"{number}")
        assert Program.load(tmp_path / f"{number}") == program
        assert (
            pair(single, "x:9,x:8,y:7,y:6", 3, **KINDS[kind])[number].fingerprint()
            == program.fingerprint()
        )
        assert len(
            {pair(single, FOUR, **settings)[number].fingerprint() for settings in KINDS.values()}
        ) == len(KINDS)
    main = transpiled(single, FOUR, **KINDS[kind]).get_trainer_program(wait_port=False)
    assert main.deployment is not None and not main.deployment.wait_port


def test_programs_are_readable(single: Single) -> None:
    """The text says who runs it and what each ring does, in one line each."""
    main, startup = (str(program) for program in pair(single, FOUR, 1, nccl_comm_num=2, **GRAD))
    assert main.startswith("trainer 1 of 4, grad_allreduce, 2 rings\n")
    for line in (
        "= c_allreduce_sum(out.bias@GRAD, ring 0, bucket 0)",
        "c_sync_comm_stream(",
        "= scale(ones_like, 0.25)",
    ):
        assert line in main
    for line in (
        "= gen_nccl_id(a:1, a:2, b:1, b:2)",
        "c_comm_init(NCCLID_1, ring 1, 4 trainers)",
        "ring 0, from trainer 0)",
    ):
        assert line in startup
    rows = str(pair(single, FOUR, **KINDS["local_sgd"])[0])
    assert rows.startswith("trainer 0 of 4, local_sgd, 1 ring, in rows of 2\n")


def test_pictures_show_the_rings(single: Single, tmp_path: Path) -> None:
    """Each ring is a line, each start an arrow to it and each wait one back; an nccl2 program has
    neither.
    """
    main, startup = pair(single, FOUR, nccl_comm_num=2, **GRAD)
    for program in (main, startup, pair(single, mode="nccl2")[0]):
        program.draw(tmp_path / "x.svg")
        root = ElementTree.parse(tmp_path / "x.svg").getroot()
        lines = root.findall(".//{*}line[@class='life']")
        arrows = [
            path for path in root.findall(".//{*}path[@marker-end]") if "H" in path.attrib["d"]
        ]
        moves = len(of_type(program, "c_allreduce_sum", "c_broadcast", "c_sync_comm_stream"))
        assert (len(lines), len(arrows)) == ((2, moves) if moves else (0, 0))


def test_the_plan_says_what_a_trainer_holds(single: Single) -> None:
    """Bytes of parameters, states and sums of each trainer, and every variable's update."""
    main, _ = pair(single, FOUR, **GRAD)
    assert main.deployment is not None
    lines = plan_text(main.deployment.plan).splitlines()
    trained_bytes = 4 * (6 * 4 + 4 + 4 + 4 + 4 * 3 + 3)
    held = 4 * (3 + 4 + 4) + 8  # the frozen parameter and the running statistics
    assert lines[0] == "grad_allreduce: 4 trainers, no servers"
    assert "fc.weight                 float32[4, 6]  sgd" in lines
    found = re.split(" {2,}", lines[-1])
    assert found == [
        "4 trainers",
        f"{trained_bytes + held} B",
        "0 B",
        f"{trained_bytes} B",
        f"{2 * trained_bytes + held} B",
    ]
