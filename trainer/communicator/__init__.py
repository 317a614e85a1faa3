"""A trainer's side of a job with servers: it sends gradients, receives parameters, looks rows up.

In reading order::

    communicator   the job as the script's thread sees it: start, send, close_step, finish_step
    termination    SIGTERM, and a trainer's shutdown
    joint_calls    barriers and the script's position: the calls of all trainers
    transfer       values and optimizer states outside of steps
    trace          one trace of the job: this trainer's phases, and the spans of all processes
    probe          the plan, or the costs of some steps, for `pserver plan`
    tables         the embeddings of a job's models, by table (imports numba)
    table_sources  the sources of embeddings' rows (imports numba)
    metrics        the metrics of a trainer

Requests to servers start here, except the rendezvous of a dense all-reduce.  This room imports
``collective``, ``embedding``, ``environment``, ``senders`` and ``pserver.client``, and no generated
message.
"""
