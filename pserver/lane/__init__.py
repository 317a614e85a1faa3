"""The steps of one lane of a server's job, from COMMIT to the new value.

In reading order::

    step            one trainer's step, with its states; the update that a record decides
    lane            takes the committed steps of one lane and applies each once
    together        the policy of lanes whose trainers step together: a round is an update
    independent     the policy of the other lanes: each step is an update of its own
    rounds          the steps of a round, merged; a model's synced buffers
    updates         the state of a lane, and its updates that have begun
    tasks           a step's update, in batches over several threads
    leases          the lease table, under the job's lock
    judge           gradient validation: outliers of norms, NaN and infinity
    values          slices that are read while another trainer's step updates them
    tables          a sparse table with its lock and clock; a snapshot read beside the steps
    recording       a server's recording of the job's log
    recorded_steps  decided steps as entries of a recorded log
    recorder        writes a recorded log in a thread of its own

The arithmetic is in ``pserver.dense`` and ``pserver.table``; this room decides when it runs.

May import: ``pserver.membership``, ``pserver.job_log``, ``pserver.leases``, ``pserver.telemetry``,
``pserver.dense``, ``pserver.table``, ``pserver.storage``, ``pserver.transport`` (frames and
arrays), the generated messages, and the files of the root.  No sockets and no gRPC.  ``tables`` is
imported when a program has tables, because it compiles their kernels.
"""
