"""The ops of sparse tables: their schemas, and how a table's settings are written as an op.

::

    single-node   sparse_table        declares a table: the settings that a plan needs
                  lookup_table        the rows of some ids
                  lookup_table_grad   the gradient of the rows that all lookups of a table read,
                                      each id once
                  an optimizer op     with ``columns``: the columns of every row that it updates
    trainer       split_ids           ids of lookups, or a gradient of rows -> a part a server
                  prefetch            parts of ids -> their rows
                  merge_ids           parts of rows -> the rows of each lookup
                  distributed_lookup_table    the three in one, with runtime_split_send_recv
                  send, fake_init     as for parameters
    server        lookup_table        answers the lookups of trainers
                  sum, scale, clip, norm_scale, an optimizer op
                                      on gradients of rows, as on gradients of parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.ir.graph import Argument, Op, Ref, Role, Variable
from transpiler.ir.rules import ROW_RULES, Hparam, Rule
from transpiler.ir.schema import (
    BOOLEAN,
    COUNT,
    INDEX,
    INTEGER,
    NAME,
    NUMBER,
    VARIABLE,
    VARIABLES,
    ArgumentKind,
    Parameter,
    Schema,
    either,
    fixed,
    many,
    optional,
)
from transpiler.ir.tables import (
    CountFilterEntry,
    Initial,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    TableEntry,
)

ENTRIES: Mapping[str, type[CountFilterEntry] | type[ProbabilityEntry] | type[ShowClickEntry]] = (
    MappingProxyType(
        {cls.__name__: cls for cls in (CountFilterEntry, ProbabilityEntry, ShowClickEntry)}
    )
)


def _schema(
    results: int | None,
    least: int = 0,
    may: Mapping[str, ArgumentKind] | None = None,
    **must: ArgumentKind,
) -> Schema:
    extra = {name: Parameter(kind, required=False) for name, kind in (may or {}).items()}
    return Schema(
        MappingProxyType({name: Parameter(kind) for name, kind in must.items()} | extra),
        results,
        least,
    )


_PADDING: Mapping[str, ArgumentKind] = {"padding_idx": INTEGER}
_SETTINGS: Mapping[str, ArgumentKind] = {
    "rows": COUNT,
    "seed": INTEGER,
    "initial": many(either(NAME, NUMBER)),
    "entry": many(either(NAME, NUMBER)),
    "ttl": NUMBER,
    "capacity": COUNT,
    "eviction": NAME,
    "memory_bytes": COUNT,
    "compression": NAME,
}

# fmt: off
SCHEMAS: Mapping[str, Schema] = MappingProxyType({
    "sparse_table":      _schema(1, dim=COUNT, dtype=NAME, may=_SETTINGS),
    # the padding's id is not looked up: it reads zeros
    "lookup_table":      _schema(1, w=VARIABLE, ids=VARIABLE, may=_PADDING),
    # one of each argument for each lookup
    "lookup_table_grad": _schema(1, w=VARIABLE, ids=VARIABLES, grads=VARIABLES,
                                 may={"counted": VARIABLES,
                                      "padding_idx": many(optional(INTEGER))}),
    "split_ids":         _schema(None, 1, x=VARIABLES, may=_PADDING),
    # of several tables: the parts of each, by server, one table after the other
    "prefetch":          _schema(None, 1, w=VARIABLES, ids=VARIABLES, endpoints=many(NAME),
                                 trainer_id=INDEX),
    "merge_ids":         _schema(None, 1, x=VARIABLES, ids=VARIABLES, rows=VARIABLES, may=_PADDING),
    "distributed_lookup_table":
                         _schema(None, 1, w=VARIABLE, ids=VARIABLES, endpoints=many(NAME),
                                 trainer_id=INDEX, may=_PADDING),
})
# fmt: on
# the ops whose results are a list
SEVERAL = frozenset({"split_ids", "prefetch", "merge_ids", "distributed_lookup_table"})
# the ops that read rows of a table
LOOKUPS = frozenset({"lookup_table", "prefetch", "distributed_lookup_table"})


def updates_rows(op: Op) -> bool:
    """Whether an optimizer op updates columns of rows."""
    return "columns" in op.arguments


def table_name(op: Op) -> str:
    """The table that an op looks up, declares or updates."""
    value = op.arguments.get("w", op.arguments.get("param"))
    return value.name if isinstance(value, Ref) else op.outputs[0]


def expect_counts(op: Op) -> str:
    """The error in the numbers of a table op's arguments and results; "" if there is none."""
    counted = {name: len(value) for name, value in op.arguments.items() if isinstance(value, tuple)}
    if op.type == "lookup_table_grad":
        wanted = counted["ids"]
        for name in {"grads", "counted", "padding_idx"} & counted.keys():
            if counted[name] != wanted:
                return (
                    f"argument {name!r}: expected {wanted}, one for each lookup, got "
                    f"{counted[name]}"
                )
    if op.type == "prefetch" and not counted["ids"] == counted["endpoints"] == len(op.outputs):
        return (
            f"expected ids and a result for each of {counted['endpoints']} endpoints, got "
            f"{counted['ids']} and {len(op.outputs)}"
        )
    if op.type == "prefetch" and (not counted["w"] or counted["ids"] % counted["w"]):
        return (
            f"expected as many parts of ids for each of {counted['w']} tables, got {counted['ids']}"
        )
    if op.type == "merge_ids" and (
        counted["x"] != len(op.outputs) or counted["ids"] != counted["rows"]
    ):
        return (
            f"expected a result for each of {counted['x']} lookups and rows for each of "
            f"{counted['ids']} parts of ids, got {len(op.outputs)} and {counted['rows']}"
        )
    if op.type == "distributed_lookup_table" and counted["ids"] != len(op.outputs):
        return f"expected a result for each of {counted['ids']} lookups, got {len(op.outputs)}"
    if "" in op.outputs:
        return "expected results with names, got an empty one"
    return ""


