"""Which samples a trainer trains on.

In reading order::

    lockstep_batches   a trainer's batches, up to the first that some trainer lacks
    passes             over data, counted and compared among trainers
    shared_randomness  the order of the samples of a pass
    sample_order       the order of the samples of a pass
    part               a trainer's part of an order
    sample_leases      which samples server 0 deals out to this trainer
    counted_reader     data whose batches are known by their numbers only
    leased_pass        batches of what is leased, of each kind of data
    leased_loader      batches of what is leased, of each kind of data
    leased_files       the same of the files of a dataset
    file_order         the same where trainers step together
    striped_files      the same where trainers step together
    striped_memory     the same of samples in memory
    sample_counts      how many samples the files have
    shard              this trainer's part of the data
    pass_log           the passes that a script has made, so that it finds its place again
    saves              checkpoints that a job writes by itself, and goes on from
    saved_batches      checkpoints that a job writes by itself, and goes on from

The room imports ``communicator`` and ``data``.
"""
