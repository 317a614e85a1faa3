"""Predicting the step of a job from a short run of its script on this machine.

In reading order::

    plan  ``pserver plan``: predicts, searches clusters and modes, prints tables
    cost  the cost model: measured quantities and a cluster -> a predicted step; pure

[Note: what a probe measures]  A probe is a small job on this machine: one trainer or two, and as
many servers as the job will have, four at most.  Where each process is to have a machine of its
own, there are no more servers than half of the cores, with one thread each, and trainers divide
the other cores: none may disturb another one.  Each trainer gets the job's number of
trainers, so that its batch and its part of the data are the real ones; but the servers wait for
those of the probe alone.  Trainer 0 takes some steps to warm up.  From then on it counts, for each
step, how long its thread was within ``step()`` (the exchange) and outside (forward, backward and
the script's own work), the processor time of both, and the bytes of every server; servers say how
long they have merged and updated, and their processor time is read from the system.  What one more
trainer costs is the difference of two probes.  Everything that further trainers, a link or another
machine change is computed from these by ``cost``.
"""