# ---- the table ----


def declared(table: Table) -> Op:
    """The op that declares a table: those settings that differ from a table's defaults."""
    usual = {field.name: field.default for field in fields(Table) if field.default is not MISSING}
    arguments: dict[str, Argument] = {"dim": table.dim, "dtype": table.dtype}
    for name in _SETTINGS:
        value = getattr(table, name)
        if value == usual[name]:
            continue
        if name == "initial":
            value = (value.kind, value.low, value.high)
        elif name == "entry":
            value = (type(value).__name__, *(getattr(value, field.name) for field in fields(value)))
        arguments[name] = value
    return Op("sparse_table", arguments, (table.name,))


def table_of(op: Op, segments: Sequence[Segment]) -> Table:
    """The table that an op declares, with these segments.

    Raises:
        ValueError: a setting is out of range, or two contradict each other.
    """
    given = dict(op.arguments)
    if "initial" in given:
        given["initial"] = _made("initial", Initial, given["initial"])
    if "entry" in given:
        given["entry"] = _entry(given["entry"])  # type: ignore[assignment]
    return Table(name=op.outputs[0], segments=tuple(segments), **given)  # type: ignore[arg-type]  # checked by Table


def _made(what: str, cls: type[Any], value: Argument) -> Any:
    assert isinstance(value, tuple), "as the schema says"
    try:
        return cls(*value)
    except TypeError as error:
        raise ValueError(f"sparse_table: {what}: {error}") from error


def _entry(value: Argument) -> TableEntry:
    assert isinstance(value, tuple), "as the schema says"
    name = value[0] if value else ""
    if not isinstance(name, str) or name not in ENTRIES:
        raise ValueError(f"sparse_table: entry: expected one of {', '.join(ENTRIES)}, got {name!r}")
    entry: TableEntry = _made("entry", ENTRIES[name], value[1:])
    return entry


# ---- updates ----


def update_op(name: str, grad: str, segment: Segment, rule: Rule) -> Op:
    """The optimizer op of one segment of a table."""
    arguments: dict[str, Argument] = {
        "param": Ref(name),
        "grad": Ref(grad),
        "columns": (segment.begin, segment.end),
    }
    return Op(
        rule.type, {**arguments, "group": segment.group, **rule.hparams, **rule.flags}, (name,)
    )


