"""The job: everything that trainers share on one server, with the locks that guard it.

In reading order::

    job               the control calls, installing, files
    reload            the progress of a reload, and its losses
    rings             breaks rings of trainers that wait for one another
    gatherings        the gatherings of live trainers, which exchange their progress
    topics            the agreements of a job's trainers
    coordination      server 0's own state of the job, in a file
    program           slices, tables and lane executors of the present job; the memory that slices
                      leave to tables; the save that a later one may continue; what a server starts
                      with, and what it ends with
    averaged_steps    steps of lost trainers that count in averages only, or on servers only
    kept_texts        the memory that trainers' texts for one another take
    server_cut        all that a server holds, of one moment
    job_files         Save and Load
    background_saves  saves that are written while the job goes on
    job_trace         a server's part in traces
    status            Status
    barriers          the barriers of a job, on server 0
    script_position   the position of a job's script, for a trainer that has joined late

The arithmetic is in ``pserver.dense`` and ``pserver.table``; this room decides when it runs.

May import: ``pserver.job_log``, ``pserver.leases``, ``pserver.telemetry``, ``pserver.dense``,
``pserver.table``, ``pserver.checkpoint``, ``pserver.transport`` (the codec's dtypes and the byte
counters), the generated messages, and the files of the root.  No sockets and no gRPC.
``locked_table`` is imported when a program has tables, because it compiles their kernels.
"""
