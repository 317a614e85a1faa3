"""The senders of lanes: a trainer's gradients to the servers, and values back.

In reading order::

    buffers              a model's synced buffers
    live_trainers        the live trainers of a job, and their leader
    pipeline             messages that the script does not wait for; received values
    gradient_validation  NaN, infinity and outliers of norms in a step's gradients
    sync_lane            sync
    async_lane           async and half-async: a queue and a thread
    kstep_lane           geo and diloco
    parameters           slices as parts of live tensors; copies between a GPU and pinned memory
    writes               external writes to parameters, in every mode
    served_rows          rows of tables on servers (imports numba)
    kstep_rows           rows that a k-step trainer steps by itself (imports numba)

The room imports ``embedding``, ``environment`` and ``pserver.client``, and no generated message.
"""
