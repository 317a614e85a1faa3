"""A program as readable text: a header, then each block with its variables and a line for each op.

::

    trainer 0 of 2, sync, 1 server
    block 0: 12 ops
      inputs      x float32[batch, 8], y int64[batch]
      parameters  fc.weight float32[4, 8], fc.bias float32[4]

      t      = aten.t(fc.weight)              float32[8, 4]
      addmm  = aten.addmm(fc.bias, x, t)      float32[batch, 4]
      ...
               send(fc.bias@GRAD -> 127.0.0.1:6174)

Arguments that have their default value are left out, and so are the states of an optimizer op.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from xml.sax.saxutils import escape

from transpiler.ir.graph import Argument, Block, Literal, Op, Ref, Role, Symbol, Variable, refs
from transpiler.ir.ops import (
    COLLECTIVE,
    COMMUNICATION,
    aten_overload,
    check,
    is_optimizer,
    rule_of_op,
)
from transpiler.ir.rules import ROW_RULES, RULES, state_of
from transpiler.ir.table_ops import SCHEMAS as TABLE_SCHEMAS
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.lanes import applied, describe, describe_plan
from transpiler.plan.placement import element_bytes, owners
from transpiler.plan.plan import Deployment, Placement, Plan, Slice, describe_collective, seldom

# ---- op defaults ----
#
# The arguments of an op that its text leaves out: those with their usual values.


# of ops of ours: the defaults of torch's SGD and of a strategy; an argument that is None here is
# always shown
_OWN: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "dgc": {
            **{"group": 0, "momentum": None, "weight_decay": 0.0, "nesterov": False},
            **{"maximize": False, "rampup_begin_step": 0, "rampup_step": 1, "sparsity": None},
        }
    }
)


@functools.lru_cache(maxsize=4096)
def defaults(op_type: str) -> Mapping[str, object]:
    """The usual values of an op's arguments, by name; arguments without one are left out."""
    if op_type.startswith("aten."):
        arguments = aten_overload(op_type)._schema.arguments
        return {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
    if is_optimizer(op_type) and op_type not in RULES:  # of rows, or registered
        return {"group": 0}
    if is_optimizer(op_type):
        parameters = inspect.signature(RULES[op_type].cls).parameters.items()
        return {
            "group": 0,
            **{name: parameter.default for name, parameter in parameters if name != "lr"},
        }
    return _OWN.get(op_type, {})


# ---- phases ----
#
# The phase of a step that each op of a block belongs to, for text and pictures.


FORWARD = "forward"
BACKWARD = "backward"
EXCHANGE = "exchange"  # communication with servers or trainers
MERGE = "merge"  # sum, scale, clip of gradients
UPDATE = "update"

_EXCHANGE = COMMUNICATION | {"split", "concat", "split_ids", "merge_ids"}
_MERGE = frozenset(
    {
        "sum",
        "scale",
        "clip",
        "clip_by_norm",
        "global_norm_scale",
        "scale_by",
        "norm_scale",
        "dgc",
        "dc_compensate",
        "check_finite_and_unscale",
        "update_loss_scaling",
    }
)


def _own(op: Op) -> str | None:
    if op.type in _EXCHANGE:
        return EXCHANGE
    if op.type in _MERGE:
        return MERGE
    return UPDATE if is_optimizer(op.type) else None


def _last_output(block: Block) -> int:
    """The number of the op that computes the loss: the first that defines an output."""
    outputs = {variable.name for variable in block.variables_of(Role.OUTPUT)}
    loss = outputs & {"loss"} or outputs
    return next(
        (number for number, op in enumerate(block.ops) if loss & set(op.outputs)), len(block.ops)
    )


_COMPUTE = frozenset(
    {"assign", "assign_value", "lookup_table", "py_func", "recurrent", "sparse_table"}
)


def computes(op: Op) -> bool:
    """Whether an op is one of compute: it neither updates, clips nor communicates."""
    return op.type.startswith(("aten.", "sym.")) or op.type in _COMPUTE


def kind_of(main: Block) -> str:
    """The kind of a program without a deployment: a forward program only computes; it neither
    differentiates nor updates anything.
    """
    forward = bool(main.ops) and all(map(computes, main.ops))
    trains = bool(main.variables_of(Role.GRADIENT))
    return "forward program" if forward and not trains else "single-node program"


def phases(block: Block) -> list[str]:
    """The phase of every op of a block.

    Compute is forward up to the loss and backward after it, if there are gradients.
    """
    trains = bool(block.variables_of(Role.GRADIENT))
    end = _last_output(block) if trains else len(block.ops)
    return [
        _own(op) or (FORWARD if number <= end else BACKWARD) for number, op in enumerate(block.ops)
    ]


# ---- text ----


WIDTH = 118  # columns of a line of variables
_RESULT_COLUMNS = 22  # a longer left side moves only its own line to the right
_CALL_COLUMNS = 60
_FEW = 12  # a block of at most so many ops is aligned to its longest name
_PRESERVE = Symbol("memory_format", "preserve_format")  # the default, not shown
_TITLES = {
    Role.INPUT: "inputs",
    Role.PARAMETER: "parameters",
    Role.TABLE: "tables",
    Role.BUFFER: "buffers",
}

# ---- one op ----


def value(argument: Argument) -> str:
    """An argument as short text."""
    if isinstance(argument, Ref):
        return argument.name
    if isinstance(argument, Symbol):
        return argument.value
    if isinstance(argument, Literal):
        return f"<{argument.dtype}{list(argument.shape)}>"
    if isinstance(argument, Block):
        return f"<{_count(len(argument.ops), 'op')}>"
    if isinstance(argument, tuple):
        return "[" + ", ".join(map(value, argument)) + "]"
    return (
        f"{argument:g}"
        if isinstance(argument, float) and float(f"{argument:g}") == argument
        else repr(argument)
    )


def _items(argument: Argument) -> tuple[Argument, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _addresses(endpoints: Argument) -> list[str]:
    return [value(item).strip("'") for item in _items(endpoints)]


def _routes(names: Sequence[str], arrow: str, endpoints: Argument) -> str:
    addresses = _addresses(endpoints)
    if len(names) == 1 and len(addresses) > 1:  # runtime_split_send_recv
        return f"{names[0]} {arrow} {' + '.join(addresses)}"
    return ", ".join(
        f"{name} {arrow} {address}" for name, address in zip(names, addresses, strict=False)
    )


def _ranges(indices: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1-3, 7``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _exchange(op: Op) -> str | None:
    """A communication op with its routes; None for any other op."""
    arguments = op.arguments
    if op.type == "split":
        parts = zip(op.outputs, _items(arguments["sections"]), strict=False)
        return (
            f"split({op.inputs[0]} -> "
            f"{', '.join(f'{name} ({value(size)})' for name, size in parts)})"
        )
    if op.type in TABLE_SCHEMAS:
        return _of_table(op)
    if op.type == "send":
        if "delta" in arguments:
            routes = _routes(
                [str(name) for name in _items(arguments["delta"])], "->", arguments["endpoints"]
            )
            return (
                f"send({routes}, {arguments['mode']}, every "
                f"{_count(int(str(arguments['k_steps'])), 'step')})"
            )
        return f"send({_routes(op.inputs, '->', arguments['endpoints'])})"
    if op.type == "concat":
        axis = "" if arguments["axis"] == 0 else f", axis={value(arguments['axis'])}"
        return f"concat({', '.join(op.inputs)}{axis})"
    if op.type == "recv":
        return f"recv({_routes(op.outputs, '<-', arguments['endpoints'])})"
    if op.type in ("send_barrier", "fetch_barrier"):
        own = ["half_async"] if arguments.get("half_async") else []
        return f"{op.type}({', '.join([*_addresses(arguments['endpoints']), *own])})"
    if op.type == "listen_and_serv":
        blocks = _ranges(
            [index for index in _items(arguments["optimize_blocks"]) if isinstance(index, int)]
        )
        who = f"{arguments['endpoint']}, {arguments['mode']}, trainers={arguments['trainers']}"
        lookups = _ranges(
            [
                index
                for index in _items(arguments.get("prefetch_blocks", ()))
                if isinstance(index, int)
            ]
        )
        answers = f", prefetch_blocks={lookups}" if lookups else ""
        return f"listen_and_serv({who}, optimize_blocks={blocks or 'none'}{answers})"
    return _among_trainers(op) if op.type in COLLECTIVE else None


def _of_table(op: Op) -> str:
    """An op of a table: its ids, and the servers that it asks for rows."""
    arguments, padding = op.arguments, op.arguments.get("padding_idx")
    said = [] if padding is None else [f"padding_idx={value(padding)}"]
    if op.type == "sparse_table":
        kept = {key: each for key, each in arguments.items() if key not in ("dim", "dtype")}
        return f"sparse_table({', '.join(f'{key}={value(each)}' for key, each in kept.items())})"
    if op.type == "prefetch":
        return f"prefetch({_routes(op.outputs, '<-', arguments['endpoints'])})"
    if op.type == "distributed_lookup_table":
        said.insert(0, f"<- {' + '.join(_addresses(arguments['endpoints']))}")
        return f"distributed_lookup_table({', '.join(op.inputs)} {', '.join(said)})"
    names = [
        name
        for name in (*op.inputs,)
        if op.type != "merge_ids" or name in set(refs(arguments["rows"]))
    ]
    return f"{op.type}({', '.join([*names, *said])})"


def _among_trainers(op: Op) -> str:
    """An op of a ring: its variables, and the ring."""
    arguments = op.arguments
    if op.type == "gen_nccl_id":
        return f"gen_nccl_id({', '.join(_addresses(arguments['endpoints']))})"
    said = [*op.inputs, f"ring {arguments['ring_id']}"]
    if op.type == "c_comm_init":
        said.append(_count(int(str(arguments["nranks"])), "trainer"))
    if op.type in ("c_broadcast", "c_reduce_sum"):
        said.append(f"{'from' if op.type == 'c_broadcast' else 'to'} trainer {arguments['root']}")
    if op.type == "c_allreduce_sum":
        said.append(f"bucket {arguments['bucket']}")
    if "k_steps" in arguments:
        said.append(seldom(arguments["k_steps"], arguments.get("begin_step", 0)))
    return f"{op.type}({', '.join(said)})"


def _shown(op: Op) -> Iterable[str]:
    usual = defaults(op.type)
    positional = True
    for name, argument in op.arguments.items():
        if name in usual:
            positional = False
            default = usual[name]
            if argument == _PRESERVE:
                continue
            same = argument == (tuple(default) if isinstance(default, list) else default)
            if same and isinstance(argument, bool) == isinstance(default, bool):
                continue
        yield value(argument) if positional else f"{name}={value(argument)}"


def _update(op: Op) -> str:
    """An optimizer op: the gradient, the rate, and what differs from torch's defaults."""
    rule, usual = rule_of_op(op), defaults(op.type)
    group = {} if op.arguments.get("group") == 0 else {"group": op.arguments.get("group")}
    hparams = {**rule.hparams, **rule.flags, **group}
    said = [
        f"{name}={value(number)}"
        for name, number in hparams.items()
        if name not in usual or usual[name] != number
    ]
    return f"{op.type}({', '.join([value(op.arguments['grad']), *said])})"


def call(op: Op) -> str:
    """The right side of an op's line: ``aten.addmm(fc.bias, x, t)``.

    An op that the catalogue refuses prints too.
    """
    try:
        check(op)
    except ValueError:
        said = [f"{name}={value(argument)}" for name, argument in op.arguments.items()]
        return f"{op.type}({', '.join(said)})"
    return (
        _update(op)
        if is_optimizer(op.type)
        else _exchange(op) or f"{op.type}({', '.join(_shown(op))})"
    )


# their line names the results
_ARRIVING = frozenset({"recv", "split", "prefetch", "c_allreduce_avg", "c_sync_comm_stream"})


def results(op: Op) -> str:
    """The left side of an op's line: ``addmm =``, or nothing."""
    if not op.outputs or op.type in _ARRIVING:
        return ""
    return ", ".join(name or "_" for name in op.outputs) + " ="


def extent(variable: Variable) -> str:
    """``float32[batch, 8]``; a size is just ``size``."""
    return (
        "size"
        if variable.dtype == "size"
        else f"{variable.dtype}[{', '.join(map(str, variable.shape))}]"
    )


def types(op: Op, block: Block, main: Block) -> str:
    """The types of an op's results; "" for ops whose results have types shown elsewhere."""
    if (
        op.type in ("recv", "split", "split_ids", "prefetch")
        or op.type in COLLECTIVE
        or is_optimizer(op.type)
    ):
        return ""
    found = [block.variables.get(name) or main.variables.get(name) for name in op.outputs if name]
    return ", ".join(extent(variable) for variable in found if variable)


# ---- blocks ----


def _declared(block: Block, made: Collection[str]) -> list[str]:
    """The variables that a block has before its first op runs, by role.

    Args:
        made: the results of all ops.
    """
    lines: list[str] = []
    for role, title in _TITLES.items():
        lines += _wrapped(
            title, [f"{variable.name} {extent(variable)}" for variable in block.variables_of(role)]
        )
    received = block.variables_of(Role.GRADIENT, Role.DELTA)
    lines += _wrapped(
        "receives", [variable.name for variable in received if variable.name not in made]
    )
    states = len(block.variables_of(Role.STATE))
    return lines + (
        [f"  states      {_count(states, 'tensor')} of the optimizer"] if states else []
    )


def _wrapped(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    # Only the commas between variables may break a line.
    glued = ", ".join(item.replace(" ", "\0") for item in items)
    indent = f"  {title:<12}"
    lines = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * 14,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _columns(texts: Sequence[str], most: int) -> int:
    return max((len(text) for text in texts if len(text) <= most), default=0)


def _op_lines(block: Block, main: Block) -> list[str]:
    rows = [(results(op), call(op), types(op, block, main)) for op in block.ops]
    left = _columns([row[0] for row in rows], _RESULT_COLUMNS if len(rows) > _FEW else WIDTH)
    middle = _columns([row[1] for row in rows if row[2]], _CALL_COLUMNS)
    lines = []
    for result, right, kind in rows:
        # The equals signs stand in one column.
        start = (
            f"{result[:-1]:<{max(left - 1, 0)}}= " if result else " " * (left + 1 if left else 0)
        )
        lines.append(f"  {start + right:<{left + middle + 1 if kind else 0}}  {kind}".rstrip())
    return _with_phases(lines, phases(block))


def _with_phases(lines: list[str], found: list[str]) -> list[str]:
    """Adds a comment where backward begins, and one where the updates begin after it."""
    out: list[str] = []
    ahead = [BACKWARD, UPDATE] if BACKWARD in found else []
    for line, phase in zip(lines, found, strict=True):
        if phase in ahead:
            ahead = ahead[ahead.index(phase) + 1 :]
            out.append(f"  # {phase}")
        out.append(line)
    return out


def _block(block: Block, main: Block, made: Collection[str]) -> str:
    declared = _declared(block, made)
    ops = _op_lines(block, main)
    return "\n".join(
        [
            f"block {block.index}: {_count(len(block.ops), 'op')}",
            *declared,
            *([""] if declared and ops else []),
            *ops,
        ]
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def header(deployment: Deployment | None, kind: str = "single-node program") -> str:
    """The first line of a program: the process, the mode and the counts, and each lane's merge rule
    and bounds.

    Args:
        kind: that of a program without a deployment.
    """
    if deployment is None:
        return kind
    plan = deployment.plan
    if plan.collective is not None:
        who = f"trainer {deployment.trainer_id} of {plan.trainers}"
        return f"{who}, {plan.mode}, {describe_collective(plan.collective)}"
    said = describe_plan(plan)
    merged = f": {said[0]}"
    if len(said) > 1:
        merged = "".join(
            "\n" + textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 10)
            for line in said
        )
    if deployment.server_index is not None:
        endpoint = deployment.endpoints[deployment.server_index]
        where = f"server {deployment.server_index} of {plan.servers} ({endpoint})"
        return f"{where}, {plan.mode}, {_count(plan.trainers, 'trainer')}{merged}"
    which = f"optimizer {deployment.optimizer}, " if any(e.optimizer for e in plan.lanes) else ""
    return (
        f"trainer {deployment.trainer_id} of {plan.trainers}, {which}{plan.mode}, "
        f"{_count(plan.servers, 'server')}{merged}"
    )


def text(blocks: Sequence[Block], deployment: Deployment | None) -> str:
    """A program as readable text."""
    main = blocks[0]
    made = {name for block in blocks for op in block.ops for name in op.outputs}
    first = header(deployment, kind_of(main))
    return "\n\n".join([first, *(_block(block, main, made) for block in blocks)])


# ---- difference ----
#
# The differences of two programs, in words.


def difference(
    mine: Sequence[Block],
    deployment: Deployment | None,
    others: Sequence[Block],
    other_deployment: Deployment | None,
) -> list[str]:
    """The differences of the second program, a sentence each; none if they mean the same."""
    found = list(_of_plans(deployment, other_deployment))
    for one, other in zip(mine, others, strict=False):
        found += _of_variables(one, other)
        found += _of_ops(one, other)
    for block in mine[len(others) :]:
        found.append(f"block {block.index} is gone, with {len(block.ops)} ops")
    for block in others[len(mine) :]:
        found.append(f"block {block.index} is new, with {len(block.ops)} ops")
    return found


def _facts(deployment: Deployment | None) -> dict[str, str]:
    if deployment is None:
        return {}
    return {key: str(value) for key, value in deployment.plan.manifest().items()}


def _of_plans(mine: Deployment | None, other: Deployment | None) -> Iterator[str]:
    if (mine is None) != (other is None):
        was, now = ("transpiled", "single-node") if other is None else ("single-node", "transpiled")
        yield f"it is a {now} program instead of a {was} one"
        return
    before, after = _facts(mine), _facts(other)
    one, two = set(map(_lane, before)), set(map(_lane, after))
    for lane in sorted(one ^ two):
        facts, word = (before, "gone") if lane in one else (after, "new")
        mode = facts[f"{lane}: mode"].strip("'")
        yield f"plan, {lane} is {word}: {mode}"
    for key in sorted({*before, *after}):
        if _lane(key) in one ^ two:
            continue
        if before.get(key) != after.get(key):
            now, was = after.get(key, "nothing"), before.get(key, "nothing")
            yield f"plan, {key}: {now} instead of {was}"


def _lane(key: str) -> str:
    """The lane that a fact of a plan is about; "" for other facts."""
    lane, _, setting = key.partition(": ")
    return lane if lane.startswith("lane ") and setting else ""


def _variable_words(variable: Variable) -> str:
    return f"{variable.role.name.lower()} {extent(variable)}"


def _of_variables(mine: Block, other: Block) -> Iterator[str]:
    made = {name for block in (mine, other) for op in block.ops for name in op.outputs}
    for name in sorted({*mine.variables, *other.variables}):
        one, two = mine.variables.get(name), other.variables.get(name)
        place = f"block {mine.index}, {name}"
        if one is not None and two is not None:
            if _variable_words(one) != _variable_words(two):
                yield f"{place} is {_variable_words(two)} instead of {_variable_words(one)}"
        elif name not in made:  # the result of an op is described with the op
            yield f"{place} is {'gone' if two is None else 'new'}: {_variable_words(two or one)}"  # type: ignore[arg-type]


def _line(op: Op) -> str:
    return f"{results(op)} {call(op)}".strip()


def _of_ops(mine: Block, other: Block) -> Iterator[str]:
    before, after = [_line(op) for op in mine.ops], [_line(op) for op in other.ops]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, begin, end, first, last in matcher.get_opcodes():
        if kind == "equal":
            continue
        both = min(end - begin, last - first)
        for index in range(both):
            place = f"block {mine.index}, op {begin + index}"
            yield f"{place}: {after[first + index]} instead of {before[begin + index]}"
        for index in range(begin + both, end):
            yield f"block {mine.index}, op {index} is gone: {before[index]}"
        for index in range(first + both, last):
            yield f"block {mine.index}, op {index} is new: {after[index]}"


# ---- panels ----
#
# The panels of a picture: the places of a block and its ops.


# Pixels.
MARGIN, TITLE, ROW, BOX = 24, 30, 27, 21
LANE = 16  # a line of words on a lane, below the title
PANEL, PADDING, GUTTER, GAP = 560, 12, 44, 36
CHARACTER = 6.65  # width of one in a box
COLUMN = 900  # a column of panels gets no higher than this, unless block 0 is
# characters that XML cannot hold
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def quoted(text: str) -> str:
    """Text escaped for an XML element or attribute."""
    return escape(_UNPRINTABLE.sub("\ufffd", text), {'"': "&quot;"})


def shortened(text: str, pixels: float) -> str:
    """The text, cut to fit a box of this width."""
    limit = int(pixels / CHARACTER)
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


@dataclass(frozen=True, slots=True)
class BlockPanel:
    """A block's panel in the picture.

    Attributes:
        block: the one that it shows.
        x, y: pixels, of its upper left corner.
    """

    block: Block
    x: float
    y: float

    @property
    def height(self) -> float:
        """Pixels from the upper to the lower edge."""
        return TITLE + max(len(self.block.ops), 1) * ROW + PADDING

    @property
    def left(self) -> float:
        """The x coordinate of the left edge of the boxes."""
        return (
            self.x + PADDING + (GUTTER if self.block.index == 0 and len(self.block.ops) > 1 else 0)
        )

    @property
    def right(self) -> float:
        """The x coordinate of the right edge of the boxes."""
        return self.x + PANEL - PADDING

    def middle(self, number: int) -> float:
        """The y coordinate of the middle of an op's box."""
        return self.y + TITLE + number * ROW + BOX / 2


def panels_of(blocks: Sequence[Block], top: float) -> list[BlockPanel]:
    """Block 0 on the left, the others in columns beside it."""
    first = BlockPanel(blocks[0], MARGIN, top)
    found, limit = [first], top + max(first.height, COLUMN)
    x, y = MARGIN + PANEL + GAP * 2, top
    for block in blocks[1:]:
        panel = BlockPanel(block, x, y)
        if y > top and y + panel.height > limit:
            x, y = x + PANEL + GAP, top
            panel = BlockPanel(block, x, y)
        found.append(panel)
        y += panel.height + GAP / 2
    return found


# ---- table text ----
#
# The tables of a plan as readable text: their rows, the bytes of a row on a server and on its way.
#
# A row's record has its values, its states in their order, and words of 8 bytes that its life cycle
# needs.  The index of ids comes on top: 24 to 40 bytes a row.


ID_BYTES = 8  # of an id in a message
WORD_BYTES = 8
HEAD = ("table", "ids", "row", "update", "lane", "a row holds", "looked up", "sent", "on a server")


def row_bytes(plan: Plan, table: Table) -> int:
    """The bytes of one row's record on a server."""
    element, moves = element_bytes(table.computes_in), False
    columns = -(-table.dim * element_bytes(table.dtype) // element)
    for segment in table.segments:
        rule = plan.groups[segment.group]
        spec = ROW_RULES[rule.type]
        columns += sum(segment.end - segment.begin if full else 1 for full in spec.states.values())
        moves |= spec.moves_untouched(spec.complete(rule))
    words = moves + _life_cycle_words(table)
    if not words:
        return columns * element
    return -(-columns * element // WORD_BYTES) * WORD_BYTES + words * WORD_BYTES


def _life_cycle_words(table: Table) -> int:
    """The number of words for a row's life cycle: times, order and number of pushes, statistics."""
    bounded = table.capacity is not None or table.memory_bytes is not None
    counted = table.capacity is not None and table.eviction == "lfu"
    statistics = 3 if isinstance(table.entry, ShowClickEntry) else 0
    return (table.ttl is not None) + bounded + counted + statistics


def server_bytes(plan: Plan, table: Table) -> int | None:
    """The most bytes of a table's rows in the memory of one server, where the ids spread evenly;
    None where the table has no bound.
    """
    if table.memory_bytes is not None:
        return -(-table.memory_bytes // plan.servers)
    bounds = [rows for rows in (table.rows, table.capacity) if rows is not None]
    return -(-min(bounds) // plan.servers) * row_bytes(plan, table) if bounds else None


def table_rows(plan: Plan) -> Sequence[tuple[str, ...]]:
    """A line of cells for each table, below a head.

    "looked up" and "sent" are bytes of one row on the way to and from one trainer, the id included;
    "on a server" is the most memory that its rows take there.
    """
    from_plan = [(table, row_bytes(plan, table)) for table in plan.tables]
    return [HEAD, *(_cells(plan, table, record) for table, record in from_plan)]


def _cells(plan: Plan, table: Table, record: int) -> tuple[str, ...]:
    adds = plan.lanes[table.lane].kind.servers_add
    sent = table.computes_in if adds else table.gradients_in
    ways = [size(ID_BYTES + table.dim * element_bytes(each)) for each in (table.dtype, sent)]
    held = server_bytes(plan, table)
    bound = "grows by row" if held is None else f"up to {size(held)}"
    if table.memory_bytes is not None:
        bound += ", the rest on disk"
    return (
        table.name,
        "any" if table.rows is None else f"0 to {table.rows - 1}",
        f"{table.dtype}[{table.dim}]",
        ", ".join(dict.fromkeys(plan.groups[segment.group].type for segment in table.segments)),
        str(table.lane),
        size(record),
        *ways,
        bound,
    )


def size(count: int) -> str:
    """Bytes as readable text: ``"1.5 MB"``."""
    value, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


# ---- plan bytes ----
#
# The bytes of a plan: those that each server holds, and those of a message of each lane.


SCALAR_BYTES = 4  # of a scalar state


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The contents and the traffic of one server of a plan.

    Attributes:
        slices: the number that it holds.
        parameters, states: bytes of them, and of their optimizer states.
        sent, received: bytes that one trainer exchanges with it in one message, by lane.
        memory: bytes of slices, states, every trainer's gradients, and the most that rows of tables
            take.
        unbounded: whether some tables have no bound, and are not in ``memory``.
    """

    slices: int
    parameters: int
    states: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    memory: int
    unbounded: bool


def server_load(plan: Plan, server: int) -> ServerLoad:
    """The load of one server of a plan."""
    held = [(p, slice_) for p in plan.placements for slice_ in p.slices if slice_.server == server]
    updated = [(p, slice_) for p, slice_ in held if p.group is not None]
    parameters = sum(slice_bytes(p, slice_) for p, slice_ in held)
    states = sum(_state_bytes(plan, p, slice_) for p, slice_ in updated)
    sent, received = [0] * len(plan.lanes), [0] * len(plan.lanes)
    for placement, slice_ in updated:
        sent[placement.lane] += _sent_bytes(placement, slice_)
        received[placement.lane] += slice_bytes(placement, slice_)
    tables = [server_bytes(plan, table) for table in plan.tables]
    buffers = plan.trainers * sum(received)
    return ServerLoad(
        len(held),
        parameters,
        states,
        tuple(sent),
        tuple(received),
        parameters + states + buffers + sum(each or 0 for each in tables),
        None in tables,
    )


def slice_bytes(placement: Placement, slice_: Slice) -> int:
    """The bytes of a slice's values."""
    return (slice_.end - slice_.begin) * element_bytes(placement.dtype)


def _sent_bytes(placement: Placement, slice_: Slice) -> int:
    """The bytes of a slice's gradient, compressed as it is sent; the most, where they differ from
    step to step.
    """
    elements = slice_.end - slice_.begin
    per_element = {"bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 1024}
    return (
        round(elements * per_element[placement.compression])
        if placement.compression in per_element
        else slice_bytes(placement, slice_)
    )


def _state_bytes(plan: Plan, placement: Placement, slice_: Slice) -> int:
    """The bytes of the states that the slice's rule keeps on the server."""
    found = applied(plan, placement)
    if found is None:
        return 0
    shaped = state_of(found[1]).values()
    return sum(slice_bytes(placement, slice_) if whole else SCALAR_BYTES for whole in shaped)


# ---- plan text ----
#
# A plan as readable text: the split, the bytes of a step and the memory of each server.


def plan_text(plan: Plan) -> str:
    """The tables of ``pserver plan``: one line per variable, per sparse table and per server.

    "sent to it" and "received" are the bytes that one trainer exchanges with a server in one
    message of each lane; a k-step lane sends one every k steps.  "memory" is that of slices,
    optimizer states and every trainer's gradients, and with sparse tables the most that their rows
    take; "+ rows" stands for tables that have no bound.
    """
    if plan.collective is not None:
        return _without_servers(plan)
    head = [f"{plan.mode}: {plan.trainers} trainers, {plan.servers} servers"]
    head += [
        f"  lane {index}: {lane.mode}, {describe(lane, plan.trainers)}"
        for index, lane in enumerate(plan.lanes)
    ]
    variables: list[tuple[str, ...]] = [("variable", "shape", "update", "lane", "held by")]
    variables += [_variable(plan, placement) for placement in plan.placements]
    servers: list[tuple[str, ...]] = [
        ("server", "slices", "parameters", "states", "sent to it", "received", "memory")
    ]
    servers += [_server(plan, index) for index in range(plan.servers)]
    tables = ["", *_table(table_rows(plan))] if plan.tables else []
    return "\n".join([*head, "", *_table(variables), *tables, "", *_table(servers)])


def _without_servers(plan: Plan) -> str:
    """The tables of a job without servers, in which every trainer holds everything; where updates
    are sharded, it holds the optimizer states only of the parameters that it updates.

    The bytes that are summed over the trainers at every step are those of the trained parameters.
    """
    assert plan.collective is not None, "a plan without servers"
    owner = owners(plan) if plan.collective.sharded else {}
    variables: list[tuple[str, ...]] = [("variable", "shape", "update")]
    variables[0] += ("updated by",) if owner else ()
    parameters = summed = 0
    states = [0] * (plan.trainers if owner else 1)
    for placement in plan.placements:
        name = placement.name
        whole = Slice(name, 0, prod(placement.shape), placement.shape, 0)
        by = (f"trainer {owner[name]}" if name in owner else "",) if owner else ()
        variables.append(_variable(plan, placement)[:3] + by)
        parameters += slice_bytes(placement, whole)
        if placement.group is not None:
            summed += slice_bytes(placement, whole)
            shaped = state_of(plan.groups[placement.group]).values()
            states[owner.get(name, 0)] += sum(
                slice_bytes(placement, whole) if each else SCALAR_BYTES for each in shaped
            )
    rows = [("" if owner else "each of", "parameters", "states", "summed", "memory")]
    for rank, held in enumerate(states):
        memory = size(parameters + held + summed)  # gradients, too
        who = f"trainer {rank}" if owner else f"{plan.trainers} trainers"
        rows.append((who, size(parameters), size(held), size(summed), memory))
    return "\n".join(
        [
            f"{plan.mode}: {plan.trainers} trainers, no servers",
            "",
            *_table(variables),
            "",
            *_table(rows),
        ]
    )


def _variable(plan: Plan, placement: Placement) -> tuple[str, ...]:
    where = ", ".join(
        f"{slice_.server}: {slice_.end - slice_.begin}" if placement.split else str(slice_.server)
        for slice_ in placement.slices
    )
    rule = "held" if placement.group is None else plan.groups[placement.group].type
    shape = f"{placement.dtype}{list(placement.shape)}"
    rule += f", {placement.compression}" if placement.compression else ""
    return (
        placement.name,
        shape,
        rule,
        "" if placement.group is None else str(placement.lane),
        where,
    )


def _server(plan: Plan, server: int) -> tuple[str, ...]:
    load = server_load(plan, server)
    return (
        str(server),
        str(load.slices),
        size(load.parameters),
        size(load.states),
        size(sum(load.sent)),
        size(sum(load.received)),
        size(load.memory) + (" + rows" if load.unbounded else ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
