"""The plan of a job: which server holds what, how it is updated and when it travels.

Reading order::

    modes      one Mode for each update mode: all that other code asks about it
    settings   one row of a table of settings, and the kinds of values; the settings of a job with
               servers, one row a key
    plan       Plan and its parts: Lane, Placement, Slice; manifest and fingerprint; process groups
               of a job without servers; what a trainer writes down of each step, for people to read
    lanes      which values a lane may have, names in it, the lane in words
    planner    puts all of this together: plan_parameters; lanes by patterns of names, before the
               parameters are known; which compression the gradients of a parameter or a table have
    placement  cuts variables into slices, chooses their servers; which trainer of such a job
               updates what, where updates are sharded

Everything here is a pure function of its arguments, so that every process makes the same plan.
"""
