"""The job: everything that trainers share on one server, with the locks that guard it.

In reading order::

    job               the control calls, installing, files
    reload            the progress of a reload, and its losses
    rings             breaks rings of trainers that wait for one another
    meetings          the meeting place of a job's trainers, and the store of their texts
    coordination      the file of server 0's own state of the job
    program           an installed program: slices, tables, lanes; what a server starts and ends
                      with
    averaged_steps    steps of lost trainers that count in averages only, or on servers only
    server_cut        a server's values as of one moment
    job_files         Save and Load
    background_saves  saves that are written while the job continues
    job_trace         a server's part in traces
    status            Status

The arithmetic is in ``pserver.dense`` and ``pserver.table``; this room decides when it runs.

May import: ``pserver.lane``, ``pserver.membership``, ``pserver.job_log``, ``pserver.leases``,
``pserver.telemetry``, ``pserver.dense``, ``pserver.table``, ``pserver.checkpoint``,
``pserver.storage``, ``pserver.transport`` (the byte counters), the generated messages, and the
files of the root.  No sockets and no gRPC.  ``pserver.lane.tables`` is imported when a program has
tables, because it compiles their kernels.
"""
