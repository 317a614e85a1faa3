"""``DistributedStrategy``: the settings of a job as a user writes them, and the resulting lanes.

Reading order::

    fields             its fields for type checkers; generated
    strategy           the object that keeps assigned values; its file, protobuf text
    compute_settings   rows about the computation of a step
    parallel_settings  rows about trainers without servers
    from_strategy      the lanes that a strategy asks for
    run_strategies     ExecutionStrategy and BuildStrategy, dictionaries of it as objects
    execution          the execution settings of a process, from a strategy
    parallel_degrees   the ranks in each direction of a job that divides a model
    local_sgd          settings that contradict local SGD
    collective_plan    the plan of trainers without servers
    needs              settings that have no effect alone
    exchange           how trainers exchange gradients
    refusals           the reasons for which a setting is refused in a job
    dgc                settings that exclude deep gradient compression, and why
    from_config        the lanes of a transpiler's configuration, with a strategy or without
    idle_keys          keys that have no effect beside another key of the same strategy, and why
    update_rules       the optimizer that steps in the place of the script's
"""
