"""Programs, blocks, plans and tables as protobuf messages, and back.

[Note: what a fingerprint covers]  A fingerprint covers what a program means: blocks, variables, ops
with their arguments, the plan.  It does not cover where the program runs (arguments and fields
named endpoint, endpoints), which trainer runs it (trainer_id), the process's own part of the
deployment, source lines, or values of variables.  The order of an op's arguments has no meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from hashlib import blake2b
from typing import Any

from transpiler import program_pb2 as pb
from transpiler.ir.graph import (
    Argument,
    Block,
    Literal,
    Op,
    Ref,
    Role,
    Symbol,
    Variable,
    freeze,
)
from transpiler.ir.ops import check, in_order
from transpiler.ir.rules import Clip, Hparam, Rule
from transpiler.ir.schema import LARGEST, describe
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    TableEntry,
)
from transpiler.plan.plan import (
    UNSAID,
    Collective,
    Deployment,
    DumpSettings,
    Execution,
    Lane,
    Placement,
    Plan,
    Slice,
)
from transpiler.plan.settings import A_SYNC_CONFIGS

# ---- block message ----
#
# Blocks, ops and their arguments as protobuf messages, and back.


DEEPEST = 16  # lists within lists; a block within a list or a block is refused

# ---- arguments ----


def argument_to_proto(value: Argument, depth: int = 0) -> pb.Argument:
    """One argument as a message.

    Raises:
        ValueError: a whole number beyond 64 bits, or lists more than 16 deep.
        TypeError: a type that a program cannot hold.
    """
    if depth > DEEPEST:
        raise ValueError(f"expected lists at most {DEEPEST} deep, got more")
    if value is None:
        return pb.Argument(none=pb.Nothing())
    if isinstance(value, bool):  # before int: a bool is one
        return pb.Argument(boolean=value)
    if isinstance(value, int):
        if not -LARGEST - 1 <= value <= LARGEST:
            raise ValueError(f"expected a whole number of 64 bits, got {value}")
        return pb.Argument(integer=value)
    if isinstance(value, tuple):
        return pb.Argument(
            list=pb.Arguments(items=[argument_to_proto(item, depth + 1) for item in value])
        )
    if isinstance(value, Literal):
        return pb.Argument(tensor=pb.Literal(dtype=value.dtype, shape=value.shape, data=value.data))
    if isinstance(value, float):
        return pb.Argument(real=value)
    return _word_to_proto(value)


def _word_to_proto(value: Argument) -> pb.Argument:
    if isinstance(value, str):
        return pb.Argument(text=value)
    if isinstance(value, Block):
        return pb.Argument(block=block_to_proto(value))
    if isinstance(value, Ref):
        return pb.Argument(variable=value.name)
    if isinstance(value, Symbol):
        return pb.Argument(symbol=pb.Symbol(kind=value.kind, value=value.value))
    raise TypeError(
        "expected None, bool, int, float, str, Ref, Symbol, Literal, Block or a tuple of them, got "
        f"{describe(value)}"
    )


def argument_from_proto(message: pb.Argument, depth: int = 0) -> Argument:
    """The argument of a message.

    Raises:
        ValueError: the message holds no value, or lists more than 16 deep.
    """
    kind = message.WhichOneof("value")
    if kind == "none":
        return None
    if kind == "list":
        if depth >= DEEPEST:
            raise ValueError(f"expected lists at most {DEEPEST} deep, got more")
        return tuple(argument_from_proto(item, depth + 1) for item in message.list.items)
    if kind == "block":
        return update_from_proto(message.block)
    if kind == "variable":
        return Ref(message.variable)
    if kind == "symbol":
        return Symbol(message.symbol.kind, message.symbol.value)
    if kind == "tensor":
        return Literal(message.tensor.dtype, tuple(message.tensor.shape), message.tensor.data)
    if kind is None:
        raise ValueError("expected an argument with a value, got an empty message")
    plain: bool | int | float | str = getattr(message, kind)
    return plain


# ---- blocks ----


def _variable_to_proto(variable: Variable) -> pb.Variable:
    shape = [
        pb.Dimension(symbol=size) if isinstance(size, str) else pb.Dimension(size=size)
        for size in variable.shape
    ]
    return pb.Variable(
        name=variable.name,
        shape=shape,
        dtype=variable.dtype,
        role=variable.role.value,  # type: ignore[arg-type]
        of=variable.of,
    )


def _variable_from_proto(message: pb.Variable) -> Variable:
    if not message.name:
        raise ValueError("expected variables with names, got an empty one")
    shape: list[int | str] = []
    for dimension in message.shape:
        extent = dimension.WhichOneof("extent")
        if extent is None or dimension.size < 0 or (extent == "symbol" and not dimension.symbol):
            got = str(dimension).strip()
            raise ValueError(
                f"variable {message.name!r}: expected sizes of 0 or more and named symbols, got "
                f"{got!r}"
            )
        shape.append(dimension.size if extent == "size" else dimension.symbol)
    try:
        role = Role(int(message.role))
    except ValueError as error:
        raise ValueError(
            f"variable {message.name!r}: expected a role of 0 to {len(Role) - 1}, got "
            f"{message.role}"
        ) from error
    return Variable(message.name, tuple(shape), message.dtype, role, message.of)


def _op_to_proto(op: Op) -> pb.Op:
    message = pb.Op(type=op.type, outputs=op.outputs, location=op.location)
    for name, value in op.arguments.items():
        try:
            message.arguments[name].CopyFrom(argument_to_proto(value))
        except (ValueError, TypeError) as error:
            raise type(error)(f"op {op.type!r}, argument {name!r}: {error}") from error
    return message


def _op_from_proto(message: pb.Op, inner: bool = False) -> Op:
    arguments: dict[str, Argument] = {}
    for name, value in message.arguments.items():
        try:
            if inner and value.WhichOneof("value") == "block":
                raise ValueError("expected no block within a block, got one")
            arguments[name] = argument_from_proto(value)
        except ValueError as error:
            raise ValueError(f"op {message.type!r}, argument {name!r}: {error}") from error
    op = Op(
        message.type, in_order(message.type, arguments), tuple(message.outputs), message.location
    )
    if not inner:
        check(op)
    return op


def _variables_from_proto(message: pb.Block) -> dict[str, Variable]:
    variables: dict[str, Variable] = {}
    for variable in map(_variable_from_proto, message.variables):
        if variable.name in variables:
            raise ValueError(f"variable {variable.name!r}: expected one definition, got two")
        variables[variable.name] = variable
    return variables


def block_to_proto(block: Block) -> pb.Block:
    """The message of a block.

    Raises:
        ValueError, TypeError: as :func:`argument_to_proto`.
    """
    return pb.Block(
        index=block.index,
        variables=[_variable_to_proto(variable) for variable in block.variables.values()],
        ops=[_op_to_proto(op) for op in block.ops],
    )


def update_from_proto(message: pb.Block) -> Block:
    """The block of a registered rule, unchecked: the catalogue checks it with the rule.

    Raises:
        ValueError: it does not have the format.
    """
    ops = tuple(_op_from_proto(op, inner=True) for op in message.ops)
    return Block(message.index, freeze(_variables_from_proto(message)), ops)


def block_from_proto(index: int, message: pb.Block) -> Block:
    """A block of a program, every op checked against the catalogue.

    Raises:
        ValueError: it does not fit the catalogue or the format.
    """
    place = f"block {index}"
    if message.index != index:
        raise ValueError(f"{place}: expected its own index, got {message.index}")
    ops: list[Op] = []
    try:
        variables = _variables_from_proto(message)
        for number, op in enumerate(message.ops):
            place = f"block {index}, op {number}"
            ops.append(_op_from_proto(op))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return Block(index, freeze(variables), tuple(ops))


# ---- canonical ----
#
# The bytes over which a program's fingerprint is computed.
#
# They are the same in every process, on every host and with every version of protobuf.


# see [Note: what a fingerprint covers]
_NOT_COVERED = frozenset({"endpoint", "endpoints", "trainer_id"})


def _plain(value: Argument) -> object:
    """An argument as JSON in which every type and every bit is distinct."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return {"real": "nan" if math.isnan(value) else value.hex()}
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Ref):
        return {"variable": value.name}
    if isinstance(value, Symbol):
        return {"symbol": [value.kind, value.value]}
    if isinstance(value, Block):
        return {"block": _plain_block(value)}
    return {
        "tensor": [value.dtype, list(value.shape), blake2b(value.data, digest_size=16).hexdigest()]
    }


