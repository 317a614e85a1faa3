"""Plans, deployments and hyper-parameters as protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from transpiler import program_pb2 as pb
from transpiler.formats.block_message import block_to_proto, update_from_proto
from transpiler.formats.table_message import table_from_proto, table_to_proto
from transpiler.ir.rules import Clip, Hparam, Rule
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
    plain = {
        field.name: getattr(message, field.name)
        for field in fields(Lane)
        if field.name not in ("outer", "staleness")
    }
    plain |= {name: value for name, value in UNSAID.items() if not plain[name]}
    outer = _rule_from_proto(message.outer) if message.HasField("outer") else None
    return Lane(
        **plain, staleness=message.staleness if message.HasField("staleness") else None, outer=outer
    )


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
    """The plan of a message, unchecked: ``untrusted_plan.check_plan`` checks it.

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
