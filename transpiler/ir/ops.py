"""The op catalogue: every op that a program may hold, with the names and kinds of its arguments.

There are three families.  ``aten.*`` ops are torch's own, with torch's schemas (``aten_ops.py``).
Optimizer ops (``adam``) are those of ``rules.RULES``: a parameter, its gradient, its states, the
group's hyper-parameters and flags.  So are registered ones (``registered.lion``), whose argument
``update`` is the rule's block.  All other ops are ours: the table below and ``table_ops.py``.
``check`` checks one op against its schema.  The invariants of whole programs are in ``verify/``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from transpiler.ir import update_block
from transpiler.ir.aten_ops import aten_overload as aten_overload
from transpiler.ir.aten_ops import aten_schema
from transpiler.ir.gradient_ops import SCHEMAS as GRADIENT_SCHEMAS
from transpiler.ir.graph import Argument, Block, Op
from transpiler.ir.python_functions import SCHEMAS as PYTHON_SCHEMAS
from transpiler.ir.python_functions import expect_results
from transpiler.ir.recurrent import SCHEMAS as RECURRENT_SCHEMAS
from transpiler.ir.rules import ROW_RULES, RULES, Hparam, Rule, check_registered, state_of
from transpiler.ir.scaling_ops import SCHEMAS as SCALING_SCHEMAS
from transpiler.ir.schema import (
    BOOLEAN,
    BOUND,
    COUNT,
    INDEX,
    INTEGER,
    LITERAL,
    NAME,
    NUMBER,
    REAL,
    SIZE,
    TEXT,
    VARIABLE,
    VARIABLES,
    ArgumentKind,
    Parameter,
    Schema,
    check_against,
    describe,
    either,
    fixed,
    many,
    optional,
    where,
)
from transpiler.ir.table_ops import (
    LOOKUPS,
    expect_counts,
    row_rule_of_op,
    update_schema,
    updates_rows,
)
from transpiler.ir.table_ops import SCHEMAS as TABLE_SCHEMAS
from transpiler.ir.update_block import is_registered, registered_schema


def _schema(results: int | None, least: int = 0, **kinds: ArgumentKind) -> Schema:
    return Schema(
        MappingProxyType({name: Parameter(kind) for name, kind in kinds.items()}), results, least
    )


def _with(schema: Schema, **kinds: ArgumentKind) -> Schema:
    """The schema with arguments that may be left out."""
    extra = {name: Parameter(kind, required=False) for name, kind in kinds.items()}
    return Schema(MappingProxyType({**schema.parameters, **extra}), schema.results, schema.least)


_EXTENT = either(SIZE, REAL)  # a size, or a number made of sizes
_ENDPOINTS = many(NAME)
_NAMES = many(NAME)
_SECTIONS = many(INDEX)

# fmt: off
_OWN: dict[str, Schema] = {
    # python arithmetic on sizes; every result is a variable of role SIZE
    "sym.size": _schema(1, x=VARIABLE, dim=INTEGER),
    **{f"sym.{name}": _schema(1, a=_EXTENT, b=_EXTENT)
       for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "max", "min")},
    **{f"sym.{name}": _schema(1, a=_EXTENT)
       for name in ("neg", "float", "int", "ceil", "floor", "sqrt")},
    # values
    "assign_value":     _schema(1, value=LITERAL),
    "assign":           _schema(1, x=VARIABLE),         # gives x a second name
    "init":             _schema(1),                     # binds the value that the process holds
    "fake_init":        _schema(1),                     # declares a table; nothing is held
    "sum":              _schema(1, x=VARIABLES),
    # with k_steps: scales in every run up to begin_step, then in every k-th; otherwise gives x
    # unchanged
    "scale":            _with(_schema(1, x=VARIABLE, scale=NUMBER),
                              k_steps=COUNT, begin_step=COUNT),
    # sums over runs; the ops behind it run in every k-th run only, on their sum or mean
    "gradient_merge":   _schema(None, 1, x=VARIABLES, k_steps=COUNT, avg=BOOLEAN),
    # clipping
    "clip":             _schema(1, x=VARIABLE, min=BOUND, max=BOUND),
    "clip_by_norm":     _schema(1, x=VARIABLE, max_norm=BOUND),
    # gives the coefficient of all gradients
    "global_norm_scale": _schema(1, x=VARIABLES, max_norm=BOUND),
    "scale_by":         _schema(1, x=VARIABLE, coefficient=VARIABLE),
    # times the commit's coefficient for a parameter, or for "" the common one
    "norm_scale":       _schema(1, x=VARIABLE, by=TEXT),
    # communication: one endpoint for each variable or, with sections (runtime_split_send_recv),
    # for each section
    "split":            _schema(None, 1, x=VARIABLE, sections=_SECTIONS),
    "concat":           _schema(1, x=VARIABLES, axis=INTEGER),
    # with delta: sends the change of every x in k steps, slice by slice under these names; of a
    # table, whose sections are 0, that of the rows touched.  With table: sends a gradient of rows.
    "send":             _with(_schema(0, x=VARIABLES, endpoints=_ENDPOINTS, trainer_id=INDEX),
                              sections=_SECTIONS, delta=_NAMES, mode=NAME, k_steps=COUNT,
                              table=NAME),
    "send_barrier":     _with(_schema(0, endpoints=_ENDPOINTS, trainer_id=INDEX),
                              half_async=BOOLEAN),
    "recv":             _with(_schema(None, 1, param=NAME, endpoints=_ENDPOINTS),
                              trainer_id=INDEX, sections=_SECTIONS),
    "fetch_barrier":    _schema(0, endpoints=_ENDPOINTS, trainer_id=INDEX),
    "listen_and_serv":  _with(_schema(0, endpoint=TEXT, server_index=INDEX, trainers=COUNT,
                                      mode=NAME, optimize_blocks=many(INDEX)),
                              prefetch_blocks=many(INDEX)),
    # among trainers: trainer 0 generates the ids and broadcasts them.  The result
    # of an op marked * is in flight until c_sync_comm_stream has waited for it.
    "gen_nccl_id":      _schema(None, 1, endpoints=_ENDPOINTS, trainer_id=INDEX,
                                nccl_comm_num=COUNT, use_hierarchical_allreduce=BOOLEAN,
                                hierarchical_allreduce_inter_nranks=INDEX),
    "c_comm_init":      _schema(0, x=VARIABLES, ring_id=INDEX, nranks=COUNT, trainer_id=INDEX),
    # * with bucket: those of a bucket travel together
    "c_broadcast":      _with(_schema(1, x=VARIABLE, root=INDEX, ring_id=INDEX), bucket=INDEX),
    "c_reduce_sum":     _schema(1, x=VARIABLE, root=INDEX, ring_id=INDEX),  # *, on the root
    # * the sums of a bucket travel together
    "c_allreduce_sum":  _with(_schema(1, x=VARIABLE, ring_id=INDEX, bucket=INDEX),
                              k_steps=COUNT, begin_step=COUNT),
    # * beside servers: the means over the live trainers, in place
    "c_allreduce_avg":  _schema(None, 1, x=VARIABLES, ring_id=INDEX),
    # finds k_steps anew from the trainers' mean of the loss x, in the runs in which they average
    "c_adapt_k_steps":  _schema(0, x=VARIABLE, ring_id=INDEX, k_steps=COUNT),
    "c_sync_comm_stream": _schema(None, 1, x=VARIABLES, ring_id=INDEX),
    **GRADIENT_SCHEMAS,
    **TABLE_SCHEMAS,
    **RECURRENT_SCHEMAS,
    **PYTHON_SCHEMAS,
    **SCALING_SCHEMAS,
}
# fmt: on

# ops with results that may have no reader; ops whose results are counted where they are defined
_MAY_BE_UNREAD = frozenset({*RECURRENT_SCHEMAS, *PYTHON_SCHEMAS})
_COUNTED: Mapping[str, Callable[[Op], str]] = MappingProxyType(
    {**dict.fromkeys(TABLE_SCHEMAS, expect_counts), **dict.fromkeys(PYTHON_SCHEMAS, expect_results)}
)

COLLECTIVE = frozenset({"gen_nccl_id", *(name for name in _OWN if name.startswith("c_"))})
COMMUNICATION = (
    frozenset({"send", "recv", "send_barrier", "fetch_barrier", "listen_and_serv"})
    | COLLECTIVE
    | LOOKUPS - {"lookup_table"}
)
SERVER_OPS = frozenset(  # and every optimizer op
    "listen_and_serv sum scale dc_compensate clip norm_scale init lookup_table".split()
)


@functools.cache
def _rules() -> Mapping[str, Mapping[str, Parameter]]:
    """The hyper-parameters and flags of every optimizer op.

    A hyper-parameter is a pair where the default of torch's class is one.
    """
    table: dict[str, Mapping[str, Parameter]] = {}
    for op_type, spec in RULES.items():
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(spec.cls).parameters.items()
        }
        hparams = {name: _hparam_parameter(defaults.get(name)) for name in spec.hparams}
        table[op_type] = {
            **hparams,
            **{name: Parameter(BOOLEAN, required=False) for name in spec.flags},
        }
    return MappingProxyType(table)


def _hparam_parameter(default: object) -> Parameter:
    kind = fixed(NUMBER, len(default)) if isinstance(default, tuple) else NUMBER
    return Parameter(kind if default is not None else optional(kind), required=default is not None)


def is_optimizer(op_type: str) -> bool:
    """Whether the op is an update rule, of parameters or of rows."""
    return op_type in _rules() or op_type in ROW_RULES or is_registered(op_type)


def allowed_on_server(op_type: str) -> bool:
    """Whether a pserver's program may hold the op."""
    return op_type in SERVER_OPS or is_optimizer(op_type)


