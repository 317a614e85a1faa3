"""From a strategy to the execution settings of a process."""

from __future__ import annotations

from transpiler.plan.plan import DumpSettings, Execution
from transpiler.strategy.strategy import DistributedStrategy

# Each asks for fusion, which torch.compile does with all ops that it can fuse.
FUSIONS = (
    "fuse_elewise_add_act_ops",
    "fuse_bn_act_ops",
    "enable_auto_fusion",
    "fuse_relu_depthwise_conv",
)


def dump_of(strategy: DistributedStrategy | None) -> DumpSettings:
    """The dump settings of a strategy; None asks for nothing."""
    if strategy is None:
        return DumpSettings()
    settings = strategy.trainer_desc_configs
    return DumpSettings(
        settings["dump_fields_path"],
        tuple(settings["dump_fields"]),
        tuple(settings["dump_param"]),
        tuple(settings["stat_var_names"]),
    )


def execution_of(strategy: DistributedStrategy | None) -> Execution:
    """The execution settings of a strategy; the defaults for None.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.cudnn_exhaustive_search = True
        >>> execution_of(strategy).benchmarks
        True
    """
    if strategy is None:
        return Execution()
    runs, builds = strategy.execution_strategy, strategy.build_strategy
    fuses = any(strategy.value(f"build_strategy.{key}") for key in FUSIONS)
    return Execution(
        threads=runs["num_threads"],
        benchmarks=strategy.cudnn_exhaustive_search,
        workspace_mb=strategy.conv_workspace_size_limit,
        iterations=runs["num_iteration_per_run"],
        runs_per_cleanup=runs["num_iteration_per_drop_scope"],
        compiles=fuses or not strategy.without_graph_optimization,
        ordered=builds["enable_sequential_execution"],
        reuses=builds["enable_inplace"],
        fuses_broadcasts=builds["fuse_broadcast_ops"],
        dump=dump_of(strategy),
    )
