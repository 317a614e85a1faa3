"""What ``fleet.init`` begins and ``fleet.finish`` ends: one job of this process at a time.

In reading order::

    job              role, models, optimizer, connection: a job with servers, or alone
    arrival          a trainer that has not joined yet
    collective_job   a job without servers
    hybrid_job       a job without servers whose model is divided
    current          the job that this process takes part in
    passes           over data, counted and compared among trainers
    shared_randomness, sample_order
                     the order of the samples of a pass
    part             a trainer's part of an order
    data_shard       this trainer's part of the data
    queries          what a script may ask about its job
    joint_call       a part of a call that succeeds, or raises, on all trainers
    save_load        checkpoints and exports
    table_admin      status and shrinking of tables

``trainer/fleet.py`` offers these to scripts; this room may import every other room of ``trainer``.
"""
