"""What programs look like, what their fingerprints are, and how messages are numbered: held against
``tests/testdata/``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message_factory import GetMessageClass

from pserver import wire_pb2
from tests.support.messages import is_repeated
from tests.support.models import EIGHT, Case
from tests.support.programs import DEPLOYMENTS
from tests.support.transcript import compare
from transpiler import capture, program_guard, program_pb2, strategy_pb2
from transpiler.program import Program


def shown(programs: dict[str, Program]) -> str:
    return "".join(
        f"== {name}, {program.fingerprint()}\n\n{program}\n\n" for name, program in programs.items()
    )


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.__name__)
def test_a_captured_program_stays_as_it_is(
    request: pytest.FixtureRequest, case: Callable[[], Case]
) -> None:
    """Each of the eight models gives the same program with the same fingerprint, op by op."""
    torch.manual_seed(7)
    model, step, optimizer, batch = case()
    with program_guard(Program(()), Program(())):
        main, startup = capture(model, step, optimizer(model), batch(4))

    compare(
        request, f"programs/captured_{case.__name__}.txt", shown({"main": main, "startup": startup})
    )


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_programs_of_a_job_stay_as_they_are(request: pytest.FixtureRequest, name: str) -> None:
    """Every program of a job has its ops in the same order, in each mode, with and without tables
    or servers.
    """
    compare(request, f"programs/{name}.txt", shown(DEPLOYMENTS[name]()))


def numbered(file: FileDescriptor) -> str:
    """Every field of every message, and every value of every enum, with its number."""
    lines: list[str] = []

    def of_enum(enum: EnumDescriptor) -> None:
        lines.extend(f"{enum.full_name} {value.number} {value.name}" for value in enum.values)

    def of_message(message: Descriptor) -> None:
        fields: list[FieldDescriptor] = sorted(message.fields, key=lambda field: field.number)
        empty = GetMessageClass(message)()
        for field in fields:
            what = field.message_type.full_name if field.message_type else f"type {field.type}"
            lines.append(
                f"{message.full_name} {field.number} "
                f"{'repeated ' if is_repeated(getattr(empty, field.name)) else ''}"
                f"{what} {field.name}"
            )
        for enum in message.enum_types:
            of_enum(enum)
        for nested in message.nested_types:
            of_message(nested)

    for message in file.message_types_by_name.values():
        of_message(message)
    for enum in file.enum_types_by_name.values():
        of_enum(enum)
    for service in file.services_by_name.values():
        lines.extend(
            f"{service.full_name} {m.name} {m.input_type.name} {m.output_type.name}"
            for m in service.methods
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "module",
    [program_pb2, strategy_pb2, wire_pb2],
    ids=lambda module: module.__name__.split(".")[-1],
)
def test_the_numbers_of_fields_stay_as_they_are(request: pytest.FixtureRequest, module) -> None:
    """A field's number and type are what travels: they never change, and are never used again."""
    compare(
        request, f"protobuf/{module.__name__.rpartition('.')[2]}.txt", numbered(module.DESCRIPTOR)
    )
