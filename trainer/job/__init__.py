"""What ``fleet.init`` begins and ``fleet.finish`` ends: one job of this process at a time.

In reading order::

    job                   role, models, optimizer, connection: a job with servers, or alone
    further_optimizers    what a job's optimizers must have alike
    searched_mode         the update mode that `pserver plan --search` has found
    arrival               a trainer that has not joined yet
    met_trainers          what trainers beside servers do among themselves: averages, batch norms
    lockstep_batches      a trainer's batches, up to the first that some trainer lacks
    averaged_gradients    whether a backward has averaged the gradients of a step
    collective_optimizer  the optimizer of a job without servers
    collective_job        a job without servers
    hybrid_job            a job without servers whose model is divided
    current               the job that this process takes part in
    file_system           who the job is at a file system behind a URL
    passes                over data, counted and compared among trainers
    shared_randomness     the order of the samples of a pass
    sample_order          the order of the samples of a pass
    part                  a trainer's part of an order
    sample_leases         which samples server 0 deals out to this trainer
    counted_reader        data whose batches are known by their numbers only
    leased_pass           batches of what is leased, of each kind of data
    leased_loader         batches of what is leased, of each kind of data
    leased_files          the same of the files of a dataset
    file_order            the same where trainers step together
    striped_files         the same where trainers step together
    striped_memory        the same of samples in memory
    sample_counts         how many samples the files have
    data_shard            this trainer's part of the data
    data_position         how far a pass over it has come
    pass_log              the passes that a script has made, so that it finds its place again
    random_states         of a trainer's random sources
    found_schedulers      of a job's optimizers
    save_schedule         when all trainers save
    due_saves             where a trainer comes to these saves
    saves                 checkpoints that a job writes by itself, and goes on from
    automatic_saves       checkpoints that a job writes by itself, and goes on from
    saved_batches         checkpoints that a job writes by itself, and goes on from
    datasets              fleet.InMemoryDataset and fleet.QueueDataset
    queries               what a script may ask about its job
    reported              what a script says of its training
    report                what a script says of its training
    eager_spans           the forwards and backwards of a trace
    trace                 fleet.trace
    tensorboard           the same, as TensorBoard's files
    progress_bar          a pass on a terminal, or in a log
    exchange              metrics and decisions, which trainers tell one another
    shared_values         fleet.all_reduce and the like
    synced_metrics        fleet.sync: metrics over all trainers
    save_load             checkpoints and exports
    table_admin           status and shrinking of tables
    checkpoint_settings   where and how often a job saves by itself
    followed_passes       what follows a script that writes no checkpoints by itself, so that a
                          trainer that joins late finds where it is
    joint_plan            the plan of a job, from what the script has asked for
    part_saves            saves of which every server writes its part, while the job goes on
    script_place          where a script is when its job saves, as a checkpoint has it
    script_position       where a job's script is

``trainer/fleet.py`` offers these to scripts; this room may import every other room of ``trainer``.
"""
