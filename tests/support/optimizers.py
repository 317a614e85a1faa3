"""Every element-wise optimizer, in the variants that a script may ask for: class and arguments."""

from __future__ import annotations

from typing import Any

import torch

from transpiler import DecayedAdagrad, Ftrl

O = torch.optim  # noqa: E741  # the table below reads better

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (O.SGD, dict(lr=0.1)),
    "sgd_momentum": (O.SGD, dict(lr=0.1, momentum=0.9)),
    "sgd_dampening": (O.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01)),
    "sgd_nesterov": (O.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "sgd_maximize": (O.SGD, dict(lr=0.001, maximize=True)),
    "adam": (O.Adam, dict(lr=0.01)),
    "adam_amsgrad": (O.Adam, dict(lr=0.01, amsgrad=True, weight_decay=0.01)),
    "adam_foreach": (O.Adam, dict(lr=0.01, foreach=True)),
    "adam_maximize": (O.Adam, dict(lr=0.001, maximize=True)),
    "adamw": (O.AdamW, dict(lr=0.01)),
    "adamw_amsgrad": (O.AdamW, dict(lr=0.01, amsgrad=True)),
    "adamax": (O.Adamax, dict(lr=0.01, weight_decay=0.01)),
    "nadam": (O.NAdam, dict(lr=0.01)),
    "nadam_decoupled": (O.NAdam, dict(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)),
    "radam": (O.RAdam, dict(lr=0.01)),
    "radam_decoupled": (O.RAdam, dict(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)),
    "adagrad": (O.Adagrad, dict(lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1)),
    "adadelta": (O.Adadelta, dict(lr=1.0)),
    "rmsprop": (O.RMSprop, dict(lr=0.01)),
    "rmsprop_centered": (O.RMSprop, dict(lr=0.01, centered=True, momentum=0.9, weight_decay=0.01)),
    "rprop": (O.Rprop, dict(lr=0.01)),
    "asgd": (O.ASGD, dict(lr=0.05, t0=5)),
    "ftrl": (Ftrl, dict(lr=0.05, l1=0.001, l2=0.01)),
    "decayed_adagrad": (DecayedAdagrad, dict(lr=0.01)),
}
