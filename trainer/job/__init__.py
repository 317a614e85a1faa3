"""A job, from ``fleet.init`` to ``fleet.finish``: one of this process at a time.

In reading order::

    job                  role, models, optimizer, connection: a job with servers, or alone
    search               the update mode that `pserver plan --search` has found
    collective           a job without servers; gradient validation; the optimizer of such a job; a
                         job without servers whose model is divided
    files                the job's login at a file system behind a URL
    random_states        the states of a trainer's random sources
    found_schedulers     the schedulers of a job's optimizers
    position             the position of a job's scripts in a checkpoint
    save_schedule        the schedule by which all trainers save
    due_saves            the places at which a trainer joins these saves
    automatic_saves      checkpoints that a job writes by itself, and continues from
    datasets             fleet.InMemoryDataset and fleet.QueueDataset
    report               a script's reports of its training; the forwards and backwards of a trace;
                         fleet.trace; a pass on a terminal, or in a log
    loggers              reports in W&B, TensorBoard and the like, written by a thread
    exchange             metrics and decisions, which trainers exchange
    shared_values        fleet.all_reduce and the like
    synced_metrics       fleet.sync: metrics over all trainers
    save_load            checkpoints and exports
    checkpoint_settings  the folder and interval of automatic checkpoints
    followed_passes      follows a script that writes no automatic checkpoints, so that a
                         trainer that joins late finds its position
    part_saves           saves of which every server writes its part, while the job continues
    script_position      the position of a job's script

``trainer/fleet.py`` offers these to scripts; this room may import every other room of ``trainer``.
"""
