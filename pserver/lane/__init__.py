"""The steps of one lane of a server's job, from COMMIT to the new value.

In reading order::

    lane            takes the committed steps of one lane and applies each once
    rounds          one step that all trainers of a sync job take together; decided steps, with all
                    that their update reads; a model's synced buffers
    tasks           a committed step's update, in batches; what of a lane one call updates; the
                    threads that run the batches of large steps
    leases          the lease table, under the job's lock
    judge           gradient validation: steps with a norm far beyond its history, with a NaN or an
                    infinity
    values          slices that are read while another trainer's step updates them; a slice as it is
                    between two updates
    tables          a sparse table with its lock and its clock; a table of one moment, read beside
                    the steps that change it
    recording       a server's recording of the job's log
    recorded_steps  decided steps as entries of a recorded log
    recorder        writes a recorded log, in a thread of its own

The arithmetic is in ``pserver.dense`` and ``pserver.table``; this room decides when it runs.

May import: ``pserver.membership``, ``pserver.job_log``, ``pserver.leases``, ``pserver.telemetry``,
``pserver.dense``, ``pserver.table``, ``pserver.transport`` (frames and arrays), the generated
messages, and the files of the root.  No sockets and no gRPC.  ``tables`` is imported when a program
has tables, because it compiles their kernels.
"""
