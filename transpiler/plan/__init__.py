"""The plan of a job: which server holds what, how it is updated and when it travels.

Reading order::

    modes.py          one Mode for each update mode: all that other code asks about it
    setting.py        one row of a table of settings, and the kinds of values
    lane_settings.py  the settings of a job with servers, one row a key
    plan.py           Plan and its parts: Lane, Placement, Slice; manifest and fingerprint
    lanes.py          which values a lane may have, names in it, the lane in words
    lane_plan.py      lanes by patterns of names, before the parameters are known
    placement.py      cuts variables into slices, chooses their servers
    compression.py    which compression the gradients of a parameter or a table have
    table_planner.py  which update rules and modes tables may have
    planner.py        puts all of this together: plan_parameters
    comm_rings.py     process groups of a job without servers
    owners.py         which trainer of such a job updates what, where updates are sharded

Everything here is a pure function of its arguments, so that every process makes the same plan.
"""
