"""The senders of lanes: a trainer's gradients to the servers, and values back.

In reading order::

    buffers      the synced buffers of a model, which its forward changes; the live trainers
    pipeline     messages that the script does not wait for; received values
    sync_lane    sync
    async_lane   async and half-async: a queue and a thread; closed steps that are sent in one
                 message; the last received values
    kstep_lane   geo and diloco
    parameters   slices as parts of live tensors; copies between a GPU and pinned memory; a warning
                 if a trainer's own initial values differed
    writes       external writes to parameters; the same in the k-step modes; sampled elements of
                 every tensor, by which writes are detected
    served_rows  rows of tables on servers (imports numba); tables that a script reads and writes
                 whole (imports numba)
    kstep_rows   rows that a k-step trainer steps by itself, in geo and DiLoCo modes (imports numba)

The room imports ``embedding`` and ``pserver.client``, and no generated message.
"""
