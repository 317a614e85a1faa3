"""The trainers of a server's job, and the decisions of its log.

In reading order::

    members    trainers, and their timeouts; trainers that have not joined yet; the kept part of
               trainers' reports; waits of trainers for one another
    lifecycle  the job's states, its failure, and the job's lock; the last events, for observers
    waits      the waits of the job's threads, each at an event of its own; the table of trainers'
               waits, and the rings among them
    watermark  a trainer's progress in one lane; the history of norms of one trainer's pushes of one
               variable; the outcome of a step
    decisions  this server's end of the job's log: staged and decided steps; no step changes a value
               during a save, a load or a shrink; saves and shrinks, each at its place among the
               steps

May import: ``pserver.job_log``, ``pserver.leases``, ``pserver.telemetry``, the generated messages,
and the files of the root.
"""
