"""``DistributedStrategy``: the settings of a job as a user writes them, and the lanes they mean.

Reading order::

    strategy           the object that keeps assigned values; every switch and key: one row each,
                       from the tables of settings; a strategy as protobuf text, and what is only
                       kept of it
    compute_settings   rows about what a step computes
    parallel_settings  rows about trainers without servers
    from_strategy      the lanes that a strategy asks for
    run_strategies     ExecutionStrategy and BuildStrategy, dictionaries of it as objects
    execution          how a process computes, as a strategy says
    parallel_degrees   the ranks in each direction of a job that divides a model
    local_sgd          what contradicts local SGD
    collective_plan    the plan of trainers without servers
    needs              settings that say nothing alone
    exchange           how trainers exchange gradients
    refusals           why a setting is refused in a job
    dgc                what does not go together with deep gradient compression, and why
    from_config        from a transpiler's configuration, and a strategy where there is one, to the
                       lanes of a job
    idle_keys          keys that another key of the same strategy makes meaningless, and why
    update_rules       the optimizer that steps in the place of the script's
"""