def known(op_type: str) -> bool:
    """Whether the catalogue has the op."""
    if op_type in _OWN or is_optimizer(op_type):
        return True
    try:
        aten_schema(op_type)
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _states(
    op_type: str, hparams: tuple[tuple[str, Hparam], ...], flags: tuple[tuple[str, bool], ...]
) -> Mapping[str, bool]:
    return MappingProxyType(state_of(Rule(op_type, dict(hparams), dict(flags))))


def rule_of_op(op: Op) -> Rule:
    """The rule of an optimizer op: its hyper-parameters and flags."""
    if updates_rows(op):
        return row_rule_of_op(op)
    update = op.arguments.get("update")
    if isinstance(update, Block):
        own = {name: _hparam(op.arguments[name]) for name in update_block.hparams_of(update)}
        return Rule(op.type, own, {}, update)
    spec = RULES[op.type]
    hparams = {
        name: _hparam(op.arguments[name])
        for name in spec.hparams
        if op.arguments.get(name) is not None
    }
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


def states_of_op(op: Op) -> dict[str, bool]:
    """The states that an optimizer op keeps, by name.

    Returns:
        True for a state of the parameter's shape, False for a scalar.  An op on rows has none: its
        states are part of the rows.

    Raises:
        ValueError: torch refuses the hyper-parameters or flags.
    """
    if updates_rows(op):
        return {}
    rule = rule_of_op(op)
    if rule.update is not None:
        return update_block.states_of(rule.update)
    try:
        return dict(_states(rule.type, tuple(rule.hparams.items()), tuple(rule.flags.items())))
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{where(op)}: expected hyper-parameters and flags that torch accepts, got {rule}: "
            f"{error}"
        ) from error


