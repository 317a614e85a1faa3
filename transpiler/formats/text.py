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

import textwrap
from collections.abc import Collection, Iterable, Sequence

from transpiler.formats.op_defaults import defaults
from transpiler.formats.phases import BACKWARD, UPDATE, kind_of, phases
from transpiler.ir.graph import Argument, Block, Literal, Op, Ref, Role, Symbol, Variable, refs
from transpiler.ir.ops import COLLECTIVE, check, is_optimizer, rule_of_op
from transpiler.ir.table_ops import SCHEMAS as TABLE_SCHEMAS
from transpiler.plan.lanes import describe_plan
from transpiler.plan.plan import Deployment, describe_collective, seldom

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


# their line says what arrives where
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
        kind: what a program without a deployment is.
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
