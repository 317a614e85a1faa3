"""``DistributedStrategy``: the settings of a job as a user writes them, and the lanes they mean.

Reading order::

    fields.py             every switch and key: one row each, from the tables of settings
    compute_settings.py   rows about what a step computes
    parallel_settings.py  rows about trainers without servers
    strategy_file.py      a strategy as protobuf text, and what is only kept of it
    strategy.py           the object that keeps assigned values
    from_strategy.py      the lanes that a strategy asks for
    run_strategies.py     ExecutionStrategy and BuildStrategy, dictionaries of it as objects
    execution.py          how a process computes, as a strategy says
    parallel_degrees.py   the ranks in each direction of a job that divides a model
    local_sgd.py          what contradicts local SGD
    collective_plan.py    the plan of trainers without servers
    needs.py              settings that say nothing alone
    exchange.py           how trainers exchange gradients
    refusals.py           why a setting is refused in a job
"""