def check_rule(rule: Rule) -> None:
    """Checks a rule's hyper-parameters and flags against the catalogue.

    Raises:
        ValueError: naming the rule, the hyper-parameter or flag, what was expected and what came.
    """
    if rule.update is not None or is_registered(rule.type):
        check_registered(rule)
        return
    if rule.type not in _rules():
        raise ValueError(f"rule {rule.type!r}: expected one of {', '.join(_rules())}")
    _optimizer_schema(Op(rule.type, {**rule.hparams, **rule.flags, "group": 0}))


def _optimizer_schema(op: Op) -> Schema:
    if updates_rows(op):
        return update_schema(op.type)
    if is_registered(op.type):
        return registered_schema(op)
    if op.type not in _rules():
        raise ValueError(
            f"{where(op)}, argument 'columns': expected columns for a rule of rows, got none"
        )
    attributes = {"group": Parameter(INDEX), **_rules()[op.type]}
    check_against(Op(op.type, op.attributes, (), op.location), Schema(attributes, 0))
    tensors = {name: Parameter(VARIABLE) for name in ("param", "grad", *states_of_op(op))}
    return Schema({**tensors, **attributes}, 1)


def schema_of(op: Op) -> Schema:
    """The schema of an op.  An optimizer op's depends on its flags, which decide its states.

    Raises:
        ValueError: the op is not in the catalogue.
    """
    if op.type in _OWN:
        return _OWN[op.type]
    if is_optimizer(op.type):
        return _optimizer_schema(op)
    if op.type.startswith("aten."):
        return aten_schema(op.type)
    raise ValueError(f"{where(op)}: the catalogue has no such op")


