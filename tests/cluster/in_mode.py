"""Runs a script of ``trainer/examples`` in another mode than the one that it asks for.

::

    pserver launch --servers 2 --trainers 2 tests/cluster/in_mode.py geo trainer/examples/digits.py

What the script leaves to the default (the strategy of ``fleet.init``, the configuration of a
transpiler) is that of the mode here; what it sets itself stays.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from typing import Any

import transpiler
from trainer import fleet
from transpiler.plan.modes import MODES as EVERY

OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
# a_sync_configs of an eager script, and the fields of a transpiler's configuration
MODES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "sync": (None, {}),
    "async": ({}, {"sync_mode": False}),
    "half_async": ({"half_async": True}, {"sync_mode": False, "half_async": True}),
    "staleness": ({"staleness": 2}, {}),
    "dc_asgd": ({"dc_asgd": 0.04}, {"sync_mode": False, "enable_dc_asgd": True}),
    "geo": ({"k_steps": 4}, {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 4}),
    "diloco": ({"k_steps": 4, "outer_optimizer": OUTER}, {}),
    "by name": ({"modes": {"0.*": "async", "*": "sync"}}, {}),
    "split at run time": (
        {"runtime_split_send_recv": True},
        {"sync_mode": False, "runtime_split_send_recv": True},
    ),
}
# and each other mode; not by tests.support, as this file runs as a script
MODES |= {name: (dict(mode.example), {}) for name, mode in EVERY.items() if name not in MODES}


def main(mode: str, script: str) -> None:
    configs, fields = MODES[mode]
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
    vars(fleet)["init"] = partial(fleet.init, strategy=strategy)
    config = transpiler.DistributeTranspilerConfig(**fields)
    vars(transpiler)["DistributeTranspiler"] = partial(transpiler.DistributeTranspiler, config)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _, mode, script, *sys.argv[1:] = sys.argv
    main(mode, script)