def _plain_op(op: Op) -> object:
    arguments = {
        name: _plain(value) for name, value in op.arguments.items() if name not in _NOT_COVERED
    }
    return [op.type, arguments, list(op.outputs)]


def _plain_block(block: Block) -> object:
    variables = [
        [v.name, list(v.shape), v.dtype, v.role.name, v.of] for v in block.variables.values()
    ]
    return [variables, [_plain_op(op) for op in block.ops]]


def canonical(blocks: Sequence[Block], deployment: Deployment | None) -> bytes:
    """The bytes that a program's fingerprint covers.

    See [Note: what a fingerprint covers].
    """
    plan = None if deployment is None else deployment.plan.manifest()
    facts = {"blocks": [_plain_block(block) for block in blocks], "plan": plan}
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


# ---- table message ----
#
# Sparse tables as protobuf messages, and back.


_ENTRIES: dict[str, tuple[type[Any], type[Any]]] = {
    "count": (CountFilterEntry, pb.CountFilterEntry),
    "probability": (ProbabilityEntry, pb.ProbabilityEntry),
    "show_click": (ShowClickEntry, pb.ShowClickEntry),
}
_PLAIN = (
    "name",
    "dim",
    "dtype",
    "rows",
    "lane",
    "seed",
    "ttl",
    "capacity",
    "eviction",
    "memory_bytes",
    "compression",
)
_OPTIONAL = ("rows", "ttl", "capacity", "memory_bytes")


