"""The samples that a trainer trains on.

In reading order::

    lockstep_batches   a trainer's batches, up to the first that some trainer lacks
    passes             over data, counted and compared among trainers
    shared_randomness  the random sources of a pass
    sample_order       the order of the samples of a pass
    sample_pass        one pass: a source, whose positions a dealer deals out
    part               a trainer's fixed part of an order: a dealer
    sample_leases      the leases by which server 0 deals out samples to this trainer
    leased_part        what leases deal out of a pass: a dealer
    sample_lists       the samples, or the batches, that a sampler has drawn: sources
    counted_reader     data whose batches are known by their numbers only: a source
    shard              this trainer's batches of a loader
    file_order         the order of files where trainers step together
    file_samples       the samples of a dataset's files: sources
    memory_samples     the samples in memory of a dataset: a source
    sample_counts      the numbers of samples of files
    pass_log           the passes of a script, for its position after a restart
    saves              the interface of automatic checkpoints
    saved_batches      batches of a job that writes automatic checkpoints

The room imports ``collective``, ``communicator`` and ``data``.
"""
