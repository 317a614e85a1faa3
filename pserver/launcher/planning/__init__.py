"""Predicting the step of a job from a short run of its script on this machine.

In reading order::

    plan  ``pserver plan``: predicts, searches clusters and modes, prints tables
    cost  the cost model: measured quantities and a cluster -> a predicted step; pure

[Note: what a probe measures]  A probe is a small job on this machine: one trainer, and as many
servers as the job will have, four at most.  The trainer gets the job's number of trainers, so that
its batch and its part of the data are the real ones; but the servers wait for it alone.  It takes
some steps to warm up.  From then on it counts, for each step, how long its thread was within
``step()`` (the exchange) and outside (forward, backward and the script's own work), the processor
time of both, and the bytes of every server; the processor time of the servers is read from the
system.  Everything that a further trainer, a link or another machine changes is computed from these
by ``cost``.
"""
