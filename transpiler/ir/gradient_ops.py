"""Ops between a gradient and its update that read the parameter, too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transpiler.ir.schema import (
    BOOLEAN,
    COUNT,
    INDEX,
    NUMBER,
    VARIABLE,
    VARIABLES,
    ArgumentKind,
    Parameter,
    Schema,
    many,
)


def _schema(**kinds: ArgumentKind) -> Schema:
    return Schema(MappingProxyType({name: Parameter(kind) for name, kind in kinds.items()}), 1)


# fmt: off
SCHEMAS: Mapping[str, Schema] = MappingProxyType({
    # delay compensation: grad + factor * (param - the sending trainer's backup) * grad * grad;
    # there is one backup for each trainer
    "dc_compensate": _schema(grad=VARIABLE, param=VARIABLE, backups=VARIABLES, factor=NUMBER),
    # the sent part of a large gradient: see [Note: deep gradient compression] in optim/dgc.py; the
    # process keeps velocity and residual
    "dgc":           _schema(grad=VARIABLE, param=VARIABLE, group=INDEX, momentum=NUMBER,
                             weight_decay=NUMBER, nesterov=BOOLEAN, maximize=BOOLEAN,
                             rampup_begin_step=INDEX, rampup_step=COUNT, sparsity=many(NUMBER)),
})
# fmt: on
