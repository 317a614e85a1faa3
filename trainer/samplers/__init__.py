"""The samples that a trainer trains on.

In reading order::

    lockstep_batches   a trainer's batches, up to the first that some trainer lacks
    passes             over data, counted and compared among trainers
    shared_randomness  the random sources of a pass
    sample_order       the order of the samples of a pass
    part               a trainer's part of an order
    sample_leases      the leases by which server 0 deals out samples to this trainer
    counted_reader     data whose batches are known by their numbers only
    leased_pass        the leased batches of a pass
    leased_loader      the leases of a loader
    leased_files       the leased batches of a dataset's files
    file_order         the order of files where trainers step together
    striped_files      the batches of files where trainers step together
    striped_memory     the batches of samples in memory where leases deal them out
    sample_counts      the numbers of samples of files
    shard              this trainer's part of the data
    pass_log           the passes of a script, for its position after a restart
    saves              the interface of automatic checkpoints
    saved_batches      batches of a job that writes automatic checkpoints

The room imports ``collective``, ``communicator`` and ``data``.
"""
