"""A job, from ``fleet.init`` to ``fleet.finish``: one of this process at a time.

In reading order::

    job                  role, models, optimizer, connection: a job with servers, or alone
    search               the update mode that `pserver plan --search` has found
    collective           a job without servers; whether a backward has averaged the gradients of a
                         step; the optimizer of a job without servers; a job without servers whose
                         model is divided
    files                who the job is at a file system behind a URL
    random_states        of a trainer's random sources
    found_schedulers     of a job's optimizers
    save_schedule        when all trainers save
    due_saves            where a trainer comes to these saves
    automatic_saves      checkpoints that a job writes by itself, and goes on from
    datasets             fleet.InMemoryDataset and fleet.QueueDataset
    report               what a script says of its training; the forwards and backwards of a trace;
                         fleet.trace; the same, as TensorBoard's files; a pass on a terminal, or in
                         a log
    exchange             metrics and decisions, which trainers tell one another
    shared_values        fleet.all_reduce and the like
    synced_metrics       fleet.sync: metrics over all trainers
    save_load            checkpoints and exports
    checkpoint_settings  where and how often a job saves by itself
    followed_passes      what follows a script that writes no checkpoints by itself, so that a
                         trainer that joins late finds where it is
    part_saves           saves of which every server writes its part, while the job goes on
    script_place         where a script is when its job saves, as a checkpoint has it
    script_position      where a job's script is

``trainer/fleet.py`` offers these to scripts; this room may import every other room of ``trainer``.
"""