def _count(op: Op, name: str) -> int:
    value = op.arguments.get(name)
    return len(value) if isinstance(value, tuple) else 1


def _expect_counts(op: Op) -> str:
    """The error in the numbers of an op's endpoints, sections and results; "" if there is none."""
    results = len(op.outputs)
    if op.type in _COUNTED:
        return _COUNTED[op.type](op)
    if op.type == "split" and _count(op, "sections") != results:
        return (
            f"argument 'sections': expected one for each of the {results} results, got "
            f"{_count(op, 'sections')}"
        )
    if op.type in ("send", "recv"):
        if "table" in op.arguments:
            # every server has a part, cut before or by the send
            wanted, got = _count(op, "endpoints"), _count(op, "x")
            return (
                ""
                if got in (1, wanted)
                else f"argument 'x': expected 1 or {wanted}, one for each server, got {got}"
            )
        parts = (
            _count(op, "sections")
            if "sections" in op.arguments
            else _count(op, "x")
            if op.type == "send"
            else results
        )
        for name in ("endpoints", *({"delta"} & set(op.arguments))):
            if _count(op, name) != parts:
                return (
                    f"argument {name!r}: expected {parts}, one for each slice, got "
                    f"{_count(op, name)}"
                )
        told = {"sections", "delta", "mode", "k_steps"} & set(op.arguments)
        if "delta" in told and len(told) < 4 or "delta" not in told and told - {"sections"}:
            return (
                "expected sections, delta, mode and k_steps together, got "
                f"{', '.join(sorted(told))}"
            )
    if op.type in ("c_allreduce_avg", "c_sync_comm_stream") and op.outputs != op.inputs:
        return (
            f"expected its arguments as its results ({', '.join(op.inputs[:8])}), got "
            f"{', '.join(op.outputs[:8])}"
        )
    if is_optimizer(op.type) and op.outputs != tuple(op.inputs[:1]) and op.outputs:
        param = op.arguments["param"]
        if op.outputs[0] != getattr(param, "name", ""):
            return (
                f"expected the parameter as its result ({describe(param)}), got {op.outputs[0]!r}"
            )
    if not (op.type.startswith("aten.") or op.type in _MAY_BE_UNREAD) and "" in op.outputs:
        return "expected results with names, got an empty one"
    return ""


def check(op: Op) -> None:
    """Checks an op against the catalogue.

    Raises:
        ValueError: the op is not in the catalogue, or an argument is missing, unknown or of another
            kind than its schema asks for, or the number of results is wrong; the message names op,
            argument, what was expected and what came.
    """
    check_against(op, schema_of(op))
    if wrong := _expect_counts(op):
        raise ValueError(f"{where(op)}: {wrong}")


def in_order(op_type: str, arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    """The arguments in the order of the op's schema, which for an optimizer op is param, grad,
    states, group, hyper-parameters, flags.

    A protobuf map has no order, and code that reads an op's inputs needs the same order in every
    process.  Unknown names come last, sorted.
    """
    if op_type in _OWN:
        order = list(_OWN[op_type].parameters)
    elif op_type in ROW_RULES and ("columns" in arguments or op_type not in _rules()):
        order = list(update_schema(op_type).parameters)
    elif op_type in _rules() or is_registered(op_type):
        update = arguments.get("update")
        own = update_block.hparams_of(update) if isinstance(update, Block) else {}
        attributes = ["group", *_rules().get(op_type, {}), *own, "update"]
        order = [
            "param",
            "grad",
            *sorted(set(arguments) - {"param", "grad", *attributes}),
            *attributes,
        ]
    else:
        order = list(aten_schema(op_type).parameters) if known(op_type) else []
    ordered = {name: arguments[name] for name in order if name in arguments}
    return {**ordered, **{name: arguments[name] for name in sorted(set(arguments) - set(ordered))}}
