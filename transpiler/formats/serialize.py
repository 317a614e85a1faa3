"""Programs as protobuf messages: data, never code.

``to_proto`` and ``from_proto`` are exact inverses of each other; those of blocks are in
``block_message.py``, those of plans in ``plan_message.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from transpiler import program_pb2 as pb
from transpiler.formats.block_message import argument_from_proto as argument_from_proto
from transpiler.formats.block_message import argument_to_proto as argument_to_proto
from transpiler.formats.block_message import block_from_proto, block_to_proto
from transpiler.formats.canonical import canonical as canonical
from transpiler.formats.plan_message import deployment_from_proto as deployment_from_proto
from transpiler.formats.plan_message import deployment_to_proto as deployment_to_proto
from transpiler.formats.plan_message import hparams_from_proto as hparams_from_proto
from transpiler.formats.plan_message import hparams_to_proto as hparams_to_proto
from transpiler.formats.plan_message import plan_from_proto as plan_from_proto
from transpiler.formats.plan_message import plan_to_proto as plan_to_proto
from transpiler.ir.graph import Block
from transpiler.plan.plan import Deployment


def to_proto(blocks: Sequence[Block], deployment: Deployment | None) -> pb.Program:
    """The message of a program.  Values of variables do not travel with it.

    Raises:
        ValueError: an argument does not fit (a whole number beyond 64 bits, lists too deep, text
            that is not Unicode).
        TypeError: an argument of a type that a program cannot hold.
    """
    try:
        messages = [block_to_proto(block) for block in blocks]
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text that UTF-8 can hold, got {error.object!r}") from error
    where = None if deployment is None else deployment_to_proto(deployment)
    return pb.Program(blocks=messages, deployment=where)


def from_proto(message: object) -> tuple[tuple[Block, ...], Deployment | None]:
    """The blocks and the deployment of a message, every op checked against the catalogue.

    Raises:
        TypeError: it is no ``program_pb2.Program``.
        ValueError: something in it is not what the catalogue or the format asks for; the message
            says where.
    """
    if not isinstance(message, pb.Program):
        raise TypeError(
            f"expected a pserver.transpiler.Program message, got {type(message).__name__}"
        )
    if not message.blocks:
        raise ValueError("expected a program with one block or more, got none")
    blocks = tuple(block_from_proto(index, block) for index, block in enumerate(message.blocks))
    deployment = (
        deployment_from_proto(message.deployment) if message.HasField("deployment") else None
    )
    return blocks, deployment
