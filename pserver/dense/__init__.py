"""Dense parameters on a server: the slices it holds, how gradients are merged, and update rules at
work on slices.

A program cuts parameters into slices and places them on servers.  A server holds the memory of its
slices; each has a :class:`~pserver.dense.update.SliceUpdate`, made from an optimize block of
the server's program.

The files, in reading order::

    compression  a gradient with fewer bits: encoded by trainers, decoded by servers
    update       torch's optimizers over slices, equal to the bit to those over whole parameters;
                 the mean over trainers, and clipping coefficients of merged gradients
    slices       all slices of one server, and their states by variable name; copies of all slices
                 and states, as of one moment; the states that a checkpoint of whole tensors does
                 not have

This room is pure: no thread, lock, socket, clock or environment.  It imports torch, ``transpiler``,
``pserver.errors``, and of ``pserver.transport`` the codec's names of dtypes.
"""