def table_to_proto(table: Table) -> pb.Table:
    """The message of a table."""
    plain = {name: getattr(table, name) for name in _PLAIN}  # a field that is None stays absent
    message = pb.Table(
        **plain,
        segments=[pb.Segment(begin=s.begin, end=s.end, group=s.group) for s in table.segments],
        initial=pb.Initial(kind=table.initial.kind, low=table.initial.low, high=table.initial.high),
    )
    for name, (plain_type, message_type) in _ENTRIES.items():
        if isinstance(table.entry, plain_type):
            settings = {
                field.name: getattr(table.entry, field.name) for field in fields(plain_type)
            }
            getattr(message, name).CopyFrom(message_type(**settings))
    return message


def table_from_proto(message: pb.Table) -> Table:
    """The table of a message.

    Raises:
        ValueError: a setting is out of range, or two contradict each other.
    """
    plain = {
        name: getattr(message, name)
        for name in _PLAIN
        if name not in _OPTIONAL or message.HasField(name)
    }
    segments = tuple(Segment(s.begin, s.end, s.group) for s in message.segments)
    initial = Initial(message.initial.kind, message.initial.low, message.initial.high)
    return Table(**plain, segments=segments, initial=initial, entry=_entry_from_proto(message))


def _entry_from_proto(message: pb.Table) -> TableEntry | None:
    name = message.WhichOneof("entry")
    if name is None:
        return None
    plain_type = _ENTRIES[name][0]
    entry: TableEntry = plain_type(
        **{field.name: getattr(getattr(message, name), field.name) for field in fields(plain_type)}
    )
    return entry


# ---- plan message ----
#
# Plans, deployments and hyper-parameters as protobuf messages, and back.


SOFT_WAIT: int = A_SYNC_CONFIGS["soft_wait_ms"].default  # a message leaves it out


