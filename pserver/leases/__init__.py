"""The lease table of a job: the samples that each trainer holds.  No clock, thread or socket.

In reading order::

    epoch  one epoch: its leases, stripes and account; sets of positions as disjoint intervals
    table  the epochs of a job, and its trainers

An epoch is a sequence that every trainer has alike: a permutation of a data set's samples, drawn
from the epoch's seed; the batches that a sampler of the script's draws, or an iterable gives; or
the samples of files.  The table deals out positions of it; it never sees a sample.

[Note: epochs of unknown length]  The end of iterable data, and of files, is unknown until a trainer
meets it.  Positions then lie in segments (:mod:`~pserver.leases.epoch`), which are dealt out as if
they had no end.  The first trainer that meets an end reports it with its next request; what was
leased, or kept for a trainer, behind it vanishes, as it was never there.  A trainer that meets
another end is refused.  While the end is not known a lease has at most as large a part of what was
dealt already as it would otherwise have of what is left.

[Note: the life of a position]  ::

    free, or a trainer's own --lease--> leased --its step is decided--> decided
              ^                           |
              |---- fenced, handed back --|
                                          `--the epoch is over, no step had it--> skipped

A lease's positions count when a record decides it: "step n of trainer t consumed these".  What a
lost trainer had leased, and no record names, goes back and is dealt out again.  So each position is
decided once or counted as skipped, whatever dies.

[Note: trainers that step together]  A sync step needs every trainer, so each has a stripe of its
own (:class:`~pserver.leases.epoch.Stripes`), in the order that jobs without leases have: a
cluster's run stays equal to a single node's.  What a lost trainer had of its stripe waits for its
replacement.  If no process has come back when all others have used up theirs, it is divided among
them, in equally many batches each.  A replacement that was not waited for gives up as many batches
as the others have taken meanwhile, so that all stripes end with one step; these are divided at the
end, too.

Samples in memory are dealt out in the same way where trainers do not step together, as each has its
own: such an epoch is ``uneven``.  No trainer gives up what it has missed then, and what is left at
the end is divided as it comes.

[Note: the end of an epoch]  A trainer that has nothing left asks once more, and waits: while steps
of others are not decided, their samples may come back.  The epoch is over when nothing is left to
deal, and all that is leased has been given to scripts that have taken no step since, and that
wait, too (``unstepped``).  Such batches count if a step behind the loop consumes them; when the
trainer continues with another pass over the same data, or leaves, they count as skipped.

It imports the standard library only.
"""
