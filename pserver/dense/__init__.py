"""Dense parameters on a server: the slices it holds, how gradients are merged, and update rules at
work on slices.

A program cuts parameters into slices and places them on servers.  A server holds the memory of its
slices; each has a :class:`~pserver.dense.update.SliceUpdate`, made from an optimize block of
the server's program.

The files, in reading order::

    compression  a gradient with fewer bits: encoded by trainers, decoded by servers
    update       torch's optimizers over slices, equal to the bit to those over whole parameters;
                 the mean over trainers, and clipping
    slices       the slices of one server with their states; a copy of all, as of one moment

This room is pure: no thread, lock, socket, clock or environment.  It imports torch, ``transpiler``,
``pserver.errors``, and of ``pserver.transport`` the names of dtypes, the norm of a gradient and
memory that trainers of this host can read.
"""