def hparams_to_proto(hparams: Mapping[str, Hparam]) -> dict[str, pb.Hparam]:
    """A group's hyper-parameters as the values of a ``map<string, Hparam>`` field.

    Pass them to the message's constructor.
    """
    return {
        name: pb.Hparam(values=value, pair=True)
        if isinstance(value, tuple)
        else pb.Hparam(values=[value])
        for name, value in hparams.items()
    }


def hparams_from_proto(fields: Mapping[str, pb.Hparam]) -> dict[str, Hparam]:
    """The hyper-parameters of a ``map<string, Hparam>`` field, sorted by name.

    Raises:
        ValueError: an hparam that is no pair has no value, or several.
    """
    hparams: dict[str, Hparam] = {}
    for name in sorted(fields):
        values = tuple(fields[name].values)
        if not fields[name].pair and len(values) != 1:
            raise ValueError(f"hparam {name!r}: expected one value, got {len(values)}")
        hparams[name] = values if fields[name].pair else values[0]
    return hparams


def plan_to_proto(plan: Plan) -> pb.Plan:
    """The message of a plan."""
    return pb.Plan(
        lanes=[_lane_to_proto(lane) for lane in plan.lanes],
        trainers=plan.trainers,
        servers=plan.servers,
        groups=[_rule_to_proto(rule) for rule in plan.groups],
        placements=[_placement_to_proto(placement) for placement in plan.placements],
        clip=None
        if plan.clip is None
        else pb.Clip(kind=plan.clip.kind, low=plan.clip.low, high=plan.clip.high),
        graph=plan.graph,
        tables=list(map(table_to_proto, plan.tables)),
        averaged=plan.averaged,
        lost_trainer="" if plan.lost_trainer == UNSAID["lost_trainer"] else plan.lost_trainer,
        collective=None if plan.collective is None else _collective_to_proto(plan.collective),
    )


def _collective_to_proto(collective: Collective) -> pb.Collective:
    values = asdict(collective)
    if values["gradient_scale"] == UNSAID["gradient_scale"]:
        del values["gradient_scale"]
    return pb.Collective(**values)


def _rule_to_proto(rule: Rule) -> pb.Rule:
    return pb.Rule(
        type=rule.type,
        hparams=hparams_to_proto(rule.hparams),
        flags=rule.flags,
        update=None if rule.update is None else block_to_proto(rule.update),
    )


def _rule_from_proto(message: pb.Rule) -> Rule:
    return Rule(
        message.type,
        hparams_from_proto(message.hparams),
        dict(sorted(message.flags.items())),
        update_from_proto(message.update) if message.HasField("update") else None,
    )


def _lane_to_proto(lane: Lane) -> pb.Lane:
    plain = {
        name: value
        for name, value in ((field.name, getattr(lane, field.name)) for field in fields(lane))
        if name != "outer" and (name not in UNSAID or value != UNSAID[name])
    }
    return pb.Lane(**plain, outer=None if lane.outer is None else _rule_to_proto(lane.outer))


def _lane_from_proto(message: pb.Lane) -> Lane:
    plain: dict[str, Any] = {}
    for field in fields(Lane):
        said = getattr(message, field.name)
        if message.DESCRIPTOR.fields_by_name[field.name].has_presence:
            plain[field.name] = said if message.HasField(field.name) else field.default
        else:
            plain[field.name] = said or UNSAID.get(field.name, said)
    if plain["outer"] is not None:
        plain["outer"] = _rule_from_proto(message.outer)
    return Lane(**plain)


def _placement_to_proto(placement: Placement) -> pb.Placement:
    slices = [
        pb.Slice(name=s.name, begin=s.begin, end=s.end, shape=s.shape, server=s.server)
        for s in placement.slices
    ]
    group = -1 if placement.group is None else placement.group
    return pb.Placement(
        name=placement.name,
        shape=placement.shape,
        dtype=placement.dtype,
        group=group,
        slices=slices,
        lane=placement.lane,
        compression=placement.compression,
    )


