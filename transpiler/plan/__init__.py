"""The plan of a job: which server holds what, how it is updated and when it travels.

Reading order::

    modes          one Mode for each update mode: all that other code asks about it
    setting        one row of a table of settings, and the kinds of values
    lane_settings  the settings of a job with servers, one row a key
    plan           Plan and its parts: Lane, Placement, Slice; manifest and fingerprint
    lanes          which values a lane may have, names in it, the lane in words
    lane_plan      lanes by patterns of names, before the parameters are known
    placement      cuts variables into slices, chooses their servers
    compression    which compression the gradients of a parameter or a table have
    table_planner  which update rules and modes tables may have
    planner        puts all of this together: plan_parameters
    comm_rings     process groups of a job without servers
    owners         which trainer of such a job updates what, where updates are sharded
    dump_settings  what a trainer writes down of each step, for people to read
    execution      how a process runs its part of a job

Everything here is a pure function of its arguments, so that every process makes the same plan.
"""
