"""The plan of a job: which server holds what, how it is updated and when it travels.

Reading order::

    modes      one Mode for each update mode: all that other code asks about it
    settings   the settings of a job with servers, one row a key
    plan       Plan and its parts: Lane, Placement, Slice; manifest and fingerprint
    lanes      the values that a lane may have, names in it, the lane in words
    planner    puts all of this together: plan_parameters
    placement  cuts variables into slices and chooses their servers, or the trainers that update
               them

Everything here is a pure function of its arguments, so that every process makes the same plan.
"""