def plan_from_proto(message: pb.Plan) -> Plan:
    """The plan of a message, unchecked: ``check_plan`` in ``verify/untrusted.py`` checks it.

    Raises:
        ValueError: an hparam that is no pair has no value, or several.
    """
    placements = tuple(
        Placement(
            item.name,
            tuple(item.shape),
            item.dtype,
            None if item.group == -1 else item.group,
            tuple(Slice(s.name, s.begin, s.end, tuple(s.shape), s.server) for s in item.slices),
            item.lane,
            item.compression,
        )
        for item in message.placements
    )
    groups, lanes = (
        tuple(map(_rule_from_proto, message.groups)),
        tuple(map(_lane_from_proto, message.lanes)),
    )
    clip = (
        Clip(message.clip.kind, message.clip.high, message.clip.low)
        if message.HasField("clip")
        else None
    )
    tables = tuple(map(table_from_proto, message.tables))
    collective = None
    if message.HasField("collective"):
        values = {f.name: getattr(message.collective, f.name) for f in fields(Collective)}
        values["steps"] = values["steps"] or 1
        values["gradient_scale"] = values["gradient_scale"] or UNSAID["gradient_scale"]
        collective = Collective(**values)
    averaged = tuple(message.averaged)
    return Plan(
        lanes,
        message.trainers,
        message.servers,
        groups,
        placements,
        clip,
        message.graph,
        tables,
        averaged,
        collective,
        message.lost_trainer or str(UNSAID["lost_trainer"]),
    )


def _execution_to_proto(execution: Execution) -> pb.Execution | None:
    if execution == Execution():
        return None
    said = {field.name: getattr(execution, field.name) for field in fields(execution)}
    dump = said.pop("dump")
    return pb.Execution(
        **said,
        dump_path=dump.path,
        dump_fields=dump.fields,
        dump_params=dump.params,
        dump_stats=dump.stats,
    )


def _execution_from_proto(message: pb.Execution) -> Execution:
    names = [field.name for field in fields(Execution)]
    said = {name: getattr(message, name) for name in names if name not in ("iterations", "dump")}
    lists = (message.dump_fields, message.dump_params, message.dump_stats)
    dump = DumpSettings(message.dump_path, *map(tuple, lists))
    return Execution(**said, iterations=message.iterations or 1, dump=dump)


def deployment_to_proto(deployment: Deployment) -> pb.Deployment:
    """The message of a deployment."""
    return pb.Deployment(
        plan=plan_to_proto(deployment.plan),
        endpoints=deployment.endpoints,
        trainer_id=-1 if deployment.trainer_id is None else deployment.trainer_id,
        server_index=-1 if deployment.server_index is None else deployment.server_index,
        wait_port=deployment.wait_port,
        runtime_split_send_recv=deployment.runtime_split_send_recv,
        soft_wait_ms=None if deployment.soft_wait_ms == SOFT_WAIT else deployment.soft_wait_ms,
        optimizer=deployment.optimizer,
        execution=_execution_to_proto(deployment.execution),
    )


def deployment_from_proto(message: pb.Deployment) -> Deployment:
    """The deployment of a message.

    Raises:
        ValueError: a number below -1, or as :func:`plan_from_proto`.
    """
    if message.trainer_id < -1 or message.server_index < -1:
        raise ValueError(
            "deployment: expected numbers of 0 or more, or -1 for none, got "
            f"trainer_id {message.trainer_id}, server_index {message.server_index}"
        )
    return Deployment(
        plan_from_proto(message.plan),
        tuple(message.endpoints),
        None if message.trainer_id == -1 else message.trainer_id,
        None if message.server_index == -1 else message.server_index,
        message.wait_port,
        message.runtime_split_send_recv,
        message.soft_wait_ms if message.HasField("soft_wait_ms") else SOFT_WAIT,
        message.optimizer,
        _execution_from_proto(message.execution),
    )


# ---- serialize ----
#
# Programs as protobuf messages: data, never code.
#
# ``to_proto`` and ``from_proto`` are exact inverses of each other.


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
        TypeError: it is not a ``program_pb2.Program``.
        ValueError: it does not fit the catalogue or the format; the message says where.
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
