"""The trainers of a server's job, and the decisions of its log.

In reading order::

    members    the trainers of a job: joined, lost, announced; their reports and timeouts
    lifecycle  the job's states, failure and lock; the last events
    waits      waits of the job's threads, each at an event of its own; which trainer waits for
               which
    watermark  a trainer's progress in one lane: applied steps, outcomes, norms
    decisions  this server's end of the job's log: staged and decided steps, saves, loads and
               shrinks

May import: ``pserver.job_log``, ``pserver.telemetry``, ``pserver.transport``, the generated
messages, and the files of the root.
"""
