"""What ``fleet.init`` begins and ``fleet.finish`` ends: one job of this process at a time.

In reading order::

    job              role, models, optimizer, connection: a job with servers, or alone
    arrival          a trainer that has not joined yet
    collective_job   a job without servers
    hybrid_job       a job without servers whose model is divided
    current          the job that this process takes part in
    data_shard       this trainer's part of the data
    queries          what a script may ask about its job
    save_load        checkpoints and exports
    table_admin      status and shrinking of tables

``trainer/fleet.py`` offers these to scripts; this room may import every other room of ``trainer``.
"""
