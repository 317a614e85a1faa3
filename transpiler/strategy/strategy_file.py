"""A strategy as protobuf text: what a file says, and the fields in it that are only kept.

The original's files have fields that no page of its documentation names.  A field of such a name
has a number from ``KEPT`` on in protos/transpiler/strategy.proto: it is written again as it was
read, and nothing acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf import text_format
from google.protobuf.message import Message

from transpiler import strategy_pb2 as pb
from transpiler.plan.setting import SECRET

ORIGINAL_K_STEPS = -1  # with which the original says that there are none
KEPT = 1001  # the first number of a field that is only kept

_QUOTED = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_SECRETS = re.compile(rf"{SECRET}\s*:?\s*\{{(?:[^}}\"']|{_QUOTED})*\}}")


def parsed(content: bytes) -> pb.DistributedStrategy:
    """The message of a file.

    Raises:
        ValueError: it is no protobuf text of a strategy; the message has the line, and nothing of
            what ``fs_client_param`` has, which may be a password.
    """
    try:
        text = content.decode()
        message = text_format.Parse(text, pb.DistributedStrategy())
        _modernize(message)
        return message
    except UnicodeDecodeError as error:
        raise ValueError(
            "expected a strategy as protobuf text, got bytes that are no UTF-8"
        ) from error
    except text_format.ParseError as error:
        line = "" if error.GetLine() is None else f"line {error.GetLine()}: "
        said = str(error) if SECRET not in text else _without_secrets(text)
    # outside of the handler: the parser's error quotes the file
    raise ValueError(f"{line}expected a strategy as protobuf text, got {said}")


def _modernize(message: pb.DistributedStrategy) -> None:
    """What the original has said, in the words of today."""
    if message.a_sync_configs.k_steps == ORIGINAL_K_STEPS:
        message.a_sync_configs.ClearField("k_steps")
    if message.pipeline_configs.HasField("micro_batch"):
        message.pipeline_configs.accumulate_steps = message.pipeline_configs.micro_batch
        message.pipeline_configs.ClearField("micro_batch")


def _without_secrets(text: str) -> str:
    """What is wrong with a file, told of its other parts only."""
    rest = _SECRETS.sub(lambda found: "\n" * found[0].count("\n"), text)
    if SECRET not in rest:
        try:
            text_format.Parse(rest, pb.DistributedStrategy())
        except text_format.ParseError as error:
            return str(error)
    return "a line that it does not take"


def kept_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """The full names of the fields that are only kept."""
    for field, value in message.ListFields():
        if field.number >= KEPT:
            yield prefix + field.name
        elif isinstance(value, Message):
            yield from kept_fields(value, f"{prefix}{field.name}.")


def copy_kept(source: Message, target: Message) -> None:
    """Takes over the fields that are only kept."""
    for field, value in source.ListFields():
        if field.number < KEPT:
            if isinstance(value, Message) and any(kept_fields(value)):
                copy_kept(value, getattr(target, field.name))
        elif hasattr(value, "MergeFrom"):
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)
