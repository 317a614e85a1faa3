"""``DistributedStrategy``: the settings of a job as a user writes them, and the lanes they mean.

Reading order::

    fields.py             every switch and key: one row each, from the tables of settings
    compute_settings.py   rows about what a step computes
    parallel_settings.py  rows about trainers without servers
    strategy.py           the object that keeps assigned values
    from_strategy.py      the lanes that a strategy asks for
    refusals.py           why a setting is refused in a job
"""
