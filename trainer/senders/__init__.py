"""How a lane sends: a trainer's gradients to the servers, and values back.

In reading order::

    buffers      the buffers of a model, which its forward changes; which trainers are still there
    pipeline     messages that the script does not wait for
    sync_lane    sync
    async_lane   async and half-async: a queue and a thread; closed steps that leave in one message;
                 the same, where other trainers step meanwhile
    kstep_lane   geo and diloco
    parameters   slices as parts of live tensors; copies between a GPU and pinned memory; a warning
                 where a trainer's own values differed
    writes       what the script has written into parameters; the same in the k-step modes; a few
                 elements of every tensor: has anything been written?
    served_rows  rows of tables on servers (imports numba); tables that a script reads and writes
                 whole (imports numba)
    kstep_rows   rows that a k-step trainer steps by itself (imports numba); the same between two
                 exchanges (imports numba)

The room imports ``embedding`` and ``pserver.client``, and no generated message.
"""
