"""The trainers of a server's job, and the decisions of its log.

In reading order::

    members    trainers, and their timeouts; trainers that have not joined yet; what is kept of what
               trainers say of themselves; waits of trainers for one another
    lifecycle  the job's states, its failure, and the job's lock; what has happened, for who watches
    waits      the waits of the job's threads, each at an event of its own; who waits for whom, and
               which of these waits wait for one another
    watermark  how far a trainer has come in one lane; what the norms of one trainer's pushes of one
               variable have been; what a step has led to
    decisions  this server's end of the job's log: what is staged, what is decided; no step changes
               a value during a save, a load or a shrink; saves and shrinks, each at its place among
               the steps

May import: ``pserver.job_log``, ``pserver.leases``, ``pserver.telemetry``, the generated messages,
and the files of the root.
"""
