"""The bytes over which a program's fingerprint is computed.

They are the same in every process, on every host and with every version of protobuf.

[Note: what a fingerprint covers]  A fingerprint covers what a program means: blocks, variables, ops
with their arguments, the plan.  It does not cover where the program runs (arguments and fields
named endpoint, endpoints), which trainer runs it (trainer_id), the process's own part of the
deployment, source lines, or values of variables.  The order of an op's arguments has no meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from hashlib import blake2b

from transpiler.ir.graph import Argument, Block, Op, Ref, Symbol
from transpiler.plan.plan import Deployment

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