def update_schema(op_type: str) -> Schema:
    """The schema of an optimizer op on rows.  Its states are part of the rows, not variables.

    Raises:
        ValueError: rows have no such rule.
    """
    if op_type not in ROW_RULES:
        raise ValueError(f"op {op_type!r}: expected a rule for rows, one of {', '.join(ROW_RULES)}")
    spec = ROW_RULES[op_type]
    hparams: dict[str, ArgumentKind] = {
        name: fixed(NUMBER, 2) if name == "betas" else NUMBER for name in spec.hparams
    }
    may: dict[str, ArgumentKind] = {**hparams, **dict.fromkeys(spec.flags, BOOLEAN)}
    return _schema(1, param=VARIABLE, grad=VARIABLE, columns=fixed(INDEX, 2), group=INDEX, may=may)


def row_rule_of_op(op: Op) -> Rule:
    """The rule of an optimizer op on rows: its hyper-parameters and flags."""
    spec = ROW_RULES[op.type]
    hparams = {name: _hparam(op.arguments[name]) for name in spec.hparams if name in op.arguments}
    return Rule(
        op.type,
        hparams,
        {name: bool(op.arguments[name]) for name in spec.flags if name in op.arguments},
    )


def _hparam(value: Argument) -> Hparam:
    if isinstance(value, tuple):
        return tuple(float(item) for item in value if isinstance(item, int | float))
    assert isinstance(value, int | float), "checked against the schema"
    return float(value)


def segment_of(op: Op) -> Segment:
    """The columns that an optimizer op updates, and its group."""
    columns, group = op.arguments["columns"], op.arguments["group"]
    assert isinstance(columns, tuple) and isinstance(group, int), "checked against the schema"
    begin, end = (int(edge) for edge in columns if isinstance(edge, int))
    return Segment(begin, end, group)


def table_variable(table: Table) -> Variable:
    """The variable of a table."""
    return Variable(
        table.name,
        (f"{table.name}_rows" if table.rows is None else table.rows, table.dim),
        table.dtype,
        Role.TABLE,
    )


def gradient_variable(table: Table, name: str, role: Role = Role.GRADIENT) -> Variable:
    """A variable for the rows of a table that a step touches.

    Args:
        role: GRADIENT or DELTA; INPUT: rows that were read.
    """
    return Variable(name, (f"{table.name}_touched", table.dim), table.computes_in, role, table.name)


def is_sparse(module: nn.Module) -> bool:
    """Whether a module is one of torch's embeddings, with ``sparse=True``."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and bool(module.sparse)


# settings of torch's embeddings that rows of a table do not support, and what to do instead
_REFUSED = {
    "max_norm": "a lookup would write to rows that other trainers read at the same time; add a "
    "penalty on the norm of what the embedding gives to the loss",
    "scale_grad_by_freq": "a gradient would depend on how often an id is in one trainer's part of "
    "the batch; divide by the joint counts in the loss",
    "mode 'max'": "a DistributedEmbedding pools by sum, mean or sqrtn",
}


def refused_form(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """The setting of one of torch's embeddings that rows of a table do not support, and what to do
    instead; None if there is none.
    """
    asked = {
        "max_norm": module.max_norm is not None,  # 0.0 is a norm, too
        "scale_grad_by_freq": bool(module.scale_grad_by_freq),
        "mode 'max'": getattr(module, "mode", "") == "max",
    }
    return next((f"{key}: {why}" for key, why in _REFUSED.items() if asked[key]), None)


def start_rows(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor] | None:
    """The first rows of a table that modules hold, for another process.

    Returns:
        Ids, int64 [n], and values, [n, dim], on the CPU; None where the table's settings give every
        row its initial values.
    """
    for module in modules:
        given: Any = module
        if is_sparse(module):
            return torch.arange(len(given.weight)), given.weight.detach().cpu().clone()
        if given.initial_rows is not None:
            ids, values = given.initial_rows
            return ids, values
    return None
